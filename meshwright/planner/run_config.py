"""What ranks would run in a layout, and what they would have against it, asked before there is a pod."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.training import ActivationCheckpointing
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.protocol.messages import RunConfig
from meshwright.rules.validation import run_problems

Runnable = Callable[[Layout, int, PipelineSchedule, ActivationCheckpointing], bool]
"""Whether ranks take a layout with so many micro-batches, in this order, recomputing so much."""


def run_config_of(
    spec: ParallelTrainingJobSpec,
    architecture: Architecture | None,
    layout: Layout,
    micro_batches: int,
    schedule: PipelineSchedule,
    checkpointing: ActivationCheckpointing,
) -> RunConfig:
    """What the ranks run, with everything the spec left open filled in."""
    checkpoint = spec.checkpoint
    if checkpoint is not None and architecture is not None:
        checkpoint = checkpoint.model_copy(update={"every_steps": checkpoint.interval, "keep": checkpoint.retained})
    training = spec.training
    if training is not None:
        training = training.model_copy(update={"activation_checkpointing": checkpointing})
    decided = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "expert": layout.expert,
        "micro_batches": micro_batches,
    }
    return RunConfig(
        **decided,
        data_parallel=layout.data,
        parallelism=spec.parallelism.model_copy(update={**decided, "schedule": schedule}),
        architecture=architecture,
        data=spec.data,
        training=training,
        checkpoint=checkpoint,
        command=spec.runtime.command,
    )


def refusals_of(run: RunConfig) -> list[str]:
    """What ranks would have against a run; nothing is known of a command of the user's."""
    return run_problems(run) if run.command is None and run.architecture is not None else []


def runnable(spec: ParallelTrainingJobSpec, architecture: Architecture) -> Runnable:
    """What a search for `spec` asks of its candidates."""
    return partial(_runs, spec, architecture)


def _runs(
    spec: ParallelTrainingJobSpec,
    architecture: Architecture,
    layout: Layout,
    micro_batches: int,
    schedule: PipelineSchedule,
    checkpointing: ActivationCheckpointing,
) -> bool:
    return not refusals_of(run_config_of(spec, architecture, layout, micro_batches, schedule, checkpointing))
