"""Cross-entropy on logits that are split along the vocabulary (Megatron-LM, arXiv 1909.08053, section 3).

Full logits would be the largest tensor of a step. Each rank keeps its columns, and ranks exchange three numbers per
token: the largest logit, then the sum of exponentials and the target's logit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from meshwright_worker.data.batch import IGNORED
from meshwright_worker.models.layers import TokenLoss
from meshwright_worker.precision.dtypes import upcast


class VocabParallelLoss(TokenLoss):
    """`TokenLoss` for a group whose ranks each have the logits of a part of the vocabulary; this rank's begins at
    `first`.
    """

    def __init__(self, first: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._first = first
        self._group = group

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Logits [batch, positions, own part of the vocabulary] and targets [batch, positions] -> [], on every rank."""
        loss: torch.Tensor = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
            upcast(logits.flatten(0, 1)), targets.flatten(), self._first, self._group
        )
        return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        largest = logits.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest.unsqueeze(-1)
        column = (targets - first).unsqueeze(-1)
        outside = (column < 0) | (column >= logits.shape[-1])
        column = column.masked_fill(outside, 0)
        target_logits = shifted.gather(-1, column).masked_fill(outside, 0.0).squeeze(-1)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), target_logits])
        dist.all_reduce(sums, group=group)
        counts = targets != IGNORED
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), column, outside, counts)
        return (sums[0].log() - sums[1]).masked_fill_(~counts, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities, column, outside, counts = ctx.saved_tensors
        (gradient,) = gradients
        ones = torch.ones_like(column, dtype=probabilities.dtype).masked_fill_(outside, 0.0)
        return probabilities.scatter_add(-1, column, -ones) * (gradient * counts.unsqueeze(-1)), None, None, None
