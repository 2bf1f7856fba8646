"""Which ways of keeping replicas equal this runtime can execute, decided from numbers alone."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.api.data_parallel import DataParallelStrategy, GradientCompression
from meshwright.api.data_parallel_engine import DataParallelEngine, data_parallel_engine
from meshwright.api.training import OuterMethod
from meshwright.protocol.run_config import NativeRun
from meshwright.rules.nearest import nearest
from meshwright.schedules.registry import kind_of

_HYBRID = (DataParallelStrategy.HYBRID_SHARD, DataParallelStrategy.HYBRID_SHARD_ZERO2)
_FIELD = "`parallelism.dataParallel."


def replica_problems(run: NativeRun) -> Iterator[str]:
    """What does not fit, each with its field and the fix."""
    spec, stage = run.parallelism.data_parallel, run.parallelism.zero_stage
    strategy = spec.strategy
    if strategy is not None and stage not in strategy.zero_stages:
        nearest_values = " or ".join(str(n) for n in strategy.zero_stages)
        yield f"{_FIELD}strategy: {strategy}` needs `parallelism.zeroStage` {nearest_values}, not {stage}"
    if strategy in _HYBRID and spec.shard_size is None:
        yield f"{_FIELD}strategy: {strategy}` needs {_FIELD}shardSize`: replicas that share one set of shards"
    if spec.compression is not GradientCompression.NONE and stage > 0:
        yield f"{_FIELD}compression: {spec.compression}` needs `parallelism.zeroStage: 0`: only whole gradients fit"
    if spec.shard_size is not None and stage == 0:
        yield f"{_FIELD}shardSize: {spec.shard_size}` needs `parallelism.zeroStage` 1, 2 or 3"
    yield from _divisor("shardSize", spec.shard_size, max(1, run.data_parallel // run.islands), run)
    yield from _outer_problems(run)
    yield from _flat_problems(run)
    yield from _reshard_problems(run)


def _flat_problems(run: NativeRun) -> Iterator[str]:
    model, stage = run.architecture, run.parallelism.zero_stage
    if run.expert > 1 and run.parallelism.data_parallel.shard_size is not None:
        yield f"`parallelism.expert: {run.expert}` cannot be combined with {_FIELD}shardSize`: remove one"
    if data_parallel_engine(run.parallelism) is not DataParallelEngine.FLAT or run.data_parallel * run.context == 1:
        return
    alternative = f"use {_FIELD}strategy: FSDP` with `parallelism.zeroStage` 2 or 3, or `zeroStage: 0`"
    if model.mixture is not None and (run.expert > 1 or run.tensor > 1):
        yield f"`parallelism.zeroStage: {stage}` on flat shards does not go with experts that are split: {alternative}"
    if run.pipeline > 1 and model.tie_embeddings:
        yield f"`model.tieEmbeddings: true` in a pipeline does not go with flat shards: {alternative}"
    if run.pipeline > 1 and kind_of(run.parallelism.order).bidirectional:
        yield f"`parallelism.schedule: {run.parallelism.order.value}` does not go with flat shards: {alternative}"


def _outer_problems(run: NativeRun) -> Iterator[str]:
    outer = run.training.outer
    if outer is None:
        return
    replicas = run.data_parallel
    if run.islands < 2 or replicas % run.islands:
        nearest_values = nearest(run.islands, lambda n: n > 1 and replicas % n == 0, replicas)
        field_text = f"`training.outer.islands: {run.islands}`"
        yield f"{field_text} must be at least 2 and divide `replicas: {replicas}`; nearest: {nearest_values}"
    if run.expert > 1:
        yield f"`parallelism.expert: {run.expert}` cannot be combined with `training.outer`: experts would span islands"
    every, checkpoint = outer.every_steps, run.checkpoint
    if checkpoint is not None and checkpoint.interval % every:
        nearest_values = nearest(every, lambda n: checkpoint.interval % n == 0, checkpoint.interval)
        yield (
            f"`training.outer.everySteps: {every}` must divide `checkpoint.everySteps: {checkpoint.interval}`: islands "
            f"are equal after a round alone; nearest: {nearest_values}"
        )
    if outer.method is OuterMethod.FED_AVG and (run.data.claim_name is None or run.data.mixture):
        yield (
            "`training.outer.method: FedAvg` needs `data.claimName` and no `data.mixture`: each island has files of "
            "its own, in the folders `island-0`, `island-1`, ... of the volume"
        )


def _reshard_problems(run: NativeRun) -> Iterator[str]:
    size = run.parallelism.data_parallel.reshard_size
    if size is None:
        return
    if run.parallelism.zero_stage != 3:
        yield f"{_FIELD}reshardSize: {size}` needs `parallelism.zeroStage: 3`: other stages do not reshard"
    # torch makes a group for every layer inside each replica group alone: their names would clash between groups.
    for name, degree in (("tensor", run.tensor), ("pipeline", run.pipeline), ("context", run.context)):
        if degree > 1:
            yield f"{_FIELD}reshardSize: {size}` needs `parallelism.{name}: 1`, not {degree}"
    if run.islands > 1:
        yield f"{_FIELD}reshardSize: {size}` cannot be combined with `training.outer`: remove one"
    yield from _divisor("reshardSize", size, run.parallelism.data_parallel.shard_size or run.data_parallel, run)


def _divisor(field: str, size: int | None, replicas: int, run: NativeRun) -> Iterator[str]:
    if size is None or replicas % size == 0:
        return
    replicas_text = f"`replicas: {run.data_parallel}`"
    if replicas != run.data_parallel:
        replicas_text = f"{replicas}, the replicas that share shards of {replicas_text}"
    nearest_values = nearest(size, lambda n: replicas % n == 0, replicas)
    yield f"{_FIELD}{field}: {size}` must divide {replicas_text}; nearest: {nearest_values}"
