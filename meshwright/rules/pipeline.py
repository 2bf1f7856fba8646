"""Rules on pipelines: which stages, micro-batches and other fields each schedule supports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meshwright.api.precision import Precision
from meshwright.rules.facts import SCALED_BATCH, Facts, scales_batch
from meshwright.rules.parallelism import HAS_PIPELINE
from meshwright.rules.rule import Rule, is_asynchronous, schedule_is, schedule_is_not, schedule_names
from meshwright.schedules.pipeline_layout import DEFAULT_VIRTUAL_STAGES, stages_per_rank
from meshwright.schedules.registry import kind_of, schedules_where
from meshwright.schedules.schedule import PipelineScheduleKind

_HAS_MICRO_BATCHES = f"{HAS_PIPELINE} && has(self.parallelism.microBatches)"


def _has_virtual_stages(kind: PipelineScheduleKind) -> bool:
    return kind.virtual_stages


def _takes_limit(kind: PipelineScheduleKind) -> bool:
    return kind.takes_activation_limit


def _takes_rounds(kind: PipelineScheduleKind) -> bool:
    return kind.whole_rounds


def _is_even(kind: PipelineScheduleKind) -> bool:
    return kind.even


def _takes_one(kind: PipelineScheduleKind) -> bool:
    return kind.single_micro_batch


def _takes_fewer(kind: PipelineScheduleKind) -> bool:
    return kind.micro_batches_per_rank == 0


def _ranks(facts: Facts) -> int:
    """Number of pipeline ranks. 1 if the planner chooses it."""
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


def _ranks_even(facts: Facts) -> bool:
    return not _kind(facts).even or _ranks(facts) == 1 or _ranks(facts) % 2 == 0


def _stages_have_micro_batches(facts: Facts) -> bool:
    count, ranks = facts.parallelism.micro_batches, _ranks(facts)
    return count is None or count >= min(1, _kind(facts).micro_batches_per_rank) * ranks


def _stages_have_sequences(facts: Facts) -> bool:
    if facts.training is None or _kind(facts).micro_batches_per_rank == 0 or scales_batch(facts):
        return True
    return facts.training.global_batch_size >= facts.replicas * _ranks(facts)


def _ranks_have_micro_batches(facts: Facts) -> bool:
    count, ranks, kind = facts.parallelism.micro_batches, _ranks(facts), _kind(facts)
    if ranks == 1 or count is None:
        return True
    return (not kind.even or count % 2 == 0) and count >= _multiple(kind) * ranks


def _multiple(kind: PipelineScheduleKind) -> int:
    """Micro-batches per rank that the schedule needs, if more than one. Otherwise 0."""
    return kind.micro_batches_per_rank if kind.micro_batches_per_rank > 1 else 0


def _multiples() -> dict[int, Callable[[PipelineScheduleKind], bool]]:
    """For each such number, a condition: the schedule needs this many."""
    counts = sorted({_multiple(kind_of(order)) for order in schedules_where(lambda kind: _multiple(kind) > 0)})
    return {count: partial(_has_multiple, count) for count in counts}


def _has_multiple(count: int, kind: PipelineScheduleKind) -> bool:
    return _multiple(kind) == count


def _multiples_text() -> str:
    lists = (
        f"{'twice' if count == 2 else f'{count} times'} `parallelism.pipeline` with {schedule_names(condition)}"
        for count, condition in _multiples().items()
    )
    return f"must be at least {', '.join(lists)}, and even with {schedule_names(_is_even)}"


def _multiples_cel() -> str:
    factor = "0"
    for count, condition in _multiples().items():
        factor = f"({schedule_is(condition)} ? {count} : {factor})"
    return (
        f"!({_HAS_MICRO_BATCHES}) || (self.parallelism.microBatches >= {factor} * self.parallelism.pipeline"
        f" && ({schedule_is_not(_is_even)} || self.parallelism.microBatches % 2 == 0))"
    )


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
    return not _kind(facts).asynchronous or facts.parallelism.zero_stage_or_default == 0


def _tied_on_one_stage(facts: Facts) -> bool:
    tied = facts.model is not None and bool(facts.model.tie_embeddings)
    one_stage = _ranks(facts) == 1
    return not tied or one_stage or not _kind(facts).asynchronous


def _asynchronous_without_scales(facts: Facts) -> bool:
    if facts.training is None or _ranks(facts) == 1 or not _kind(facts).asynchronous:
        return True
    return facts.training.precision is not Precision.FP16 and facts.training.fp8 is None


def _asynchronous_without_islands(facts: Facts) -> bool:
    islands = facts.training is not None and facts.training.outer is not None
    return not islands or _ranks(facts) == 1 or not _kind(facts).asynchronous


def _stages_cel() -> str:
    """In CEL, the number of stages if `pipeline` is set."""
    return (
        "(self.parallelism.pipeline == 1 ? 1 : self.parallelism.pipeline"
        f" * ({schedule_is(_has_virtual_stages)}"
        f" ? (has(self.parallelism.virtualStages) ? self.parallelism.virtualStages : {DEFAULT_VIRTUAL_STAGES})"
        f" : ({schedule_is(lambda kind: kind.v_shaped)} ? 2 : 1)))"
    )


PIPELINE_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "parallelism.microBatches",
        "must be at least `parallelism.pipeline`, because with fewer micro-batches some stage is always idle: "
        "raise it, or use `schedule: Naive`",
        lambda: (
            f"{schedule_is(_takes_fewer)} || !has(self.parallelism.microBatches) || !has(self.parallelism.pipeline)"
            " || self.parallelism.microBatches >= self.parallelism.pipeline"
        ),
        _stages_have_micro_batches,
    ),
    Rule(
        "parallelism.pipeline",
        "times `replicas` must be at most `training.globalBatchSize`, because every stage of every replica needs a "
        "micro-batch",
        lambda: (
            f"{SCALED_BATCH} || {schedule_is(_takes_fewer)} || !has(self.training) || self.training.globalBatchSize"
            " >= self.replicas * (has(self.parallelism.pipeline) ? self.parallelism.pipeline : 1)"
        ),
        _stages_have_sequences,
    ),
    Rule(
        "model.tieEmbeddings",
        lambda: (
            f"needs `parallelism.pipeline: 1` with {schedule_names(is_asynchronous)}, because the first and the "
            "last stage would have different weights"
        ),
        lambda: (
            "!has(self.model) || !has(self.model.tieEmbeddings) || !self.model.tieEmbeddings"
            f" || {schedule_is_not(is_asynchronous)}"
            " || !has(self.parallelism.pipeline) || self.parallelism.pipeline == 1"
        ),
        _tied_on_one_stage,
    ),
    Rule(
        "parallelism.virtualStages",
        lambda: (
            f"is only supported with the schedule {schedule_names(_has_virtual_stages, 'or')}: remove it, or change "
            "the schedule"
        ),
        lambda: f"!has(self.parallelism.virtualStages) || {schedule_is(_has_virtual_stages)}",
        _virtual_stages_belong,
    ),
    Rule(
        "parallelism.activationLimit",
        lambda: (
            f"is only supported with the schedule {schedule_names(_takes_limit, 'or')}, because the order of other "
            "schedules determines their memory: remove it, or change the schedule"
        ),
        lambda: f"!has(self.parallelism.activationLimit) || {schedule_is(_takes_limit)}",
        _activation_limit_belongs,
    ),
    Rule(
        "parallelism.layerSplit",
        "must have one entry for every stage, and needs `parallelism.pipeline`",
        lambda: (
            "!has(self.parallelism.layerSplit) || (has(self.parallelism.pipeline)"
            f" && self.parallelism.layerSplit.size() == {_stages_cel()})"
        ),
        _layer_split_covers_stages,
    ),
    Rule(
        "parallelism.layerSplit",
        "must add up to `model.layers`, because each layer is in one stage",
        "!has(self.parallelism.layerSplit) || !has(self.model) || !has(self.model.layers)"
        " || self.parallelism.layerSplit.sum() == self.model.layers",
        _layer_split_adds_up,
    ),
    Rule(
        "parallelism.pipeline",
        "times the stages of a rank must be at most `model.layers`, because each stage needs at least one layer",
        lambda: (
            "!has(self.parallelism.pipeline) || !has(self.model) || !has(self.model.layers)"
            f" || self.model.layers >= {_stages_cel()}"
        ),
        _stages_have_layers,
    ),
    Rule(
        "parallelism.microBatches",
        lambda: (
            f"must be a multiple of `parallelism.pipeline` with {schedule_names(_takes_rounds)}, because "
            "micro-batches run in rounds of that size"
        ),
        lambda: (
            f"{schedule_is_not(_takes_rounds)} || !({_HAS_MICRO_BATCHES})"
            " || self.parallelism.microBatches % self.parallelism.pipeline == 0"
        ),
        _micro_batches_fill_rounds,
    ),
    Rule(
        "parallelism.pipeline",
        lambda: (
            f"must be even with {schedule_names(_is_even)}, because two directions meet in the middle: change it, "
            "or use `DualPipeV`"
        ),
        lambda: f"{schedule_is_not(_is_even)} || !({HAS_PIPELINE}) || self.parallelism.pipeline % 2 == 0",
        _ranks_even,
    ),
    Rule(
        "parallelism.microBatches",
        _multiples_text,
        _multiples_cel,
        _ranks_have_micro_batches,
    ),
    Rule(
        "parallelism.microBatches",
        lambda: (
            f"must be 1 with {schedule_names(_takes_one)}, because weights are updated after every micro-batch: use "
            "`PipeDream2BW` for several"
        ),
        lambda: f"{schedule_is_not(_takes_one)} || !({_HAS_MICRO_BATCHES}) || self.parallelism.microBatches == 1",
        _pipedream_one_micro_batch,
    ),
    Rule(
        "training.optimizer.gradientClip",
        lambda: (
            f"must be 0 with {schedule_names(is_asynchronous)}, because the gradients of a step are never complete "
            "on all stages at the same time"
        ),
        lambda: (
            f"{schedule_is_not(is_asynchronous)} || !has(self.training) || !({HAS_PIPELINE})"
            " || self.training.optimizer.gradientClip == 0.0"
        ),
        _asynchronous_without_clipping,
    ),
    Rule(
        "parallelism.zeroStage",
        lambda: (
            f"must be 0 with {schedule_names(is_asynchronous)}, because stages store several versions of their weights"
        ),
        lambda: f"{schedule_is_not(is_asynchronous)} || self.parallelism.zeroStage == 0",
        _asynchronous_without_zero,
    ),
    Rule(
        "model.mixture",
        lambda: (
            f"is not supported with the schedule {schedule_names(is_asynchronous, 'or')}, because stages have no "
            "common step: use another schedule"
        ),
        lambda: f"{schedule_is_not(is_asynchronous)} || !has(self.model) || !has(self.model.mixture)",
        _asynchronous_without_mixture,
    ),
    Rule(
        "parallelism.rematerialize",
        lambda: (
            f"must be false with {schedule_names(is_asynchronous)}, because weights change before the backward pass"
        ),
        lambda: f"{schedule_is_not(is_asynchronous)} || !self.parallelism.rematerialize",
        _asynchronous_without_rematerialization,
    ),
    Rule(
        "training.precision",
        lambda: (
            "`training.precision: fp16` and `training.fp8` are not supported with "
            f"{schedule_names(is_asynchronous)}, because their scales need a common step: use `bf16` or `fp32`"
        ),
        lambda: (
            f"{schedule_is_not(is_asynchronous)} || !has(self.training) || !({HAS_PIPELINE})"
            " || (self.training.precision != 'fp16' && !has(self.training.fp8))"
        ),
        _asynchronous_without_scales,
    ),
    Rule(
        "training.outer",
        lambda: (
            f"is not supported with the schedule {schedule_names(is_asynchronous, 'or')}, because islands "
            "synchronize between steps, and stages have no common step: use another schedule"
        ),
        lambda: (
            f"{schedule_is_not(is_asynchronous)} || !has(self.training) || !({HAS_PIPELINE})"
            " || !has(self.training.outer)"
        ),
        _asynchronous_without_islands,
    ),
)
