"""Which pipelines this runtime can run. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.precision import Precision
from meshwright.api.training import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol.run_config import NativeRun
from meshwright.rules.nearest import nearest
from meshwright.schedules.pipeline_layout import layers_of_stages, stages_per_rank
from meshwright.schedules.registry import kind_of, schedules_where


def pipeline_problems(run: NativeRun, model: Architecture, training: TrainingSpec) -> Iterator[str]:
    """What keeps a run's pipeline from running, in sentences with the nearest values that work."""
    yield from _misplaced_field_problems(run)
    yield from _split_problems(run, model, training)
    if run.pipeline > 1:
        yield from _micro_batch_problems(run)
        yield from _asynchronous_problems(run, model, training)


def _misplaced_field_problems(run: NativeRun) -> Iterator[str]:
    parallelism = run.parallelism
    kind = kind_of(parallelism.order)
    if parallelism.virtual_stages is not None and not kind.virtual_stages:
        yield (
            f"`parallelism.virtualStages: {parallelism.virtual_stages}` needs `parallelism.schedule` to be "
            f"{' or '.join(sorted(schedules_where(lambda one: one.virtual_stages)))}"
        )
    if parallelism.activation_limit is not None and not kind.takes_activation_limit:
        yield (
            f"`parallelism.activationLimit: {parallelism.activation_limit}` needs `parallelism.schedule: "
            f"{PipelineSchedule.AUTOMATIC.value}`"
        )


def _split_problems(run: NativeRun, model: Architecture, training: TrainingSpec) -> Iterator[str]:
    rank_stages = stages_per_rank(run.parallelism, run.pipeline)
    if run.pipeline * rank_stages > model.layers:
        stages = f" with {rank_stages} stages a rank" if rank_stages > 1 else ""
        yield (
            f"`parallelism.pipeline: {run.pipeline}`{stages} needs a layer a stage; at most `model.layers: "
            f"{model.layers}`"
        )
        return
    try:
        layers_of_stages(run.parallelism, run.pipeline, model, training.sequence_length)
    except ValueError as error:
        yield str(error)


def _micro_batch_problems(run: NativeRun) -> Iterator[str]:
    kind, ranks, count = kind_of(run.parallelism.order), run.pipeline, run.micro_batches
    if kind.whole_rounds and count % ranks:
        nearest_values = nearest(count, lambda n: n % ranks == 0, count + ranks)
        multiple = f"a multiple of `parallelism.pipeline: {ranks}`"
        yield f"`parallelism.microBatches: {count}` must be {multiple}; nearest: {nearest_values}"
    if kind.even and (ranks % 2 or count % 2):
        name, value = ("pipeline", ranks) if ranks % 2 else ("microBatches", count)
        nearest_values = nearest(value, lambda n: n % 2 == 0, value + 1)
        yield (
            f"`parallelism.{name}: {value}` must be even for {kind.name}, which runs both ways; "
            f"nearest: {nearest_values}"
        )
    if kind.micro_batches_per_rank > 1 and count < kind.micro_batches_per_rank * ranks:
        yield (
            f"`parallelism.microBatches: {count}` must be at least {2 * ranks} for {kind.name}: two for each of "
            f"`parallelism.pipeline: {ranks}`"
        )
    if kind.micro_batches_per_rank > 0 and count < ranks:
        yield (
            f"`parallelism.microBatches: {count}` must be at least `parallelism.pipeline: {ranks}`: with fewer some "
            f"stage always waits; only `schedule: {PipelineSchedule.NAIVE.value}` may"
        )


def _asynchronous_problems(run: NativeRun, model: Architecture, training: TrainingSpec) -> Iterator[str]:
    schedule = run.parallelism.order
    kind = kind_of(schedule)
    if not kind.asynchronous:
        return
    if kind.single_micro_batch and run.micro_batches != 1:
        yield (
            f"`parallelism.microBatches: {run.micro_batches}` must be 1 with PipeDream, which updates weights after "
            f"each; use `schedule: {PipelineSchedule.PIPEDREAM_2BW.value}` for several"
        )
    if run.parallelism.zero_stage:
        yield (
            f"`parallelism.zeroStage: {run.parallelism.zero_stage}` must be 0 with {schedule.value}, which keeps "
            "several versions of a stage's weights"
        )
    if run.parallelism.rematerialize:
        yield f"`parallelism.rematerialize: true` must be false with {schedule.value}: weights change before its use"
    if training.optimizer.gradient_clip:
        yield (
            f"`training.optimizer.gradientClip: {training.optimizer.gradient_clip}` must be 0 with {schedule.value}: "
            "no moment exists when a step's gradients are known everywhere"
        )
    if model.mixture is not None:
        yield f"`model.mixture` needs another `parallelism.schedule` than {schedule.value}, which has no common step"
    if model.tie_embeddings:
        yield f"`model.tieEmbeddings: true` needs `parallelism.pipeline: 1` with {schedule.value}"
    if training.precision is Precision.FP16 or training.fp8 is not None:
        yield (
            f"`training.precision: fp16` and `training.fp8` need another `parallelism.schedule` than {schedule.value}: "
            "their scales follow from a common step"
        )
