"""Rules on `training`: batch, learning rate, adapters, number formats, optimizer and offload."""

from __future__ import annotations

from meshwright.api.data import Packing
from meshwright.api.data_parallel import GradientCompression
from meshwright.api.precision import Fp8Scaling, Fp8Update, Precision
from meshwright.api.training import (
    ActivationCheckpointing,
    AnomaliesSpec,
    AnomalyAction,
    OptimizerName,
    OptimizerOffload,
    OptimizerSpec,
    RateDecay,
)
from meshwright.models.lora import layer_targets
from meshwright.rules.facts import SCALED_BATCH, Facts, scales_batch
from meshwright.rules.rule import Rule, is_asynchronous, schedule_is, schedule_is_not, schedule_names
from meshwright.schedules.registry import kind_of

_NO_ANOMALIES_OR = "!has(self.training) || !has(self.training.anomalies) || "


def _batch_splits(facts: Facts) -> bool:
    return scales_batch(facts) or facts.training is None or facts.training.global_batch_size % facts.replicas == 0


def _micro_batches_split(facts: Facts) -> bool:
    micro_batches = facts.parallelism.micro_batches
    if facts.training is None or micro_batches is None or scales_batch(facts):
        return True
    return facts.training.global_batch_size % (facts.replicas * micro_batches) == 0


def _optimizer(facts: Facts) -> OptimizerSpec | None:
    return facts.training.optimizer if facts.training is not None else None


def _decay_fits(facts: Facts) -> bool:
    training, optimizer = facts.training, _optimizer(facts)
    if training is None or optimizer is None or optimizer.decay_steps is None:
        return True
    return optimizer.warmup_steps + optimizer.decay_steps <= training.steps


def _decay_has_steps(facts: Facts) -> bool:
    optimizer = _optimizer(facts)
    return optimizer is None or optimizer.decay_steps is None or optimizer.decay_or_default.has_end


def _decay_continues_warm_up(facts: Facts) -> bool:
    optimizer = _optimizer(facts)
    return optimizer is None or optimizer.decay is not RateDecay.INVERSE_SQUARE_ROOT or optimizer.warmup_steps > 0


def _warm_up_ends(facts: Facts) -> bool:
    return facts.training is None or facts.training.optimizer.warmup_steps <= facts.training.steps


def _evaluated_on_something(facts: Facts) -> bool:
    evaluated = facts.training is not None and facts.training.evaluation is not None
    return not evaluated or facts.data is None or facts.data.held_out > 0


def _rate_decays(facts: Facts) -> bool:
    optimizer = _optimizer(facts)
    return optimizer is None or optimizer.min_learning_rate <= optimizer.learning_rate


def _every_layer_is_adapted(facts: Facts) -> bool:
    model, training = facts.model, facts.training
    if model is None or training is None or training.lora is None:
        return True
    in_every_layer = layer_targets(
        latent=model.latent is not None, gated=model.gated is not False, mixture=model.mixture is not None
    )
    return not in_every_layer.isdisjoint(training.lora.targets)


def _adapter_has_its_model(facts: Facts) -> bool:
    training = facts.training
    if training is None or training.lora is None or training.lora.initial_adapter is None:
        return True
    return training.initial_weights is not None


def _masters_unless_bf16(facts: Facts) -> bool:
    training = facts.training
    return training is None or training.master_weights or training.precision is Precision.BF16


def _masters_for_muon(facts: Facts) -> bool:
    training = facts.training
    return training is None or training.master_weights or training.optimizer.name is OptimizerName.ADAMW


def _offload_needs_adamw(facts: Facts) -> bool:
    training = facts.training
    if training is None or training.optimizer.offload is OptimizerOffload.NONE:
        return True
    return training.master_weights and training.optimizer.name is OptimizerName.ADAMW


def _path_for_file(facts: Facts) -> bool:
    optimizer = _optimizer(facts)
    if optimizer is None:
        return True
    return (optimizer.offload is OptimizerOffload.FILE) == (optimizer.offload_path is not None)


def _path_for_parameters(facts: Facts) -> bool:
    training = facts.training
    return training is None or training.parameter_offload_path is None or training.parameter_offload


def _fp8_precision(facts: Facts) -> bool:
    training = facts.training
    return training is None or training.fp8 is None or training.precision in (Precision.BF16, Precision.FP32)


def _fp8_without_lora(facts: Facts) -> bool:
    training = facts.training
    return training is None or training.fp8 is None or training.lora is None


def _rowwise_is_dynamic(facts: Facts) -> bool:
    fp8 = facts.training.fp8 if facts.training is not None else None
    return fp8 is None or fp8.scaling is Fp8Scaling.TENSORWISE or fp8.update is Fp8Update.DYNAMIC


def _gather_has_one_known_scale(facts: Facts) -> bool:
    fp8 = facts.training.fp8 if facts.training is not None else None
    if fp8 is None or not fp8.all_gather:
        return True
    return fp8.scaling is Fp8Scaling.TENSORWISE and fp8.update is not Fp8Update.DELAYED


def _varlen_has_documents(facts: Facts) -> bool:
    training = facts.training
    if training is None or not training.varlen_attention:
        return True
    return facts.data is not None and facts.data.packing is Packing.DOCUMENTS and training.attention_dropout == 0


def _has_volume(facts: Facts) -> bool:
    return facts.checkpoint is not None and facts.checkpoint.claim_name is not None


def _tracking_has_a_directory(facts: Facts) -> bool:
    training = facts.training
    return training is None or training.tracking is None or _has_volume(facts)


def _anomalies(facts: Facts) -> AnomaliesSpec | None:
    return facts.training.anomalies if facts.training is not None else None


def _anomalies_before_updates(facts: Facts) -> bool:
    return _anomalies(facts) is None or not kind_of(facts.parallelism.order).asynchronous


def _anomalies_without_islands(facts: Facts) -> bool:
    return _anomalies(facts) is None or facts.training is None or facts.training.outer is None


def _goes_back_to_a_checkpoint(facts: Facts) -> bool:
    spec = _anomalies(facts)
    return spec is None or facts.checkpoint is not None or AnomalyAction.GO_BACK not in (spec.non_finite, spec.spike)


def _repeats_bit_by_bit(facts: Facts) -> bool:
    spec, training, model = _anomalies(facts), facts.training, facts.model
    if spec is None or spec.repeat_every_steps is None or training is None:
        return True
    exact = facts.parallelism.data_parallel.compression is GradientCompression.NONE and training.deterministic
    return exact and (model is None or model.mixture is None)


def _selective_layers_are_whole(facts: Facts) -> bool:
    """Whether no technique breaks the graph of a compiled layer, in which `Selective` chooses what to store."""
    training, p = facts.training, facts.parallelism
    if training is None or not training.compile:
        return True
    if training.activation_checkpointing is not ActivationCheckpointing.SELECTIVE:
        return True
    in_pieces = (
        (p.tensor or 1) > 1
        or p.context_or_default > 1
        or (facts.data is not None and facts.data.packing is Packing.DOCUMENTS)
        or (facts.model is not None and facts.model.mixture is not None)
        or (facts.model is not None and 0 < (facts.model.sliding_window or 0) < training.sequence_length)
        or (training.fp8 is not None and training.fp8.update is Fp8Update.DELAYED)
        or ((p.pipeline or 1) > 1 and not kind_of(p.order).whole_backward)
    )
    return not in_pieces


def _selective_layers_are_whole_cel() -> str:
    return (
        "!has(self.training) || !self.training.compile || !has(self.training.activationCheckpointing)"
        " || self.training.activationCheckpointing != 'Selective'"
        " || ((!has(self.parallelism.tensor) || self.parallelism.tensor == 1) && self.parallelism.context == 1"
        " && (!has(self.data) || self.data.packing != 'Documents') && (!has(self.model) || !has(self.model.mixture)"
        " && (!has(self.model.slidingWindow) || self.model.slidingWindow == 0"
        " || self.model.slidingWindow >= self.training.sequenceLength))"
        " && (!has(self.training.fp8) || self.training.fp8.update != 'Delayed')"
        " && (!has(self.parallelism.pipeline) || self.parallelism.pipeline == 1"
        f" || {schedule_is(lambda kind: kind.whole_backward)}))"
    )


TRAINING_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "training.globalBatchSize",
        "must be a multiple of `replicas`, because each replica trains on the same number of sequences: change one "
        "of them",
        f"{SCALED_BATCH} || !has(self.training) || self.training.globalBatchSize % self.replicas == 0",
        _batch_splits,
    ),
    Rule(
        "parallelism.microBatches",
        "times `replicas` must divide `training.globalBatchSize`, because every micro-batch has the same number of "
        "sequences",
        f"{SCALED_BATCH} || !has(self.training) || !has(self.parallelism.microBatches)"
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
        "training.optimizer.decaySteps",
        "plus `training.optimizer.warmupSteps` must be at most `training.steps`",
        "!has(self.training) || !has(self.training.optimizer.decaySteps)"
        " || self.training.optimizer.warmupSteps + self.training.optimizer.decaySteps <= self.training.steps",
        _decay_fits,
    ),
    Rule(
        "training.optimizer.decaySteps",
        "is not supported with `decay: Constant` and `InverseSquareRoot`: remove it",
        "!has(self.training) || !has(self.training.optimizer.decaySteps) || !has(self.training.optimizer.decay)"
        " || !(self.training.optimizer.decay in ['Constant', 'InverseSquareRoot'])",
        _decay_has_steps,
    ),
    Rule(
        "training.optimizer.warmupSteps",
        "must be at least 1 with `decay: InverseSquareRoot`, whose rates follow from it",
        "!has(self.training) || !has(self.training.optimizer.decay)"
        " || self.training.optimizer.decay != 'InverseSquareRoot' || self.training.optimizer.warmupSteps > 0",
        _decay_continues_warm_up,
    ),
    Rule(
        "training.evaluation",
        "needs documents that are excluded from training: raise `data.heldOut` above 0",
        "!has(self.training) || !has(self.training.evaluation) || !has(self.data) || self.data.heldOut > 0.0",
        _evaluated_on_something,
    ),
    Rule(
        "training.optimizer.minLearningRate",
        "must be at most `training.optimizer.learningRate`, because the rate decays to it",
        "!has(self.training) || self.training.optimizer.minLearningRate <= self.training.optimizer.learningRate",
        _rate_decays,
    ),
    Rule(
        "training.lora.targets",
        "must contain a matrix that every layer has: add `Query` or `Output`. Layers have `Key` and `Value` "
        "without `model.latent`, `Up` and `Down` without `model.mixture`, and `Gate` without `model.mixture` if "
        "`model.gated` is true",
        "!has(self.training) || !has(self.training.lora) || !has(self.model)"
        " || self.training.lora.targets.exists(t, t in ['Query', 'Output']"
        " || (t in ['Key', 'Value'] && !has(self.model.latent))"
        " || (t in ['Gate', 'Up', 'Down'] && !has(self.model.mixture)"
        " && (t != 'Gate' || !has(self.model.gated) || self.model.gated)))",
        _every_layer_is_adapted,
    ),
    Rule(
        "training.lora.initialAdapter",
        "needs `training.initialWeights`, the model that the adapter belongs to: add it",
        "!has(self.training) || !has(self.training.lora) || !has(self.training.lora.initialAdapter)"
        " || has(self.training.initialWeights)",
        _adapter_has_its_model,
    ),
    Rule(
        "training.masterWeights",
        "can only be false with `training.precision: bf16`, which has the range of fp32: set it to true, or change "
        "the precision",
        "!has(self.training) || self.training.masterWeights || self.training.precision == 'bf16'",
        _masters_unless_bf16,
    ),
    Rule(
        "training.masterWeights",
        "must be true with `training.optimizer.name: Muon`, because only AdamW rounds its updates stochastically",
        "!has(self.training) || self.training.masterWeights || self.training.optimizer.name == 'AdamW'",
        _masters_for_muon,
    ),
    Rule(
        "training.optimizer.offload",
        "needs `training.optimizer.name: AdamW` and `training.masterWeights: true`",
        "!has(self.training) || self.training.optimizer.offload == 'None'"
        " || (self.training.masterWeights && self.training.optimizer.name == 'AdamW')",
        _offload_needs_adamw,
    ),
    Rule(
        "training.optimizer.offloadPath",
        "is required with `training.optimizer.offload: File`, and is not supported otherwise: set or remove it",
        "!has(self.training) || (self.training.optimizer.offload == 'File') == "
        "has(self.training.optimizer.offloadPath)",
        _path_for_file,
    ),
    Rule(
        "training.parameterOffloadPath",
        "needs `training.parameterOffload: true`: set it, or remove the path",
        "!has(self.training) || !has(self.training.parameterOffloadPath) || self.training.parameterOffload",
        _path_for_parameters,
    ),
    Rule(
        "training.fp8",
        "needs `training.precision: bf16` or `fp32`",
        "!has(self.training) || !has(self.training.fp8) || self.training.precision in ['bf16', 'fp32']",
        _fp8_precision,
    ),
    Rule(
        "training.fp8",
        "is not supported with `training.lora`, because the narrow matrices of adapters gain nothing from it: "
        "remove one of the two",
        "!has(self.training) || !has(self.training.fp8) || !has(self.training.lora)",
        _fp8_without_lora,
    ),
    Rule(
        "training.fp8.update",
        "must be `Dynamic` with `training.fp8.scaling: Rowwise`, because the tokens of a row change in every step",
        "!has(self.training) || !has(self.training.fp8) || self.training.fp8.scaling == 'Tensorwise'"
        " || self.training.fp8.update == 'Dynamic'",
        _rowwise_is_dynamic,
    ),
    Rule(
        "training.fp8.allGather",
        "needs `scaling: Tensorwise`, and `update: Dynamic` or `Static`: change these, or remove this field",
        "!has(self.training) || !has(self.training.fp8) || !has(self.training.fp8.allGather)"
        " || !self.training.fp8.allGather"
        " || (self.training.fp8.scaling == 'Tensorwise' && self.training.fp8.update != 'Delayed')",
        _gather_has_one_known_scale,
    ),
    Rule(
        "training.tracking",
        "needs `checkpoint.claimName`, where the trackers' files are: add it, or remove `training.tracking`",
        "!has(self.training) || !has(self.training.tracking)"
        " || (has(self.checkpoint) && has(self.checkpoint.claimName))",
        _tracking_has_a_directory,
    ),
    Rule(
        "training.anomalies",
        f"is not supported with `parallelism.schedule` {schedule_names(is_asynchronous, 'or')}, which updates weights "
        "before the loss of the batch is known: use another schedule, or remove `training.anomalies`",
        lambda: f"{_NO_ANOMALIES_OR}{schedule_is_not(is_asynchronous)}",
        _anomalies_before_updates,
    ),
    Rule(
        "training.anomalies",
        "is not supported with `training.outer`, because islands take steps by themselves: remove one of the two",
        f"{_NO_ANOMALIES_OR}!has(self.training.outer)",
        _anomalies_without_islands,
    ),
    Rule(
        "training.anomalies",
        "needs `checkpoint` for `GoBack`: add it, or use `Skip`",
        f"{_NO_ANOMALIES_OR}has(self.checkpoint) || self.training.anomalies.nonFinite != 'GoBack'"
        " && (!has(self.training.anomalies.spike) || self.training.anomalies.spike != 'GoBack')",
        _goes_back_to_a_checkpoint,
    ),
    Rule(
        "training.anomalies.repeatEverySteps",
        "compares gradients bit by bit, and is not supported with `model.mixture`, "
        "`parallelism.dataParallel.compression` and `training.deterministic: false`: remove it, or those",
        f"{_NO_ANOMALIES_OR}!has(self.training.anomalies.repeatEverySteps) || (self.training.deterministic"
        " && self.parallelism.dataParallel.compression == 'None' && (!has(self.model) || !has(self.model.mixture)))",
        _repeats_bit_by_bit,
    ),
    Rule(
        "training.activationCheckpointing",
        "cannot be `Selective` with `training.compile: true` if layers are compiled in pieces, because each piece "
        "computes all its matrix products again. Pieces result from `parallelism.tensor`, `parallelism.context`, "
        "`data.packing: Documents`, `model.mixture`, `model.slidingWindow`, `training.fp8.update: Delayed`, and a "
        "`parallelism.schedule` that splits the backward pass or does not flush: use `Full` or `None`, or `compile: "
        "false`",
        _selective_layers_are_whole_cel,
        _selective_layers_are_whole,
    ),
    Rule(
        "training.varlenAttention",
        "needs `data.packing: Documents`, and `training.attentionDropout: 0`: change those, or remove this field",
        "!has(self.training) || !has(self.training.varlenAttention) || !self.training.varlenAttention"
        " || (has(self.data) && self.data.packing == 'Documents' && self.training.attentionDropout == 0.0)",
        _varlen_has_documents,
    ),
)
