"""AdamW's rule (arXiv 1711.05101) element by element, in plain operators that torch.compile turns into one kernel.

Such a kernel reads and writes each number once. A tensor whose numbers follow each other in memory should come to it as
rows of `ROW`: of sizes that are known to be multiples of 16 a kernel loads several numbers in one instruction, and the
same kernel serves all shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.api.training import OptimizerSpec
from meshwright_worker.optimizers.optimizer import EPSILON

ROW = 1024
"""Numbers in a row of `as_rows`."""
_SHARED_BYTES = 64
"""What two operations have to read in common to become one kernel: more than the numbers of a rule, less than a row."""


def factors(spec: OptimizerSpec, step: int, rate: float, decay: float) -> list[torch.Tensor]:
    """Return the numbers that the rule takes in update `step`, from 1, fp64 []: the parameter's decay factor, the step
    size, the divisor of the second moment's root.

    They are tensors, since plain numbers would be compiled in.
    """
    first_correction, second_correction = 1 - spec.beta1**step, 1 - spec.beta2**step
    numbers = [1 - rate * decay, rate / first_correction, math.sqrt(second_correction)]
    return [torch.tensor(number, dtype=torch.float64) for number in numbers]


def updated(
    state: Sequence[torch.Tensor], gradient: torch.Tensor, rule: Sequence[torch.Tensor], betas: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a parameter and both moments after an update with `factors`, from the same before it."""
    parameter, first, second = state
    decay_factor, size, correction = rule
    beta1, beta2 = betas
    first = first.lerp(gradient, 1 - beta1)
    second = second.mul(beta2).addcmul(gradient, gradient, value=1 - beta2)
    divisor = second.sqrt().div(correction).add(EPSILON)
    return parameter.mul(decay_factor).sub(first.div(divisor).mul(size)), first, second


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor, in its memory, as a matrix for a function of `compiled`: rows of `ROW`, or one row if
    it has no such rows.
    """
    if not has_rows(tensor):
        return tensor.view(1, -1).data
    # A view would be compiled once for each number of dimensions of the tensor that it shows.
    rows = tensor.view(-1, ROW).data
    torch._dynamo.mark_static(rows, 1)
    return rows


def has_rows(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is rows of `ROW`. Of one row another kernel would be compiled."""
    return tensor.numel() % ROW == 0 and tensor.numel() > ROW


def compiled(update: Callable[..., Any]) -> Callable[..., Any]:
    """Compile an update once for all shapes, but for what `as_rows` keeps.

    An update of several parameters becomes one kernel for each: all of them in one kernel, which share no more than the
    numbers of the rule, would need more registers than there are.
    """
    return torch.compile(update, dynamic=True, options={"score_fusion_memory_threshold": _SHARED_BYTES})
