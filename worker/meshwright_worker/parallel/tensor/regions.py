"""The conjugate pair of collectives around a tensor-parallel block (Megatron-LM, arXiv 1909.08053).

The forward pass of `enter_tensor_parallel` is the backward pass of `exit_tensor_parallel`, and the reverse. Without
sequence parallelism they are the identity and an all-reduce; with it (arXiv 2205.05198) an all-gather and a
reduce-scatter along the positions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from meshwright_worker.distributed.collectives import all_gather_sequence, all_reduced, reduce_scatter_sequence


class _EnterTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, sequence: bool) -> torch.Tensor:
        ctx.group, ctx.sequence = group, sequence
        return all_gather_sequence(x, group) if sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        reduce = reduce_scatter_sequence if ctx.sequence else all_reduced
        return reduce(gradient, ctx.group), None, None


class _ExitTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, sequence: bool) -> torch.Tensor:
        ctx.group, ctx.sequence = group, sequence
        return reduce_scatter_sequence(x, group) if sequence else all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        return all_gather_sequence(gradient, ctx.group) if ctx.sequence else gradient, None, None


def enter_tensor_parallel(x: torch.Tensor, group: dist.ProcessGroup, *, sequence: bool) -> torch.Tensor:
    """Return the full residual stream on every rank of the group. Its gradient is summed over the ranks."""
    entered: torch.Tensor = _EnterTensorParallel.apply(x, group, sequence)  # type: ignore[no-untyped-call]
    return entered


def exit_tensor_parallel(x: torch.Tensor, group: dist.ProcessGroup, *, sequence: bool) -> torch.Tensor:
    """Return the sum of every rank's contribution to the residual stream; with `sequence`, only this rank's
    positions.
    """
    left: torch.Tensor = _ExitTensorParallel.apply(x, group, sequence)  # type: ignore[no-untyped-call]
    return left
