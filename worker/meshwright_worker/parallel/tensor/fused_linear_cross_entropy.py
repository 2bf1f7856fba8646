"""Fused output projection and cross-entropy over chunks of tokens: full logits are never stored.

The gradient of a chunk's logits is known as soon as its loss is. It is therefore multiplied into the gradients of
hidden states and matrix at once (Liger kernel, arXiv 2410.10989), and the backward pass only scales them. Under tensor
parallelism each rank has the logits of its part of the vocabulary, as in
`parallel/tensor/vocab_parallel_cross_entropy.py`, and ranks exchange three numbers per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright_worker.data.batch import IGNORED
from meshwright_worker.distributed.collectives import enter_tensor_parallel
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.layers import Linear, local
from meshwright_worker.precision.dtypes import upcast


class ChunkedLoss(nn.Module):
    """The loss of hidden states. For logits that already exist, see `TokenLoss`.

    Args:
        chunk: number of tokens whose logits exist at a time.
        group: the ranks that have the other parts of the matrix; None if this rank has all of it.
        sequence: whether each of them has its own positions of the hidden states.
    """

    def __init__(self, chunk: int, group: dist.ProcessGroup | None = None, *, sequence: bool = False) -> None:
        super().__init__()
        self._chunk = chunk
        self._group = group
        self._sequence = sequence

    def forward(self, hidden: torch.Tensor, output: Linear, targets: torch.Tensor) -> torch.Tensor:
        """Hidden states [batch, positions, width] and targets [batch, positions] -> [], the sum over targets."""
        weight, first = local(output.weight), 0
        if self._group is not None:
            hidden = enter_tensor_parallel(hidden, self._group, sequence=self._sequence)
            first = self._group.rank() * weight.shape[0]
        loss: torch.Tensor = _ChunkedLinearLoss.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, 1), weight, targets.flatten(), self._chunk, first, self._group, torch.is_grad_enabled()
        )
        return loss


def use_chunked_loss(stage: DecoderStage, chunk: int, group: dist.ProcessGroup | None, *, sequence: bool) -> None:
    """Make the last stage compute its loss in chunks; `group` is the ranks that its vocabulary is split over."""
    if stage.is_last:
        stage.chunked_loss = ChunkedLoss(chunk, group, sequence=sequence)


class _ChunkedLinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        chunk: int,
        first: int,
        group: dist.ProcessGroup | None,
        needed: bool,
    ) -> torch.Tensor:
        matrix = weight.to(hidden.dtype)
        hidden_gradient = torch.empty_like(hidden) if needed else None
        accumulated = torch.promote_types(weight.dtype, torch.float32)
        weight_gradient = torch.zeros(weight.shape, dtype=accumulated, device=weight.device) if needed else None
        total = torch.zeros((), dtype=accumulated, device=hidden.device)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            loss, gradient = _loss_and_gradient(upcast(hidden[part] @ matrix.T), targets[part], first, group)
            total += loss
            if hidden_gradient is not None and weight_gradient is not None:
                small = gradient.to(hidden.dtype)
                hidden_gradient[part] = small @ matrix
                weight_gradient += small.T @ hidden[part]
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.formats = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = [
            (saved * gradients[0]).to(dtype) if needed else None
            for saved, dtype, needed in zip(ctx.saved_tensors, ctx.formats, ctx.needs_input_grad, strict=False)
        ]
        return (*parts, None, None, None, None, None)


def _loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, first: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss, [], and its gradient in the memory of `logits`, [tokens, own part of the vocabulary]."""
    largest = logits.amax(dim=-1)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits -= largest.unsqueeze(-1)
    column = (targets - first).unsqueeze(-1)
    outside = (column < 0) | (column >= logits.shape[-1])
    column = column.masked_fill(outside, 0)
    target_logits = logits.gather(-1, column).masked_fill(outside, 0.0).squeeze(-1)
    exponentials = logits.exp_()
    sums = torch.stack([exponentials.sum(dim=-1), target_logits])
    if group is not None:
        dist.all_reduce(sums, group=group)
    counts = targets != IGNORED
    loss = (sums[0].log() - sums[1]).masked_fill(~counts, 0.0).sum()
    ones = counts.unsqueeze(-1).to(logits.dtype)
    probabilities = exponentials.mul_(ones / sums[0].unsqueeze(-1))
    return loss, probabilities.scatter_add_(-1, column, -ones.masked_fill(outside, 0.0))
