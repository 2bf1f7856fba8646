"""A layer's matrix products in fp8: forward, and both of the backward pass.

What a scale is taken from is a maximum, and a rank that sees part of a tensor, of its columns in a tensor group or of
its tokens in a context group, takes it over the group: then the numbers are quantised as in one process. Scales are of
the micro-batch at hand (dynamic), of the last steps (delayed: nothing waits for a maximum) or given (static).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardedAlong

from meshwright.api.precision import Fp8Spec, Fp8Update
from meshwright_worker.fp8.formats import (
    BACKWARD,
    FORWARD,
    Quantised,
    fits_hardware,
    hardware_multiplies,
    largest,
    product,
    quantised,
)
from meshwright_worker.fp8.recipe import GRADIENT, INPUT, WEIGHT, Fp8Recipe
from meshwright_worker.models.deferred import Later, later, operand
from meshwright_worker.models.layers import Linear
from meshwright_worker.models.llama import DecoderStage

log = logging.getLogger(__name__)


class Fp8Product(Fp8Recipe):
    """The product of a `Linear`. Layers that are split alike share one, so that compiled layers are alike too; with
    delayed scaling each has its own, for its maxima. Arguments as for `Fp8Recipe`.
    """

    def __init__(
        self,
        spec: Fp8Spec,
        group: dist.ProcessGroup | None,
        *,
        inputs: bool,
        tokens: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(spec, group, inputs=inputs, tokens=tokens)
        self.hardware = hardware_multiplies()
        self._multiply: Callable[[torch.Tensor, torch.Tensor, Fp8Product], torch.Tensor] = _multiply

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[..., inputs] times the rows of weight [outputs, inputs] -> [..., outputs]."""
        return self._multiply(x, weight, self)

    def compile(self) -> None:
        """Get ready for torch.compile: it cannot trace maxima that backward passes leave here."""
        if self.spec.update is Fp8Update.DELAYED:
            self._multiply = _untraced()

    def whole(self, x: torch.Tensor, role: int) -> Quantised:
        """A tensor with one scale."""
        form = BACKWARD if role == GRADIENT else FORWARD
        known = self._known(role, lambda: largest(x, rowwise=False), x.device)
        if known is not None:
            return quantised(x, known, form)
        inputs, outputs = self._split
        amax = self._agreed(largest(x, rowwise=False), (inputs, inputs or outputs, outputs)[role])
        return quantised(x, amax if role == WEIGHT else self._agreed_by_parts(amax), form)

    def rows(self, x: torch.Tensor, role: int, *, along_inputs: bool = False, along_outputs: bool = False) -> Quantised:
        """A tensor with a scale a row; what runs along its rows may be split over the group."""
        split = (along_inputs and self._split[0]) or (along_outputs and self._split[1])
        amax = self._agreed(largest(x, rowwise=True), split)
        return quantised(x, amax, BACKWARD if role == GRADIENT else FORWARD)

    def columns(self, x: torch.Tensor, role: int) -> Quantised:
        """Tokens [tokens, width] as rows of columns [width, tokens], with a scale a column."""
        turned = x.t().contiguous()
        amax = self._agreed_by_parts(largest(turned, rowwise=True))
        return quantised(turned, amax, BACKWARD if role == GRADIENT else FORWARD)


def _multiply(x: torch.Tensor, weight: torch.Tensor, how: Fp8Product) -> torch.Tensor:
    left = later(x, weight)
    flat: torch.Tensor = _Fp8Linear.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, -2), operand(x, weight, left), how, left
    )
    return flat.view(*x.shape[:-1], -1)


@cache
def _untraced() -> Callable[[torch.Tensor, torch.Tensor, Fp8Product], torch.Tensor]:
    """One for all products, so that layers stay alike. When first asked for: it brings the compiler along."""
    untraced: Callable[[torch.Tensor, torch.Tensor, Fp8Product], torch.Tensor]
    untraced = torch.compiler.disable(_multiply)  # type: ignore[no-untyped-call]
    return untraced


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: Fp8Product, left: Later | None) -> torch.Tensor:
        ctx.how, ctx.left = how, left
        if how.rowwise:
            ctx.save_for_backward(x, weight)
            a, b = how.rows(x, INPUT, along_inputs=True), how.rows(weight, WEIGHT, along_inputs=True)
            return product(a, b, x.dtype, hardware=how.hardware)
        small, whole = how.whole(x, INPUT), how.whole(weight, WEIGHT)
        # One scale serves both directions: a byte an element is kept of the input.
        ctx.save_for_backward(small.values, small.scale, weight, whole.scale)
        return product(small, whole, x.dtype, hardware=how.hardware)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        (gradient,) = gradients
        how: Fp8Product = ctx.how
        if how.rowwise:
            x, weight = ctx.saved_tensors
            incoming = how.rows(gradient, GRADIENT, along_outputs=True)
            columns = how.rows(weight.t().contiguous(), WEIGHT, along_outputs=True)
            back = product(incoming, columns, x.dtype, hardware=how.hardware)
            of_weight = partial(_rowwise_outer, x, gradient, weight.dtype, how)
        else:
            values, scale, weight, weight_scale = ctx.saved_tensors
            incoming = how.whole(gradient, GRADIENT)
            whole = quantised(weight, weight_scale * torch.finfo(FORWARD).max, FORWARD)
            back = product(incoming, whole.transposed, gradient.dtype, hardware=how.hardware)
            of_weight = partial(_outer, Quantised(values, scale), incoming, weight.dtype, how)
        if ctx.left is None:
            return back, of_weight(), None, None
        ctx.left.leave(of_weight)
        return back, None, None, None


def _outer(x: Quantised, gradient: Quantised, form: torch.dtype, how: Fp8Product) -> torch.Tensor:
    """The weight's gradient. All maxima are known: nothing is collective."""
    return product(gradient.transposed, x.transposed, form, hardware=how.hardware)


def _rowwise_outer(x: torch.Tensor, gradient: torch.Tensor, form: torch.dtype, how: Fp8Product) -> torch.Tensor:
    """The weight's gradient. Its sums run over tokens, which only a context group splits: collective there."""
    return product(how.columns(gradient, GRADIENT), how.columns(x, INPUT), form, hardware=how.hardware)


def use_fp8(
    stage: DecoderStage, spec: Fp8Spec, group: dist.ProcessGroup | None, tokens: dist.ProcessGroup | None = None
) -> None:
    """Let every linear layer of a stage's blocks compute in fp8; embedding and output projection stay as they are.

    Args:
        stage: the stage, split over its tensor group but not sharded over replicas.
        spec: how scales come about.
        group: the tensor group; None where there is none.
        tokens: the context group, likewise.
    """
    shared: dict[tuple[dist.ProcessGroup | None, bool], Fp8Product] = {}
    odd: set[tuple[int, ...]] = set()
    for module in stage.layers.modules():
        if isinstance(module, Linear):
            weight = module.weight
            split = weight.placements[0] if isinstance(weight, DTensor) else None
            along = split.dim if isinstance(split, ShardedAlong) else None
            kind = (group if along is not None else None, along == 1)
            if spec.update is Fp8Update.DELAYED or kind not in shared:
                shared[kind] = Fp8Product(spec, kind[0], inputs=kind[1], tokens=tokens)
            module.product = shared[kind]
            own = tuple((weight.to_local() if isinstance(weight, DTensor) else weight).shape)
            odd |= set() if fits_hardware(*own) else {own}
    if odd and hardware_multiplies():
        log.warning(
            "`training.fp8`: weights of %s on a rank are multiplied in fp32, slowly: the GPU's fp8 products take sizes "
            "that are multiples of 16; choose such widths, or another `parallelism.tensor`",
            " and ".join("x".join(map(str, size)) for size in sorted(odd)),
        )
