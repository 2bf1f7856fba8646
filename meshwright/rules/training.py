"""Rules on batch and learning-rate schedule."""

from __future__ import annotations

from meshwright.models.lora import layer_targets
from meshwright.rules.facts import Facts
from meshwright.rules.rule import Rule


def _batch_splits(facts: Facts) -> bool:
    return facts.training is None or facts.training.global_batch_size % facts.replicas == 0


def _micro_batches_split(facts: Facts) -> bool:
    micro_batches = facts.parallelism.micro_batches
    if facts.training is None or micro_batches is None:
        return True
    return facts.training.global_batch_size % (facts.replicas * micro_batches) == 0


def _warm_up_ends(facts: Facts) -> bool:
    return facts.training is None or facts.training.optimizer.warmup_steps <= facts.training.steps


def _evaluated_on_something(facts: Facts) -> bool:
    evaluated = facts.training is not None and facts.training.evaluation is not None
    return not evaluated or facts.data is None or facts.data.held_out > 0


def _rate_decays(facts: Facts) -> bool:
    optimizer = facts.training.optimizer if facts.training is not None else None
    return optimizer is None or optimizer.min_learning_rate <= optimizer.learning_rate


def _every_layer_is_adapted(facts: Facts) -> bool:
    model, training = facts.model, facts.training
    if model is None or training is None or training.lora is None:
        return True
    in_every_layer = layer_targets(
        latent=model.latent is not None, gated=model.gated is not False, mixture=model.mixture is not None
    )
    return not in_every_layer.isdisjoint(training.lora.targets)


TRAINING_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "training.globalBatchSize",
        "must be divisible by `replicas`: each replica takes the same number of sequences",
        "!has(self.training) || self.training.globalBatchSize % self.replicas == 0",
        _batch_splits,
    ),
    Rule(
        "parallelism.microBatches",
        "times `replicas` must divide `training.globalBatchSize`: every micro-batch has the same number of sequences",
        "!has(self.training) || !has(self.parallelism.microBatches)"
        " || self.training.globalBatchSize % (self.replicas * self.parallelism.microBatches) == 0",
        _micro_batches_split,
    ),
    Rule(
        "training.optimizer.warmupSteps",
        "must be at most `training.steps`",
        "!has(self.training) || self.training.optimizer.warmupSteps <= self.training.steps",
        _warm_up_ends,
    ),
    Rule(
        "training.evaluation",
        "needs `data.heldOut` above 0: it is measured on documents that are never trained on",
        "!has(self.training) || !has(self.training.evaluation) || !has(self.data) || self.data.heldOut > 0.0",
        _evaluated_on_something,
    ),
    Rule(
        "training.optimizer.minLearningRate",
        "must be at most `training.optimizer.learningRate`: the rate decays towards it",
        "!has(self.training) || self.training.optimizer.minLearningRate <= self.training.optimizer.learningRate",
        _rate_decays,
    ),
    Rule(
        "training.lora.targets",
        "must name a matrix that every layer has: add `Query` or `Output`; layers have `Key` and `Value` without "
        "`model.latent`, `Up` and `Down` without `model.mixture`, and `Gate` unless `model.gated: false`",
        "!has(self.training) || !has(self.training.lora) || !has(self.model)"
        " || self.training.lora.targets.exists(t, t in ['Query', 'Output']"
        " || (t in ['Key', 'Value'] && !has(self.model.latent))"
        " || (t in ['Gate', 'Up', 'Down'] && !has(self.model.mixture)"
        " && (t != 'Gate' || !has(self.model.gated) || self.model.gated)))",
        _every_layer_is_adapted,
    ),
)
