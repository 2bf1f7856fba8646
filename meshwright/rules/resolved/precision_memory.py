"""Which number formats, optimizers and ways to save memory go together. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.api.precision import Fp8Scaling, Fp8Update, Precision
from meshwright.api.training import (
    ActivationCheckpointing,
    OptimizerName,
    OptimizerOffload,
    OptimizerSpec,
    TrainingSpec,
)
from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.registry import kind_of


def memory_problems(run: NativeRun, training: TrainingSpec) -> Iterator[str]:
    """What of a run cannot be executed, each with the field and the fix."""
    yield from _layout_problems(run, training)
    yield from _graph_problems(run, training)
    yield from _format_problems(training)
    yield from _offload_problems(training.optimizer, training)


def _layout_problems(run: NativeRun, training: TrainingSpec) -> Iterator[str]:
    if training.parameter_offload and not (run.parallelism.zero_stage > 1 and run.layout.shard_ranks > run.islands):
        # Islands share no shards: each needs somebody to share with.
        fits = 2 * run.islands
        yield (
            "`training.parameterOffload: true` needs `parallelism.zeroStage` 2 or 3, not "
            f"{run.parallelism.zero_stage}, and `replicas` times `parallelism.context` of at least {fits}, not "
            f"{run.layout.shard_ranks}"
        )
    if training.parameter_offload_path is not None and not training.parameter_offload:
        yield "`training.parameterOffloadPath` needs `training.parameterOffload: true`: set it, or remove the path"
    if training.attention_dropout and run.context > 1:
        yield (
            f"`training.attentionDropout: {training.attention_dropout}` needs `parallelism.context: 1`: ranks that "
            "share a sequence keep no attention probabilities; set it to 0 and use `training.dropout`"
        )


def _graph_problems(run: NativeRun, training: TrainingSpec) -> Iterator[str]:
    """What breaks the graph of a compiled layer, in which `Selective` is decided."""
    if not training.compile or training.checkpointing is not ActivationCheckpointing.SELECTIVE:
        return
    fp8, order = training.fp8, run.parallelism.order
    graph_breaks = {
        f"`parallelism.tensor: {run.tensor}`": run.tensor > 1,
        f"`parallelism.context: {run.context}`": run.context > 1,
        "`data.packing: Documents`": run.packs_documents,
        "`model.mixture`": run.architecture.mixture is not None,
        "`training.fp8.update: Delayed`": fp8 is not None and fp8.update is Fp8Update.DELAYED,
        f"`parallelism.schedule: {order.value}`": run.pipeline > 1 and not kind_of(order).whole_backward,
    }
    if breaks_found := [name for name, present in graph_breaks.items() if present]:
        yield (
            "`training.activationCheckpointing: Selective` with `training.compile: true` does not go with "
            f"{', '.join(breaks_found)}: a layer is then compiled in pieces, which compute every matrix product "
            "again; use "
            "`Full` or `None`, or `compile: false`"
        )


def _format_problems(training: TrainingSpec) -> Iterator[str]:
    optimizer, fp8 = training.optimizer, training.fp8
    if fp8 is not None and training.precision not in (Precision.BF16, Precision.FP32):
        yield f"`training.fp8` needs `training.precision: bf16` or `fp32`, not `{training.precision.value}`"
    if fp8 is not None and training.lora is not None:
        yield "`training.fp8` needs `training.lora` left out: adapters are narrow matrices, which gain nothing from it"
    if fp8 is not None and fp8.scaling is Fp8Scaling.ROWWISE and fp8.update is not Fp8Update.DYNAMIC:
        yield (
            f"`training.fp8.update: {fp8.update.value}` needs `training.fp8.scaling: Tensorwise`: rows are other "
            "tokens in every step; or use `update: Dynamic`"
        )
    if not training.master_weights and training.precision is not Precision.BF16:
        yield (
            "`training.masterWeights: false` needs `training.precision: bf16`, which has fp32's range, not "
            f"`{training.precision.value}`"
        )
    if not training.master_weights and optimizer.name is not OptimizerName.ADAMW:
        yield (
            f"`training.optimizer.name: {optimizer.name.value}` needs `training.masterWeights: true`: only AdamW's "
            "updates are rounded stochastically"
        )


def _offload_problems(optimizer: OptimizerSpec, training: TrainingSpec) -> Iterator[str]:
    offloads = optimizer.offload is not OptimizerOffload.NONE
    if offloads and (optimizer.name is not OptimizerName.ADAMW or not training.master_weights):
        yield (
            f"`training.optimizer.offload: {optimizer.offload.value}` needs `training.optimizer.name: AdamW` and "
            "`training.masterWeights: true`"
        )
    if (optimizer.offload is OptimizerOffload.FILE) != (optimizer.offload_path is not None):
        yield "`training.optimizer.offloadPath` must be set with `training.optimizer.offload: File`, and only then"
