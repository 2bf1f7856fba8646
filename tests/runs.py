"""Runs as the planner resolves them, of which a test gives what it is about."""

from __future__ import annotations

from meshwright.api.checkpoint import CheckpointSpec
from meshwright.api.data import DataSource, DataSpec
from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.training import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol.run_config import CommandRun, NativeRun


def native_run(
    architecture: Architecture,
    training: TrainingSpec,
    degrees: tuple[int, int, int] = (1, 1, 1),
    *,
    context: int = 1,
    expert: int = 1,
    micro_batches: int = 1,
    parallelism: ParallelismSpec | None = None,
    data: DataSpec | None = None,
    checkpoint: CheckpointSpec | None = None,
) -> NativeRun:
    """A run of Meshwright's runtime; `degrees` are tensor, pipeline and data."""
    tensor, pipeline, replicas = degrees
    return NativeRun(
        tensor=tensor,
        pipeline=pipeline,
        data_parallel=replicas,
        context=context,
        expert=expert,
        micro_batches=micro_batches,
        parallelism=parallelism or ParallelismSpec(),
        architecture=architecture,
        data=data or DataSpec(source=DataSource.PYTHON_STDLIB),
        training=training,
        checkpoint=checkpoint,
    )


def command_run(command: list[str], replicas: int = 1) -> CommandRun:
    """A run of the user's command."""
    return CommandRun(
        tensor=1,
        pipeline=1,
        data_parallel=replicas,
        micro_batches=1,
        parallelism=ParallelismSpec(),
        command=command,
    )
