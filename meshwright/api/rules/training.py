"""Rules on data, batch and learning-rate schedule."""

from __future__ import annotations

from meshwright.api.rules.rule import Rule
from meshwright.api.spec import DataSource, Packing
from meshwright.api.spec import ParallelTrainingJobSpec as Spec


def _batch_splits(spec: Spec) -> bool:
    return spec.training is None or spec.training.global_batch_size % spec.replicas == 0


def _micro_batches_split(spec: Spec) -> bool:
    micro_batches = spec.parallelism.micro_batches
    if spec.training is None or micro_batches is None:
        return True
    return spec.training.global_batch_size % (spec.replicas * micro_batches) == 0


def _claim_for_files(spec: Spec) -> bool:
    return spec.data is None or (spec.data.source is DataSource.FILES) == (spec.data.claim_name is not None)


def _pattern_for_files(spec: Spec) -> bool:
    return spec.data is None or spec.data.source is DataSource.FILES or spec.data.pattern == "**/*"


def _balance_has_documents(spec: Spec) -> bool:
    return spec.data is None or not spec.data.balance or spec.data.packing is Packing.DOCUMENTS


def _warm_up_ends(spec: Spec) -> bool:
    return spec.training is None or spec.training.optimizer.warmup_steps <= spec.training.steps


def _rate_decays(spec: Spec) -> bool:
    optimizer = spec.training.optimizer if spec.training is not None else None
    return optimizer is None or optimizer.min_learning_rate <= optimizer.learning_rate


TRAINING_RULES = (
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
        "data.claimName",
        "must be set with `data.source: Files`, and only then: name the PersistentVolumeClaim that holds the files",
        "!has(self.data) || (self.data.source == 'Files') == has(self.data.claimName)",
        _claim_for_files,
    ),
    Rule(
        "data.pattern",
        "may only be set with `data.source: Files`: remove it",
        "!has(self.data) || self.data.source == 'Files' || self.data.pattern == '**/*'",
        _pattern_for_files,
    ),
    Rule(
        "data.balance",
        "needs `data.packing: Documents`: rows that are one document each cost the same",
        "!has(self.data) || !self.data.balance || self.data.packing == 'Documents'",
        _balance_has_documents,
    ),
    Rule(
        "training.optimizer.warmupSteps",
        "must be at most `training.steps`",
        "!has(self.training) || self.training.optimizer.warmupSteps <= self.training.steps",
        _warm_up_ends,
    ),
    Rule(
        "training.optimizer.minLearningRate",
        "must be at most `training.optimizer.learningRate`: the rate decays towards it",
        "!has(self.training) || self.training.optimizer.minLearningRate <= self.training.optimizer.learningRate",
        _rate_decays,
    ),
)
