"""Rules on the pipeline's schedule: which numbers it can be made for, and which fields belong to it."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.rules.facts import Facts
from meshwright.rules.rule import Rule
from meshwright.schedules.pipeline_layout import stages_per_rank
from meshwright.schedules.registry import cel_list, kind_of, schedules_where
from meshwright.schedules.schedule import PipelineScheduleKind

_SCHEDULE = "self.parallelism.schedule"


def _is_one_of(condition: Callable[[PipelineScheduleKind], bool]) -> str:
    """In CEL, that the schedule meets a condition, which one does at least."""
    orders = schedules_where(condition)
    return f"{_SCHEDULE} == {orders[0].value!r}" if len(orders) == 1 else f"{_SCHEDULE} in {cel_list(orders)}"


def _is_none_of(condition: Callable[[PipelineScheduleKind], bool]) -> str:
    """In CEL, that the schedule does not meet a condition."""
    orders = schedules_where(condition)
    return f"{_SCHEDULE} != {orders[0].value!r}" if len(orders) == 1 else f"!({_SCHEDULE} in {cel_list(orders)})"


_HAS_PIPELINE = "has(self.parallelism.pipeline) && self.parallelism.pipeline > 1"
_HAS_MICRO_BATCHES = f"{_HAS_PIPELINE} && has(self.parallelism.microBatches)"


def _ranks(facts: Facts) -> int:
    """Pipeline ranks; 1 where the planner chooses them."""
    return facts.parallelism.pipeline or 1


def _kind(facts: Facts) -> PipelineScheduleKind:
    return kind_of(facts.parallelism.order)


def _virtual_stages_belong(facts: Facts) -> bool:
    return facts.parallelism.virtual_stages is None or _kind(facts).virtual_stages


def _activation_limit_belongs(facts: Facts) -> bool:
    return facts.parallelism.activation_limit is None or _kind(facts).takes_activation_limit


def _stages(facts: Facts) -> int:
    return _ranks(facts) * stages_per_rank(facts.parallelism, _ranks(facts))


def _layer_split_covers_stages(facts: Facts) -> bool:
    split = facts.parallelism.layer_split
    return split is None or (facts.parallelism.pipeline is not None and len(split) == _stages(facts))


def _layer_split_adds_up(facts: Facts) -> bool:
    split, layers = facts.parallelism.layer_split, facts.model.layers if facts.model is not None else None
    return split is None or layers is None or sum(split) == layers


def _stages_have_layers(facts: Facts) -> bool:
    layers = facts.model.layers if facts.model is not None else None
    return layers is None or layers >= _stages(facts)


def _micro_batches_fill_rounds(facts: Facts) -> bool:
    p, ranks = facts.parallelism, _ranks(facts)
    return not _kind(facts).whole_rounds or p.micro_batches is None or p.micro_batches % ranks == 0


def _dual_pipe_ranks_even(facts: Facts) -> bool:
    return not _kind(facts).even or _ranks(facts) == 1 or _ranks(facts) % 2 == 0


def _dual_pipe_micro_batches(facts: Facts) -> bool:
    count, ranks, kind = facts.parallelism.micro_batches, _ranks(facts), _kind(facts)
    if ranks == 1 or count is None or kind.micro_batches_per_rank < 2:
        return True
    return (not kind.even or count % 2 == 0) and count >= 2 * ranks


def _pipedream_one_micro_batch(facts: Facts) -> bool:
    p = facts.parallelism
    return not _kind(facts).single_micro_batch or _ranks(facts) == 1 or p.micro_batches in (None, 1)


def _asynchronous_without_clipping(facts: Facts) -> bool:
    if facts.training is None or _ranks(facts) == 1 or not _kind(facts).asynchronous:
        return True
    return facts.training.optimizer.gradient_clip == 0


def _asynchronous_without_rematerialization(facts: Facts) -> bool:
    return not _kind(facts).asynchronous or not facts.parallelism.rematerialize


def _asynchronous_without_mixture(facts: Facts) -> bool:
    mixed = facts.model is not None and facts.model.mixture is not None
    return not mixed or not _kind(facts).asynchronous


def _asynchronous_without_zero(facts: Facts) -> bool:
    return not _kind(facts).asynchronous or facts.parallelism.zero_stage == 0


_STAGES_CEL = (
    "(self.parallelism.pipeline == 1 ? 1 : self.parallelism.pipeline"
    f" * ({_is_one_of(lambda kind: kind.virtual_stages)}"
    " ? (has(self.parallelism.virtualStages) ? self.parallelism.virtualStages : 2)"
    f" : ({_is_one_of(lambda kind: kind.v_shaped)} ? 2 : 1)))"
)

PIPELINE_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "parallelism.virtualStages",
        "needs `schedule: Interleaved1F1B` or `LoopedBFS`: leave it out with others",
        f"!has(self.parallelism.virtualStages) || {_is_one_of(lambda kind: kind.virtual_stages)}",
        _virtual_stages_belong,
    ),
    Rule(
        "parallelism.activationLimit",
        "needs `schedule: Automatic`: the memory of other schedules follows from their order",
        f"!has(self.parallelism.activationLimit) || {_is_one_of(lambda kind: kind.takes_activation_limit)}",
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
        f"{_is_none_of(lambda kind: kind.whole_rounds)} || !({_HAS_MICRO_BATCHES})"
        " || self.parallelism.microBatches % self.parallelism.pipeline == 0",
        _micro_batches_fill_rounds,
    ),
    Rule(
        "parallelism.pipeline",
        "must be even with `DualPipe`, whose two directions meet in the middle; or use `DualPipeV`",
        f"{_is_none_of(lambda kind: kind.even)} || !({_HAS_PIPELINE}) || self.parallelism.pipeline % 2 == 0",
        _dual_pipe_ranks_even,
    ),
    Rule(
        "parallelism.microBatches",
        "must be at least twice `parallelism.pipeline` with `DualPipe` and `DualPipeV`, and even with `DualPipe`",
        f"{_is_none_of(lambda kind: kind.micro_batches_per_rank > 1)} || !({_HAS_MICRO_BATCHES})"
        " || (self.parallelism.microBatches >= 2 * self.parallelism.pipeline"
        f" && ({_is_none_of(lambda kind: kind.even)} || self.parallelism.microBatches % 2 == 0))",
        _dual_pipe_micro_batches,
    ),
    Rule(
        "parallelism.microBatches",
        "must be 1 with `PipeDream`, which updates weights after each; use `PipeDream2BW` for several",
        f"{_is_none_of(lambda kind: kind.single_micro_batch)} || !({_HAS_MICRO_BATCHES})"
        " || self.parallelism.microBatches == 1",
        _pipedream_one_micro_batch,
    ),
    Rule(
        "training.optimizer.gradientClip",
        "must be 0 with `PipeDream` and `PipeDream2BW`: no moment exists when a step's gradients are known everywhere",
        f"{_is_none_of(lambda kind: kind.asynchronous)} || !has(self.training) || !({_HAS_PIPELINE})"
        " || self.training.optimizer.gradientClip == 0.0",
        _asynchronous_without_clipping,
    ),
    Rule(
        "parallelism.zeroStage",
        "must be 0 with `PipeDream` and `PipeDream2BW`: they keep several versions of a stage's weights",
        f"{_is_none_of(lambda kind: kind.asynchronous)} || self.parallelism.zeroStage == 0",
        _asynchronous_without_zero,
    ),
    Rule(
        "model.mixture",
        "needs another `parallelism.schedule` than `PipeDream` and `PipeDream2BW`: which have no common step",
        f"{_is_none_of(lambda kind: kind.asynchronous)} || !has(self.model) || !has(self.model.mixture)",
        _asynchronous_without_mixture,
    ),
    Rule(
        "parallelism.rematerialize",
        "must be false with `PipeDream` and `PipeDream2BW`",
        f"{_is_none_of(lambda kind: kind.asynchronous)} || !self.parallelism.rematerialize",
        _asynchronous_without_rematerialization,
    ),
)
