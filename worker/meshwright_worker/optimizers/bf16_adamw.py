"""AdamW (arXiv 1711.05101) without fp32 copies: parameters and moments are bf16, rounded stochastically.

Memory per parameter: 2 bytes, plus 2 for its gradient and 4 for its moments, against 16 with fp32 parameters. The
update is computed in fp32, a few rows at a time.

Rounding to nearest drops an update far smaller than the distance of two bf16 numbers. Stochastic rounding rounds up or
down with the probability that makes the result unbiased, so that the update counts in the mean (Zamirai et al.,
"Revisiting BFloat16 Training", arXiv 2010.06192). The rounding noise is a function of the seed, the parameter's name,
the step and the element's index in the full parameter, so equal updates are rounded equally in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from operator import mul

import torch

from meshwright.api.training import OptimizerSpec
from meshwright_worker.counter_rng import random_bits, stream_key
from meshwright_worker.optimizers.adamw_rule import as_rows, compiled, factors, updated
from meshwright_worker.optimizers.optimizer import MOMENTS, applies_weight_decay, clear_gradients
from meshwright_worker.parallel.shards import ParameterShard

_LOW_HALF = 0xFFFF

_ELEMENTS = 1 << 22
"""Elements of one piece of the update: its fp32 intermediates should be small compared with the stored state."""
_NOISE_BITS = 16


@dataclass(frozen=True, slots=True)
class Matrix:
    """A part of a parameter as a matrix, and its position among the parameter's elements, counted row by row."""

    index: tuple[int, ...]
    """Its index in the leading dimensions of the local part."""
    offset: int
    """Index of its first element."""
    stride: int
    """Elements of the full parameter from one row to the next."""


def matrices(box: tuple[slice, ...], shape: tuple[int, ...]) -> list[Matrix]:
    """Return the part `box` of a tensor of `shape` as the smallest number of matrices; full dimensions become columns.

    A vector is one row. Reshape the local part to [*leading, rows, columns]; each matrix is one index of the leading
    dimensions.
    """
    spans, sizes = [(extent.start, extent.stop) for extent in box], list(shape)
    while len(sizes) > 2 and spans[-1] == (0, sizes[-1]):
        inner = sizes.pop()
        spans.pop()
        spans[-1] = (spans[-1][0] * inner, spans[-1][1] * inner)
        sizes[-1] *= inner
    strides = [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
    leading = [range(stop - start) for start, stop in spans[:-2]]
    first = sum(start * stride for (start, _), stride in zip(spans, strides, strict=True))
    return [
        Matrix(index, first + sum(map(mul, index, strides)), strides[-2] if len(strides) > 1 else 1)
        for index in product(*leading)
    ]


def element_numbers(
    rows: int, columns: int, stride: int, offset: int | torch.Tensor, device: torch.device
) -> torch.Tensor:
    """int64 [rows, columns]: the index of each element of a matrix in the full parameter."""
    along = torch.arange(rows, device=device).unsqueeze(-1) * stride + torch.arange(columns, device=device)
    return along + offset


def round_to_bf16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round fp32 `x` to bf16, each element by the lowest 16 of its random bits, int64. Non-finite elements stay
    non-finite.
    """
    pattern = x.float().contiguous().view(torch.int32)
    noise = (bits & _LOW_HALF).to(torch.int32)
    # The upper half of an fp32 number is a bf16 number: a number added to the lower half carries over or is cut off.
    rounded = ((pattern + noise) & ~_LOW_HALF).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


class BF16AdamW:
    """The optimizer of one rank without master weights.

    Args:
        shards: the shards to update.
        spec: the optimizer's settings.
        seed: of the rounding.
        compiles: whether the update of a shard runs as one compiled kernel, which reads and writes each number once.
    """

    def __init__(
        self, shards: Sequence[ParameterShard], spec: OptimizerSpec, seed: int, *, compiles: bool = False
    ) -> None:
        self._shards = shards
        self._spec = spec
        self._seed = seed
        self._steps = 0
        self._compiles = compiles
        self._update_rows = compiled(_update_rows) if compiles else _update_rows
        self._moments = {id(shard): {moment: torch.zeros_like(shard.local) for moment in MOMENTS} for shard in shards}
        self._matrices = {id(shard): matrices(shard.box, shard.shape) for shard in shards}

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """See `Optimizer.step`."""
        self._steps += 1
        for shard, gradient in zip(self._shards, gradients, strict=True):
            self._update(shard, gradient, rate)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """See `Optimizer.clear_gradients`."""
        clear_gradients(self._shards)

    def moments(self, shard: ParameterShard) -> dict[str, torch.Tensor]:
        """See `Optimizer.moments`."""
        return self._moments[id(shard)]

    def set_step_count(self, steps: int) -> None:
        """See `Optimizer.set_step_count`."""
        self._steps = steps

    def _update(self, shard: ParameterShard, gradient: torch.Tensor, rate: float) -> None:
        local = shard.local
        if not local.numel():
            return
        spec = self._spec
        stored = [local, *self._moments[id(shard)].values()]
        decay = spec.weight_decay if applies_weight_decay(shard) else 0.0
        rule = factors(spec, self._steps, rate, decay)
        salt = torch.tensor(stream_key(self._seed, "rounding", shard.name, self._steps))
        betas = (spec.beta1, spec.beta2)
        for matrix in self._matrices[id(shard)]:
            views = [_matrix(tensor, matrix) for tensor in (*stored, gradient.contiguous())]
            rows, columns = views[0].shape
            stride = None if rows == 1 or matrix.stride == columns else matrix.stride
            if self._compiles:
                # Where an element's index is its place in memory, a kernel need not find its row: two divisions each.
                views = [as_rows(view) if stride is None else view.data for view in views]
                self._update_rows(views[:-1], views[-1], stride, torch.tensor(matrix.offset), salt, rule, betas)
                continue
            step = max(1, _ELEMENTS // columns)
            for first in range(0, rows, step):
                *state, gradient_rows = (view[first : first + step] for view in views)
                offset = torch.tensor(matrix.offset + first * (stride or columns))
                self._update_rows(state, gradient_rows, stride, offset, salt, rule, betas)


def _matrix(tensor: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Return one matrix of a local part, in its memory: updating a copy would have no effect."""
    if tensor.ndim == 1:
        return tensor.unsqueeze(0)
    leading = len(matrix.index)
    return tensor.view(*tensor.shape[: leading + 1], -1)[matrix.index]


def _update_rows(
    stored: list[torch.Tensor],
    gradient: torch.Tensor,
    stride: int | None,
    offset: torch.Tensor,
    salt: torch.Tensor,
    rule: list[torch.Tensor],
    betas: tuple[float, float],
) -> None:
    """Update a parameter and its moments in place.

    Args:
        stored: the parameter and both moments, bf16, [rows, columns].
        gradient: of the same shape.
        stride: elements of the full parameter from one row to the next; None if these are all of them.
        offset: int64 [], the index of the first element in the full parameter.
        salt: int64 [], of the step's noise.
        rule: see `factors`.
        betas: decays of the moments.
    """
    new = updated([tensor.float() for tensor in stored], gradient.float(), rule, betas)
    # One random number per element is enough for all three: its bits are independent.
    rows, columns = gradient.shape
    bits = random_bits(element_numbers(rows, columns, stride or columns, offset, gradient.device), salt)
    for number, (tensor, exact) in enumerate(zip(stored, new, strict=True)):
        tensor.copy_(round_to_bf16(exact, bits >> (_NOISE_BITS * number)))
