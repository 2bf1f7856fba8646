"""From a run to what runs its steps on this rank. The one place that knows every executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.api.parallelism import PipelineSchedule
from meshwright.models.architecture import Architecture
from meshwright.protocol import RunConfig
from meshwright.schedules.actions import Schedule
from meshwright.schedules.division import activation_limit
from meshwright_worker.mesh import Mesh
from meshwright_worker.parallel.apply import BuiltStage, division_of
from meshwright_worker.pipeline.accumulate import Accumulation
from meshwright_worker.pipeline.channels import Channels
from meshwright_worker.pipeline.chunk import Chunk
from meshwright_worker.pipeline.copies import Copies, meeting
from meshwright_worker.pipeline.executor import Executor, tokens_of_step
from meshwright_worker.pipeline.measured import Measured
from meshwright_worker.pipeline.program import channels
from meshwright_worker.pipeline.scheduled import Scheduled
from meshwright_worker.pipeline.timed import Stopwatch, TimedChunk


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How this rank runs its stages."""

    executor: Executor
    copies: Copies


def assemble(stages: Sequence[BuiltStage], run: RunConfig, model: Architecture, mesh: Mesh) -> Pipeline:
    """The executor for a run's schedule. Collective over the world.

    Raises:
        ValueError: `run` is not a run of this runtime.
    """
    if run.training is None:
        raise ValueError("`training` is required")
    division, rank, tied = division_of(run, model), mesh.coordinates.pipeline, model.tie_embeddings
    tokens = tokens_of_step(run.training)
    if run.pipeline == 1 and len(stages) == 1 and not run.parallelism.rematerialize:
        executor = Accumulation(stages[0].module, tokens)
        return Pipeline(executor, Copies(division, rank, None, tied=tied))
    transfers = Channels(mesh, channels(division.schedule) | meeting(division, tied=tied))
    return Pipeline(
        _scheduled(stages, run, model, mesh, division.schedule, transfers, tokens),
        Copies(division, rank, transfers, tied=tied),
    )


def _scheduled(
    stages: Sequence[BuiltStage],
    run: RunConfig,
    model: Architecture,
    mesh: Mesh,
    schedule: Schedule,
    transfers: Channels,
    tokens: int,
) -> Scheduled:
    width, again = model.hidden_size, run.parallelism.rematerialize
    slices = run.tensor if run.parallelism.sequence else 1
    if run.parallelism.order is PipelineSchedule.AUTOMATIC and run.pipeline > 1:
        watch = Stopwatch(mesh.device)
        timed = TimedChunk(stages[0], tokens, rematerialize=again, watch=watch)
        limit = activation_limit(run.parallelism, run.pipeline)
        return Measured(timed, schedule, transfers, mesh, watch, limit=limit, width=width, slices=slices)
    chunks = [Chunk(stage, tokens, rematerialize=again) for stage in stages]
    return Scheduled(chunks, schedule, mesh.coordinates.pipeline, transfers, width=width, slices=slices)
