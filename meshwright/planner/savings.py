"""What the planner may decide beside degrees where a spec leaves it out, and in which order it tries it.

Recomputing costs time and no GPU, so it is weighed against what else memory would buy; sharing sequences makes every
replica larger, and is done where no layout fits otherwise. A schedule is one that the worker runs with everything else
that the job asks for.
"""

from __future__ import annotations

from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule
from meshwright.api.replicas import DataParallelStrategy
from meshwright.api.training import ActivationCheckpointing, TrainingSpec
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.planner.search.shapes import MIN_CONTEXT_TOKENS
from meshwright.schedules.division import ASYNCHRONOUS, stages_of_rank

CHECKPOINTED = (
    ActivationCheckpointing.NONE,
    ActivationCheckpointing.SELECTIVE,
    ActivationCheckpointing.FULL,
    ActivationCheckpointing.SQRT,
)
"""In order of what they cost."""
TRIED = (
    PipelineSchedule.ONE_F_ONE_B,
    PipelineSchedule.INTERLEAVED,
    PipelineSchedule.ZB_H1,
    PipelineSchedule.ZB_V,
    PipelineSchedule.ZB_H2,
    PipelineSchedule.DUAL_PIPE_V,
    PipelineSchedule.DUAL_PIPE,
)
"""Synchronous schedules that may be worth it, the simplest first; the others hold more and wait as long."""


def checkpointings(training: TrainingSpec) -> tuple[ActivationCheckpointing, ...]:
    """What to try, the cheapest first; what the spec gives is the only one."""
    given = training.activation_checkpointing
    if given is not None:
        return (given,)
    # The worker compiles it into layers of one graph alone, which depends on much that is not decided yet.
    return tuple(how for how in CHECKPOINTED if not (training.compile and how is ActivationCheckpointing.SELECTIVE))


def contexts(model: Architecture, training: TrainingSpec, parallelism: ParallelismSpec) -> list[int]:
    """Context degrees: the one that is given, or 1 and powers of two that leave ranks enough even parts of a row."""
    if parallelism.context is not None:
        return [parallelism.context]
    whole_rows = (
        training.attention_dropout > 0
        or parallelism.order in ASYNCHRONOUS
        or (model.mixture is not None and model.mixture.capacity_factor is not None)
    )
    found, length = [1], training.sequence_length
    while not whole_rows and length // (2 * found[-1]) >= MIN_CONTEXT_TOKENS and length % (4 * found[-1]) == 0:
        found.append(2 * found[-1])
    return found


def runs(schedule: PipelineSchedule, asked: ParallelismSpec, layout: Layout, model: Architecture) -> bool:
    """Whether the worker runs a schedule in this layout, as far as the number of micro-batches does not decide it."""
    spec = asked.model_copy(update={"schedule": schedule})
    each = stages_of_rank(spec, layout.pipeline)
    if layout.pipeline * each > model.layers or (each > 1 and asked.layer_split is not None):
        return False
    if schedule is not PipelineSchedule.DUAL_PIPE:
        return True
    flat = asked.zero_stage == 1 or asked.data_parallel.strategy is DataParallelStrategy.ZERO
    return layout.pipeline % 2 == 0 and not (flat and layout.replicas > 1)
