"""Rules on the pipeline's schedule: which numbers it can be made for, and which fields belong to it."""

from __future__ import annotations

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.spec import ParallelTrainingJobSpec as Spec
from meshwright.rules.rule import Rule

_WITH_VIRTUAL_STAGES = (PipelineSchedule.INTERLEAVED, PipelineSchedule.LOOPED_BFS)
_V_SHAPED = (PipelineSchedule.ZB_V, PipelineSchedule.DUAL_PIPE_V)
_DUAL_PIPES = (PipelineSchedule.DUAL_PIPE, PipelineSchedule.DUAL_PIPE_V)
_ASYNCHRONOUS = (PipelineSchedule.PIPEDREAM, PipelineSchedule.PIPEDREAM_2BW)

_HAS_PIPELINE = "has(self.parallelism.pipeline) && self.parallelism.pipeline > 1"
_HAS_MICRO_BATCHES = f"{_HAS_PIPELINE} && has(self.parallelism.microBatches)"


def _ranks(spec: Spec) -> int:
    """Pipeline ranks; 1 where the planner chooses them."""
    return spec.parallelism.pipeline or 1


def _virtual_stages_belong(spec: Spec) -> bool:
    return spec.parallelism.virtual_stages is None or spec.parallelism.order in _WITH_VIRTUAL_STAGES


def _activation_limit_belongs(spec: Spec) -> bool:
    p = spec.parallelism
    return p.activation_limit is None or p.order is PipelineSchedule.AUTOMATIC


def _stages(spec: Spec) -> int:
    p = spec.parallelism
    if _ranks(spec) == 1:
        return 1
    if p.order in _WITH_VIRTUAL_STAGES:
        return _ranks(spec) * (p.virtual_stages or 2)
    return _ranks(spec) * (2 if p.order in _V_SHAPED else 1)


def _layer_split_covers_stages(spec: Spec) -> bool:
    split = spec.parallelism.layer_split
    return split is None or (spec.parallelism.pipeline is not None and len(split) == _stages(spec))


def _layer_split_adds_up(spec: Spec) -> bool:
    split, layers = spec.parallelism.layer_split, spec.model.layers if spec.model is not None else None
    return split is None or layers is None or sum(split) == layers


def _stages_have_layers(spec: Spec) -> bool:
    layers = spec.model.layers if spec.model is not None else None
    return layers is None or layers >= _stages(spec)


def _micro_batches_fill_rounds(spec: Spec) -> bool:
    p, ranks = spec.parallelism, _ranks(spec)
    return p.order is not PipelineSchedule.INTERLEAVED or p.micro_batches is None or p.micro_batches % ranks == 0


def _dual_pipe_ranks_even(spec: Spec) -> bool:
    return spec.parallelism.order is not PipelineSchedule.DUAL_PIPE or _ranks(spec) == 1 or _ranks(spec) % 2 == 0


def _dual_pipe_micro_batches(spec: Spec) -> bool:
    p, ranks = spec.parallelism, _ranks(spec)
    if ranks == 1 or p.micro_batches is None or p.order not in _DUAL_PIPES:
        return True
    even = p.order is not PipelineSchedule.DUAL_PIPE or p.micro_batches % 2 == 0
    return even and p.micro_batches >= 2 * ranks


def _pipedream_one_micro_batch(spec: Spec) -> bool:
    p = spec.parallelism
    return p.order is not PipelineSchedule.PIPEDREAM or _ranks(spec) == 1 or p.micro_batches in (None, 1)


def _asynchronous_without_clipping(spec: Spec) -> bool:
    if spec.training is None or _ranks(spec) == 1 or spec.parallelism.order not in _ASYNCHRONOUS:
        return True
    return spec.training.optimizer.gradient_clip == 0


def _asynchronous_without_rematerialization(spec: Spec) -> bool:
    return spec.parallelism.order not in _ASYNCHRONOUS or not spec.parallelism.rematerialize


def _asynchronous_without_mixture(spec: Spec) -> bool:
    mixed = spec.model is not None and spec.model.mixture is not None
    return not mixed or spec.parallelism.order not in _ASYNCHRONOUS


def _asynchronous_without_zero(spec: Spec) -> bool:
    return spec.parallelism.order not in _ASYNCHRONOUS or spec.parallelism.zero_stage == 0


_STAGES_CEL = (
    "(self.parallelism.pipeline == 1 ? 1 : self.parallelism.pipeline"
    " * (self.parallelism.schedule in ['Interleaved1F1B', 'LoopedBFS']"
    " ? (has(self.parallelism.virtualStages) ? self.parallelism.virtualStages : 2)"
    " : (self.parallelism.schedule in ['ZBV', 'DualPipeV'] ? 2 : 1)))"
)

PIPELINE_RULES = (
    Rule(
        "parallelism.virtualStages",
        "needs `schedule: Interleaved1F1B` or `LoopedBFS`: leave it out with others",
        "!has(self.parallelism.virtualStages) || self.parallelism.schedule in ['Interleaved1F1B', 'LoopedBFS']",
        _virtual_stages_belong,
    ),
    Rule(
        "parallelism.activationLimit",
        "needs `schedule: Automatic`: the memory of other schedules follows from their order",
        "!has(self.parallelism.activationLimit) || self.parallelism.schedule == 'Automatic'",
        _activation_limit_belongs,
    ),
    Rule(
        "parallelism.layerSplit",
        "must have an entry for every stage, and needs `parallelism.pipeline`",
        "!has(self.parallelism.layerSplit) || (has(self.parallelism.pipeline)"
        f" && self.parallelism.layerSplit.size() == {_STAGES_CEL})",
        _layer_split_covers_stages,
    ),
    Rule(
        "parallelism.layerSplit",
        "must add up to `model.layers`: each layer is in one stage",
        "!has(self.parallelism.layerSplit) || !has(self.model) || !has(self.model.layers)"
        " || self.parallelism.layerSplit.sum() == self.model.layers",
        _layer_split_adds_up,
    ),
    Rule(
        "parallelism.pipeline",
        "times the stages of a rank must be at most `model.layers`: each stage needs at least one layer",
        "!has(self.parallelism.pipeline) || !has(self.model) || !has(self.model.layers)"
        f" || self.model.layers >= {_STAGES_CEL}",
        _stages_have_layers,
    ),
    Rule(
        "parallelism.microBatches",
        "must be a multiple of `parallelism.pipeline` with `Interleaved1F1B`, which takes whole rounds of its ranks",
        f"self.parallelism.schedule != 'Interleaved1F1B' || !({_HAS_MICRO_BATCHES})"
        " || self.parallelism.microBatches % self.parallelism.pipeline == 0",
        _micro_batches_fill_rounds,
    ),
    Rule(
        "parallelism.pipeline",
        "must be even with `DualPipe`, whose two directions meet in the middle; or use `DualPipeV`",
        f"self.parallelism.schedule != 'DualPipe' || !({_HAS_PIPELINE}) || self.parallelism.pipeline % 2 == 0",
        _dual_pipe_ranks_even,
    ),
    Rule(
        "parallelism.microBatches",
        "must be at least twice `parallelism.pipeline` with `DualPipe` and `DualPipeV`, and even with `DualPipe`",
        f"!(self.parallelism.schedule in ['DualPipe', 'DualPipeV']) || !({_HAS_MICRO_BATCHES})"
        " || (self.parallelism.microBatches >= 2 * self.parallelism.pipeline"
        " && (self.parallelism.schedule != 'DualPipe' || self.parallelism.microBatches % 2 == 0))",
        _dual_pipe_micro_batches,
    ),
    Rule(
        "parallelism.microBatches",
        "must be 1 with `PipeDream`, which updates weights after each; use `PipeDream2BW` for several",
        f"self.parallelism.schedule != 'PipeDream' || !({_HAS_MICRO_BATCHES}) || self.parallelism.microBatches == 1",
        _pipedream_one_micro_batch,
    ),
    Rule(
        "training.optimizer.gradientClip",
        "must be 0 with `PipeDream` and `PipeDream2BW`: no moment exists when a step's gradients are known everywhere",
        f"!(self.parallelism.schedule in ['PipeDream', 'PipeDream2BW']) || !has(self.training) || !({_HAS_PIPELINE})"
        " || self.training.optimizer.gradientClip == 0.0",
        _asynchronous_without_clipping,
    ),
    Rule(
        "parallelism.zeroStage",
        "must be 0 with `PipeDream` and `PipeDream2BW`: they keep several versions of a stage's weights",
        "!(self.parallelism.schedule in ['PipeDream', 'PipeDream2BW']) || self.parallelism.zeroStage == 0",
        _asynchronous_without_zero,
    ),
    Rule(
        "model.mixture",
        "needs another `parallelism.schedule` than `PipeDream` and `PipeDream2BW`: which have no common step",
        "!(self.parallelism.schedule in ['PipeDream', 'PipeDream2BW']) || !has(self.model) || !has(self.model.mixture)",
        _asynchronous_without_mixture,
    ),
    Rule(
        "parallelism.rematerialize",
        "must be false with `PipeDream` and `PipeDream2BW`",
        "!(self.parallelism.schedule in ['PipeDream', 'PipeDream2BW']) || !self.parallelism.rematerialize",
        _asynchronous_without_rematerialization,
    ),
)
