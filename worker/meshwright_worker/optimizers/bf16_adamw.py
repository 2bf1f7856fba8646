"""AdamW (arXiv 1711.05101) without fp32 copies: parameters and moments are bf16, rounded stochastically.

Memory per parameter: 2 bytes, plus 2 for its gradient and 4 for its moments, against 16 with fp32 parameters. The
update is computed in fp32, a few rows at a time. The rounding noise is a function of the seed, the parameter's name,
the step and the element's index in the full parameter, so equal updates are rounded equally in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meshwright.api.training import OptimizerSpec
from meshwright_worker.counter_rng import random_bits, stream_key
from meshwright_worker.optimizers.optimizer import EPSILON, MOMENTS, applies_weight_decay, forget
from meshwright_worker.optimizers.stochastic_rounding import Matrix, element_numbers, matrices, round_to_bf16
from meshwright_worker.parallel.shards import ParameterShard

_ELEMENTS = 1 << 22
"""Elements of one piece of the update: its fp32 intermediates should be small compared with the stored state."""
_NOISE_BITS = 16


class BF16AdamW:
    """The optimizer of one rank without master weights.

    Args:
        shards: the shards to update.
        spec: the optimizer's settings.
        seed: of the rounding.
        compiled: whether the update of a shard runs as one compiled kernel, which reads and writes each number once.
    """

    def __init__(
        self, shards: Sequence[ParameterShard], spec: OptimizerSpec, seed: int, *, compiled: bool = False
    ) -> None:
        self._shards = shards
        self._spec = spec
        self._seed = seed
        self._steps = 0
        self._compiled = compiled
        # One kernel for all shapes. Numbers that change at each step are passed as tensors, since plain values would be
        # compiled in.
        self._update_rows = torch.compile(_update_rows, dynamic=True) if compiled else _update_rows
        self._moments = {
            id(shard): {moment: torch.zeros_like(shard.local) for moment in MOMENTS} for shard in self._shards
        }

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """See `Optimizer.step`."""
        self._steps += 1
        for shard, gradient in zip(self._shards, gradients, strict=True):
            self._update(shard, gradient, rate)
        self.forget()

    def forget(self) -> None:
        """See `Optimizer.forget`."""
        forget(self._shards)

    def moments(self, shard: ParameterShard) -> dict[str, torch.Tensor]:
        """See `Optimizer.moments`."""
        return self._moments[id(shard)]

    def set_step_count(self, steps: int) -> None:
        """See `Optimizer.set_step_count`."""
        self._steps = steps

    def _update(self, shard: ParameterShard, gradient: torch.Tensor, rate: float) -> None:
        local, box, shape = shard.local, shard.box, shard.shape
        if not local.numel():
            return
        spec = self._spec
        stored = [local, *self._moments[id(shard)].values()]
        decay = spec.weight_decay if applies_weight_decay(shard) else 0.0
        first_correction, second_correction = 1 - spec.beta1**self._steps, 1 - spec.beta2**self._steps
        numbers = [1 - rate * decay, rate / first_correction, math.sqrt(second_correction)]
        rule = [torch.tensor(number, dtype=torch.float64) for number in numbers]
        salt = torch.tensor(stream_key(self._seed, "rounding", shard.name, self._steps))
        betas = (spec.beta1, spec.beta2)
        for matrix in matrices(box, shape):
            views = [_matrix(tensor, matrix) for tensor in (*stored, gradient.contiguous())]
            rows, columns = views[0].shape
            step = rows if self._compiled else max(1, _ELEMENTS // columns)
            for first in range(0, rows, step):
                *state, gradient_rows = (view[first : first + step] for view in views)
                offset = torch.tensor(matrix.offset + first * matrix.stride)
                self._update_rows(state, gradient_rows, matrix.stride, offset, salt, rule, betas)


def _matrix(tensor: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Return one matrix of a local part, in its memory: updating a copy would have no effect."""
    if tensor.ndim == 1:
        return tensor.unsqueeze(0)
    leading = len(matrix.index)
    return tensor.view(*tensor.shape[: leading + 1], -1)[matrix.index]


def _update_rows(
    stored: list[torch.Tensor],
    gradient: torch.Tensor,
    stride: int,
    offset: torch.Tensor,
    salt: torch.Tensor,
    rule: list[torch.Tensor],
    betas: tuple[float, float],
) -> None:
    """Update a parameter and its moments in place.

    Args:
        stored: the parameter and both moments, bf16, [rows, columns].
        gradient: of the same shape.
        stride: elements of the full parameter from one row to the next.
        offset: int64 [], the index of the first element in the full parameter.
        salt: int64 [], of the step's noise.
        rule: the parameter's decay factor, the step size, the divisor of the second moment's root; fp64 [].
        betas: decays of the moments.
    """
    parameter, first, second = (tensor.float() for tensor in stored)
    gradient = gradient.float()
    decay_factor, size, correction = rule
    beta1, beta2 = betas
    first = first.lerp(gradient, 1 - beta1)
    second = second.mul(beta2).addcmul(gradient, gradient, value=1 - beta2)
    divisor = second.sqrt().div(correction).add(EPSILON)
    parameter = parameter.mul(decay_factor).sub(first.div(divisor).mul(size))
    # One random number per element is enough for all three: its bits are independent.
    rows, columns = gradient.shape
    bits = random_bits(element_numbers(rows, columns, stride, offset, gradient.device), salt)
    for number, (tensor, new) in enumerate(zip(stored, (parameter, first, second), strict=True)):
        tensor.copy_(round_to_bf16(new, bits >> (_NOISE_BITS * number)))
