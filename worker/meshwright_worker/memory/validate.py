"""Which number formats, optimizers and ways to save memory go together. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.api.spec import OptimizerName, OptimizerOffload, Precision, TrainingSpec


def memory_problems(training: TrainingSpec, context: int) -> Iterator[str]:
    """What of a run cannot be executed, each with the field and the fix; `context` is its context-parallel degree."""
    optimizer = training.optimizer
    if training.attention_dropout and context > 1:
        yield (
            f"`training.attentionDropout: {training.attention_dropout}` needs `parallelism.context: 1`: ranks that "
            "share a sequence keep no attention probabilities; set it to 0 and use `training.dropout`"
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
    if optimizer.offload is OptimizerOffload.NONE:
        return
    if optimizer.name is not OptimizerName.ADAMW or not training.master_weights:
        yield (
            f"`training.optimizer.offload: {optimizer.offload.value}` needs `training.optimizer.name: AdamW` and "
            "`training.masterWeights: true`"
        )
    if (optimizer.offload is OptimizerOffload.FILE) != (optimizer.offload_path is not None):
        yield "`training.optimizer.offloadPath` must be set with `training.optimizer.offload: File`, and only then"
