"""What ranks would run in a layout, and what they would have against it, asked before there is a pod."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.training import ActivationCheckpointing
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.protocol.run_config import DEGREES, CommandRun, NativeRun, RunConfig
from meshwright.rules.resolved.run_checks import run_problems

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
    """What the ranks run, with everything the spec left open filled in.

    Raises:
        ValueError: the spec has neither a model with data and training, nor a command.
    """
    command = spec.runtime.command
    if command is not None:
        return CommandRun(
            **_shared_fields(spec, layout, micro_batches, schedule), checkpoint=spec.checkpoint, command=command
        )
    if architecture is None or spec.data is None or spec.training is None:
        raise ValueError("`model`, `data` and `training` are required unless `runtime.command` is set")
    checkpoint = spec.checkpoint
    if checkpoint is not None:
        checkpoint = checkpoint.model_copy(update={"every_steps": checkpoint.interval, "keep": checkpoint.retained})
    return NativeRun(
        **_shared_fields(spec, layout, micro_batches, schedule),
        architecture=architecture,
        data=spec.data,
        training=spec.training.model_copy(update={"activation_checkpointing": checkpointing}),
        checkpoint=checkpoint,
    )


def _shared_fields(
    spec: ParallelTrainingJobSpec, layout: Layout, micro_batches: int, schedule: PipelineSchedule
) -> dict[str, Any]:
    """The fields of both kinds of runs."""
    return {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "data_parallel": layout.data,
        "context": layout.context,
        "expert": layout.expert,
        "micro_batches": micro_batches,
        "parallelism": spec.parallelism.model_copy(update={**dict.fromkeys(DEGREES), "schedule": schedule}),
    }


def refusals_of(run: RunConfig) -> list[str]:
    """What ranks would have against a run; nothing is known of a command of the user's."""
    return run_problems(run) if isinstance(run, NativeRun) else []


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
