"""A layer's matrix products in fp8: forward, and both of the backward pass.

What a scale is taken from is a maximum, and a rank of a tensor group that sees part of a tensor takes it over the
group: then the numbers are quantised as in one process. Scales are of the micro-batch at hand (dynamic), of the last
steps (delayed: nothing waits for a maximum) or given (static).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardedAlong

from meshwright.api.precision import Fp8Scaling, Fp8Spec, Fp8Update
from meshwright_worker.fp8.formats import (
    BACKWARD,
    FORWARD,
    Quantised,
    hardware_multiplies,
    largest,
    product,
    quantised,
)
from meshwright_worker.models.layers import Linear, local
from meshwright_worker.models.llama import DecoderStage

INPUT, WEIGHT, GRADIENT = range(3)


class Fp8Product:
    """The product of a `Linear`. Layers that are split alike share one, so that compiled layers are alike too; with
    delayed scaling each has its own, for its maxima.

    Args:
        spec: how scales come about.
        group: the ranks that the weight is split over; None where there are none.
        inputs: whether the weight's inputs are split; otherwise, in a group, its outputs are.
    """

    def __init__(self, spec: Fp8Spec, group: dist.ProcessGroup | None, *, inputs: bool) -> None:
        self.spec = spec
        self._group = group
        self._split = (group is not None and inputs, group is not None and not inputs)
        self.rowwise = spec.scaling is Fp8Scaling.ROWWISE
        self.hardware = hardware_multiplies()
        self.seen: torch.Tensor | None = None
        """Delayed scaling: the largest input, weight and gradient of the step so far, fp32 [3]."""
        self.expected: torch.Tensor | None = None
        """Delayed scaling: the largest of the last steps, fp32 [3]; None in the first."""
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
        if self.spec.update is Fp8Update.STATIC:
            given = (self.spec.input_amax, self.spec.weight_amax, self.spec.gradient_amax)[role]
            return quantised(x, torch.tensor(given, device=x.device), form)
        amax = largest(x, rowwise=False)
        if self.spec.update is Fp8Update.DELAYED:
            if self.seen is None:
                self.seen = torch.zeros(3, device=x.device)
            self.seen[role] = torch.maximum(self.seen[role], amax)
            if self.expected is not None:
                return quantised(x, self.expected[role], form)
        inputs, outputs = self._split
        return quantised(x, self._agreed(amax, (inputs, inputs or outputs, outputs)[role]), form)

    def rows(self, x: torch.Tensor, role: int, *, along_inputs: bool = False, along_outputs: bool = False) -> Quantised:
        """A tensor with a scale a row; what runs along its rows may be split over the group."""
        split = (along_inputs and self._split[0]) or (along_outputs and self._split[1])
        amax = self._agreed(largest(x, rowwise=True), split)
        return quantised(x, amax, BACKWARD if role == GRADIENT else FORWARD)

    def _agreed(self, amax: torch.Tensor, split: bool) -> torch.Tensor:
        if split:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self._group)
        return amax


def _multiply(x: torch.Tensor, weight: torch.Tensor, how: Fp8Product) -> torch.Tensor:
    flat: torch.Tensor = _Fp8Linear.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, -2), local(weight).to(x.dtype), how
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
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: Fp8Product) -> torch.Tensor:
        ctx.how = how
        if how.rowwise:
            ctx.save_for_backward(x, weight)
            a, b = how.rows(x, INPUT, along_inputs=True), how.rows(weight, WEIGHT, along_inputs=True)
            return product(a, b, x.dtype, hardware=how.hardware)
        small, matrix = how.whole(x, INPUT), how.whole(weight, WEIGHT)
        # One scale serves both directions: a byte an element is kept of the input.
        ctx.save_for_backward(small.values, small.scale, weight, matrix.scale)
        return product(small, matrix, x.dtype, hardware=how.hardware)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (gradient,) = gradients
        how: Fp8Product = ctx.how
        if how.rowwise:
            x, weight = ctx.saved_tensors
            incoming = how.rows(gradient, GRADIENT, along_outputs=True)
            columns = how.rows(weight.t().contiguous(), WEIGHT, along_outputs=True)
            # These sums run over tokens, which no group splits.
            outputs = how.rows(gradient.t().contiguous(), GRADIENT)
            inputs = how.rows(x.t().contiguous(), INPUT)
            back = product(incoming, columns, x.dtype, hardware=how.hardware)
            return back, product(outputs, inputs, weight.dtype, hardware=how.hardware), None
        values, scale, weight, weight_scale = ctx.saved_tensors
        incoming = how.whole(gradient, GRADIENT)
        matrix = quantised(weight, weight_scale * torch.finfo(FORWARD).max, FORWARD)
        back = product(incoming, matrix.transposed, gradient.dtype, hardware=how.hardware)
        inputs = Quantised(values, scale).transposed
        return back, product(incoming.transposed, inputs, weight.dtype, hardware=how.hardware), None


def use_fp8(stage: DecoderStage, spec: Fp8Spec, group: dist.ProcessGroup | None) -> None:
    """Let every linear layer of a stage's blocks compute in fp8; embedding and output projection stay as they are.

    Args:
        stage: the stage, split over its tensor group but not sharded over replicas.
        spec: how scales come about.
        group: the tensor group; None where there is none.
    """
    shared: dict[tuple[dist.ProcessGroup | None, bool], Fp8Product] = {}
    for module in stage.layers.modules():
        if isinstance(module, Linear):
            weight = module.weight
            split = weight.placements[0] if isinstance(weight, DTensor) else None
            along = split.dim if isinstance(split, ShardedAlong) else None
            kind = (group if along is not None else None, along == 1)
            if spec.update is Fp8Update.DELAYED or kind not in shared:
                shared[kind] = Fp8Product(spec, kind[0], inputs=kind[1])
            module.product = shared[kind]


def products_of(stage: DecoderStage) -> list[Fp8Product]:
    """Every fp8 product of a stage, in the order of its layers."""
    found = [module.product for module in stage.layers.modules() if isinstance(module, Linear)]
    return [product for product in found if isinstance(product, Fp8Product)]
