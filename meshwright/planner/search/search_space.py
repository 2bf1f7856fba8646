"""What the planner may decide beside degrees where a spec leaves it out, and in which order it tries it.

Recomputing costs time and no GPU, so it is weighed against what else memory would buy; sharing sequences makes every
replica larger, and is done where no layout fits otherwise. A schedule is one that the worker runs with everything else
that the job asks for.
"""

from __future__ import annotations

from meshwright.api.data_parallel import DataParallelStrategy
from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule
from meshwright.api.training import ActivationCheckpointing, TrainingSpec
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.planner.search.degrees import MIN_CONTEXT_TOKENS
from meshwright.planner.workload import TrainingJob
from meshwright.schedules.pipeline_layout import stages_per_rank
from meshwright.schedules.registry import kind_of, schedules_where

CHECKPOINTING_OPTIONS = (
    ActivationCheckpointing.NONE,
    ActivationCheckpointing.SELECTIVE,
    ActivationCheckpointing.FULL,
    ActivationCheckpointing.SQRT,
)
"""In order of what they cost."""
CANDIDATE_SCHEDULES = tuple(
    sorted(
        schedules_where(lambda kind: kind.candidate_rank is not None),
        key=lambda order: kind_of(order).candidate_rank or 0,
    )
)
"""Synchronous schedules that may be worth it, the simplest first; the others hold more and wait as long."""


def checkpointing_options(training: TrainingSpec) -> tuple[ActivationCheckpointing, ...]:
    """What to try, the cheapest first; what the spec gives is the only one."""
    requested = training.activation_checkpointing
    if requested is not None:
        return (requested,)
    # The worker compiles it into layers of one graph alone, which depends on much that is not decided yet.
    return tuple(
        option
        for option in CHECKPOINTING_OPTIONS
        if not (training.compile and option is ActivationCheckpointing.SELECTIVE)
    )


def context_degrees(job: TrainingJob) -> list[int]:
    """Context degrees: the one that is given, or 1 and powers of two that leave ranks enough even parts of a row."""
    model, training, parallelism = job.architecture, job.training, job.parallelism
    if parallelism.context is not None:
        return [parallelism.context]
    needs_whole_sequences = (
        training.attention_dropout > 0
        or kind_of(parallelism.order).asynchronous
        or (model.mixture is not None and model.mixture.capacity_factor is not None)
    )
    degrees, length = [1], training.sequence_length
    while (
        not needs_whole_sequences
        and length // (2 * degrees[-1]) >= MIN_CONTEXT_TOKENS
        and length % (4 * degrees[-1]) == 0
    ):
        degrees.append(2 * degrees[-1])
    return degrees


def runs(schedule: PipelineSchedule, asked: ParallelismSpec, layout: Layout, model: Architecture) -> bool:
    """Whether the worker runs a schedule in this layout, as far as the number of micro-batches does not decide it."""
    spec = asked.model_copy(update={"schedule": schedule})
    rank_stages = stages_per_rank(spec, layout.pipeline)
    if layout.pipeline * rank_stages > model.layers or (rank_stages > 1 and asked.layer_split is not None):
        return False
    kind = kind_of(schedule)
    if kind.even and layout.pipeline % 2:
        return False
    flat_shards = asked.zero_stage == 1 or asked.data_parallel.strategy is DataParallelStrategy.ZERO
    return not (kind.bidirectional and flat_shards and layout.shard_ranks > 1)
