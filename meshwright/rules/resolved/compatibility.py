"""Techniques of different parts of the runtime that do not go together, each with the reason and the way out."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.api.data_parallel_engine import DataParallelEngine, data_parallel_engine
from meshwright.api.precision import Precision
from meshwright.api.training import OptimizerName, OptimizerOffload, TrainingSpec
from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.registry import kind_of


def combination_problems(run: NativeRun, training: TrainingSpec) -> Iterator[str]:
    """What of a run does not go together."""
    if run.layout.shard_ranks > 1:
        yield from _engine_problems(run, training)
    if training.outer is not None:
        yield from _outer_problems(run, training)


def _engine_problems(run: NativeRun, training: TrainingSpec) -> Iterator[str]:
    engine, stage = data_parallel_engine(run.parallelism), run.parallelism.zero_stage
    if training.parameter_offload and engine is not DataParallelEngine.FSDP:
        yield (
            "`training.parameterOffload: true` needs `parallelism.zeroStage: 3`, or 2 with "
            "`parallelism.dataParallel.strategy: FSDP`: only FSDP gathers a layer at a time"
        )
    if engine is not DataParallelEngine.FLAT:
        return
    alternative = "use `parallelism.dataParallel.strategy: FSDP` with `parallelism.zeroStage` 2 or 3"
    if training.optimizer.name is OptimizerName.MUON:
        yield (
            f"`training.optimizer.name: Muon` does not go with `parallelism.zeroStage: {stage}` on flat shards, which "
            f"cut matrices anywhere: {alternative}"
        )
    if not training.master_weights:
        yield (
            f"`training.masterWeights: false` does not go with `parallelism.zeroStage: {stage}` on flat shards, whose "
            f"elements are rounded by their place: {alternative}"
        )


def _outer_problems(run: NativeRun, training: TrainingSpec) -> Iterator[str]:
    optimizer = training.optimizer
    if training.precision is Precision.FP16 or training.fp8 is not None or not training.master_weights:
        yield (
            "`training.outer` needs `training.precision` fp32, bf16 or fp64 with `masterWeights: true` and no `fp8`: "
            "scales and rounding would differ between islands"
        )
    if optimizer.name is not OptimizerName.ADAMW or optimizer.offload is not OptimizerOffload.NONE:
        yield "`training.outer` needs `training.optimizer.name: AdamW` and `training.optimizer.offload: None`"
    if run.pipeline > 1 and kind_of(run.parallelism.order).asynchronous:
        yield (
            f"`training.outer` needs another `parallelism.schedule` than {run.parallelism.order.value}: islands "
            "meet between steps, which it has none of"
        )
