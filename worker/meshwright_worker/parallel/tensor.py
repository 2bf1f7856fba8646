"""Tensor parallelism after Megatron-LM (arXiv 1909.08053), optionally with its sequence parallelism (2205.05198).

Attention heads, the feed-forward width and the vocabulary are split over the ranks of a tensor group: DTensor's column
and row styles, a vocabulary-parallel embedding, and logits that stay split through the loss. With sequence parallelism
the residual stream between them is split along the positions; an all-reduce becomes a reduce-scatter and an all-gather.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from meshwright_worker.models.llama import DecoderStage


def split_over_tensor_group(stage: DecoderStage, group: DeviceMesh, *, sequence: bool) -> None:
    """Split a stage in place: its matrices become DTensors on `group`. On the meta device it communicates nothing."""
    residual: Placement = Shard(1) if sequence else Replicate()
    for block in stage.layers.values():
        parallelize_module(block, group, _block_styles(residual))
    if stage.is_first:
        embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=residual)
        parallelize_module(stage, group, {"embedding": embedding})
    if stage.is_last:
        tied = stage.is_first and stage.output.weight is stage.embedding.weight
        output = ColwiseParallel(input_layouts=residual, output_layouts=Shard(-1), use_local_output=False)
        loss = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())
        parallelize_module(stage, group, {"output": output, "loss": loss})
        if tied:
            stage.tie()


def partial_parameters(stage: DecoderStage, *, sequence: bool) -> list[nn.Parameter]:
    """The parameters of which each rank of a tensor group has only its positions' gradient: it has to be summed there.

    Under sequence parallelism these are the norms: they are whole on every rank but see a slice of the positions.
    """
    return [parameter for parameter in stage.parameters() if parameter.ndim == 1] if sequence else []


def split_loss(*, tensor: int) -> AbstractContextManager[None]:
    """Within it cross-entropy and its gradient work on logits split along the vocabulary."""
    return loss_parallel() if tensor > 1 else nullcontext()


def _block_styles(residual: Placement) -> dict[str, ParallelStyle]:
    # The input is made whole once for query, key and value (and for gate and up), not once for each of them.
    whole = PrepareModuleInput(input_layouts=(residual,), desired_input_layouts=(Replicate(),))
    return {
        "attention": whole,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=residual),
        "feed_forward": whole,
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=residual),
    }
