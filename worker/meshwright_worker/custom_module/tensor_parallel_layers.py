"""The split layers of a plan, as each rank of a tensor group computes its part (Megatron-LM, 1909.08053)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from meshwright_worker.distributed.collectives import all_gather_into
from meshwright_worker.models.layers import local
from meshwright_worker.parallel.tensor.regions import enter_tensor_parallel, exit_tensor_parallel


class ColumnLinear(nn.Linear):
    """Computes some of the outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs / ranks]."""
        return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))


class RowLinear(nn.Linear):
    """Computes from some of the inputs: a term of the sum at the end of a region."""

    bias_factor: float
    """1 on the rank whose term includes the bias, 0 on the others. If the bias were added to the sum, operations after
    this layer in the region, such as a scale or dropout, would not apply to it.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs / ranks] -> [..., outputs]."""
        return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias) * self.bias_factor)


class GatheredLinear(nn.Linear):
    """Computes some of the outputs, and gathers those of the other ranks."""

    group: dist.ProcessGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs], the same on every rank of the group."""
        x = enter_tensor_parallel(x, self.group, sequence=False)
        local_output = F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))
        gathered: torch.Tensor = _GatherFeatures.apply(local_output, self.group)  # type: ignore[no-untyped-call]
        return gathered


class SplitEmbedding(nn.Embedding):
    """Stores some of the rows; results are summed over ranks."""

    first_row: int
    group: dist.ProcessGroup

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., width], the same on every rank of the group.

        Raises:
            IndexError: a token that the whole table has no row for. On a GPU a device assertion, as of a whole table.
        """
        rows = local(self.weight)
        local_output, padding = tokens - self.first_row, self.padding_idx
        known = (tokens >= 0) & (tokens < self.num_embeddings)
        # Unknown tokens stay outside of every part, so that looking them up fails as in the full table.
        outside = known & ((local_output < 0) | (local_output >= rows.shape[0]))
        if padding is not None:
            padding = padding - self.first_row if 0 <= padding - self.first_row < rows.shape[0] else None
        embedded = F.embedding(local_output.masked_fill(outside, 0), rows, padding)
        return exit_tensor_parallel(embedded.masked_fill(outside.unsqueeze(-1), 0.0), self.group, sequence=False)


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered_features = x.new_empty((group.size(), *x.shape))
        all_gather_into(gathered_features, x.contiguous(), group)
        return gathered_features.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Every rank has the gradient of all features, since the following computation is the same on each.
        return gradients[0].chunk(ctx.group.size(), dim=-1)[ctx.group.rank()].contiguous(), None
