"""Builds the executor of a run on this rank. The only module that knows every executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.actions import Schedule
from meshwright.schedules.pipeline_layout import activation_limit
from meshwright.schedules.registry import kind_of
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.parallel.parallelize import LocalStage, pipeline_division
from meshwright_worker.parallel.pipeline.auto_schedule import AutoScheduleExecutor
from meshwright_worker.parallel.pipeline.executor import Executor, tokens_of_step
from meshwright_worker.parallel.pipeline.grad_accumulation import GradientAccumulation
from meshwright_worker.parallel.pipeline.p2p import P2PChannels
from meshwright_worker.parallel.pipeline.rank_program import p2p_pairs
from meshwright_worker.parallel.pipeline.schedule_executor import ScheduleExecutor
from meshwright_worker.parallel.pipeline.shared_weights import SharedWeights, shared_weight_pairs
from meshwright_worker.parallel.pipeline.stage import PipelineStage
from meshwright_worker.parallel.pipeline.stage_timer import Stopwatch, TimedStage


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The executor of this rank's stages, and their shared weights."""

    executor: Executor
    shared_weights: SharedWeights


def build_executor(stages: Sequence[LocalStage], run: NativeRun, mesh: Mesh) -> Pipeline:
    """Build the executor for a run's schedule. Collective over the world."""
    division, rank, tied = pipeline_division(run), mesh.coordinates.pipeline, run.architecture.tie_embeddings
    tokens = tokens_of_step(run.training)
    if run.pipeline == 1 and len(stages) == 1 and not run.parallelism.rematerialize:
        executor = GradientAccumulation(stages[0].module, tokens)
        return Pipeline(executor, SharedWeights(division, rank, None, tied=tied))
    p2p_channels = P2PChannels(mesh, p2p_pairs(division.schedule) | shared_weight_pairs(division, tied=tied))
    return Pipeline(
        _build_schedule_executor(stages, run, mesh, division.schedule, p2p_channels, tokens),
        SharedWeights(division, rank, p2p_channels, tied=tied),
    )


def _build_schedule_executor(
    stages: Sequence[LocalStage],
    run: NativeRun,
    mesh: Mesh,
    schedule: Schedule,
    p2p_channels: P2PChannels,
    tokens: int,
) -> ScheduleExecutor:
    width, again = run.architecture.hidden_size, run.parallelism.rematerialize
    kind = kind_of(run.parallelism.order)
    slices = run.tensor if run.parallelism.sequence else 1
    if kind.measures_costs and run.pipeline > 1:
        watch = Stopwatch(mesh.device)
        timed = TimedStage(stages[0], tokens, rematerialize=again, watch=watch)
        limit = activation_limit(run.parallelism, run.pipeline)
        return AutoScheduleExecutor(
            kind, timed, schedule, p2p_channels, mesh, watch, limit=limit, width=width, slices=slices
        )
    pipeline_stages = [PipelineStage(stage, tokens, rematerialize=again) for stage in stages]
    return ScheduleExecutor(
        pipeline_stages, schedule, mesh.coordinates.pipeline, p2p_channels, width=width, slices=slices
    )
