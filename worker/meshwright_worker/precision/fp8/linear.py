"""A layer's matrix products in fp8: forward, and both of the backward pass.

A scale is computed from a maximum. If a rank has only a part of the tensor (of its columns in a tensor group, or of its
tokens in a context group), the maximum is taken over the group, so that numbers are quantized as in one process. Scales
come from the current micro-batch (dynamic), from previous steps (delayed: nothing waits for a maximum) or from the spec
(static).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from meshwright.api.precision import Fp8Spec, Fp8Update
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.layers import Linear
from meshwright_worker.models.split_backward import DeferredWeightGrad, defer_weight_grad_of, local_operand
from meshwright_worker.precision.fp8.gathered_weight import GatheredWeight
from meshwright_worker.precision.fp8.quantize import (
    BACKWARD,
    FORWARD,
    QuantizedTensor,
    absolute_max,
    has_fp8_matmul,
    is_fp8_aligned,
    product,
    quantize,
)
from meshwright_worker.precision.fp8.scaling_recipe import GRADIENT, INPUT, WEIGHT, Fp8Recipe

log = logging.getLogger(__name__)


class Fp8Product(Fp8Recipe):
    """The product of a `Linear`. Layers that are split in the same way share one, so that compiled layers are
    identical.

    With delayed scaling each layer has its own product, for its maxima. Arguments as for `Fp8Recipe`.
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
        self.native = has_fp8_matmul()
        self._multiply: Callable[[torch.Tensor, torch.Tensor, Fp8Product], torch.Tensor] = _multiply

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[..., inputs] times the rows of weight [outputs, inputs] -> [..., outputs]."""
        return self._multiply(x, weight, self)

    def compile(self) -> None:
        """Prepare for torch.compile: it cannot trace maxima that backward passes store here."""
        if self.spec.update is Fp8Update.DELAYED:
            self._multiply = _outside_graph()

    def whole(self, x: torch.Tensor, role: int) -> QuantizedTensor:
        """Quantize a tensor with one scale."""
        dtype = BACKWARD if role == GRADIENT else FORWARD
        fixed_amax = self._fixed_amax(role, lambda: absolute_max(x, rowwise=False), x.device)
        if fixed_amax is not None:
            return quantize(x, fixed_amax, dtype)
        inputs, outputs = self._split
        amax = self._max_over_group(absolute_max(x, rowwise=False), (inputs, inputs or outputs, outputs)[role])
        return quantize(x, amax if role == WEIGHT else self._max_over_tokens(amax), dtype)

    def rows(
        self, x: torch.Tensor, role: int, *, along_inputs: bool = False, along_outputs: bool = False
    ) -> QuantizedTensor:
        """Quantize a tensor with one scale per row; rows may be split over the group."""
        split = (along_inputs and self._split[0]) or (along_outputs and self._split[1])
        amax = self._max_over_group(absolute_max(x, rowwise=True), split)
        return quantize(x, amax, BACKWARD if role == GRADIENT else FORWARD)

    def columns(self, x: torch.Tensor, role: int) -> QuantizedTensor:
        """Quantize tokens [tokens, width] as rows of columns [width, tokens], with one scale per column."""
        columns_as_rows = x.t().contiguous()
        amax = self._max_over_tokens(absolute_max(columns_as_rows, rowwise=True))
        return quantize(columns_as_rows, amax, BACKWARD if role == GRADIENT else FORWARD)


def _multiply(x: torch.Tensor, weight: torch.Tensor, recipe: Fp8Product) -> torch.Tensor:
    deferred = defer_weight_grad_of(x, weight)
    operand = local_operand(x, weight, deferred)
    # Taken apart here and by attributes: compiled code cannot inside of the function, or by a property.
    gathered = (operand.fp8_values, operand.fp8_scale) if isinstance(operand, GatheredWeight) else (None, None)
    flat: torch.Tensor = _Fp8Linear.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, -2), operand, *gathered, recipe, deferred
    )
    return flat.view(*x.shape[:-1], -1)


@cache
def _outside_graph() -> Callable[[torch.Tensor, torch.Tensor, Fp8Product], torch.Tensor]:
    """Return one function for all products, so that layers stay identical. Created at the first call: it imports the
    compiler.
    """
    uncompiled: Callable[[torch.Tensor, torch.Tensor, Fp8Product], torch.Tensor]
    uncompiled = torch.compiler.disable(_multiply)  # type: ignore[no-untyped-call]
    return uncompiled


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        values: torch.Tensor | None,
        scale: torch.Tensor | None,
        recipe: Fp8Product,
        deferred: DeferredWeightGrad | None,
    ) -> torch.Tensor:
        ctx.recipe, ctx.deferred, ctx.weight_dtype = recipe, deferred, weight.dtype
        if recipe.rowwise:
            ctx.save_for_backward(x, weight)
            a, b = recipe.rows(x, INPUT, along_inputs=True), recipe.rows(weight, WEIGHT, along_inputs=True)
            return product(a, b, x.dtype, native=recipe.native, fast=True)
        small = recipe.whole(x, INPUT)
        if values is not None and scale is not None:
            whole, weight = QuantizedTensor(values, scale), values
        else:
            whole = recipe.whole(weight, WEIGHT)
        # One scale serves both directions: the input is saved with one byte per element.
        ctx.save_for_backward(small.values, small.scale, weight, whole.scale)
        return product(small, whole, x.dtype, native=recipe.native, fast=True)

    @staticmethod
    def backward(
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None, None]:
        (gradient,) = gradients
        recipe: Fp8Product = ctx.recipe
        if recipe.rowwise:
            x, weight = ctx.saved_tensors
            quantized_grad = recipe.rows(gradient, GRADIENT, along_outputs=True)
            columns = recipe.rows(weight.t().contiguous(), WEIGHT, along_outputs=True)
            input_grad = product(quantized_grad, columns, x.dtype, native=recipe.native)
            weight_grad_fn = partial(_rowwise_outer, x, gradient, ctx.weight_dtype, recipe)
        else:
            values, scale, weight, weight_scale = ctx.saved_tensors
            quantized_grad = recipe.whole(gradient, GRADIENT)
            whole = _quantized_again(weight, weight_scale)
            input_grad = product(quantized_grad, whole.transposed, gradient.dtype, native=recipe.native)
            weight_grad_fn = partial(_outer, QuantizedTensor(values, scale), quantized_grad, ctx.weight_dtype, recipe)
        weight_grad = None
        if ctx.deferred is None:
            weight_grad = weight_grad_fn()
        else:
            ctx.deferred.defer(weight_grad_fn)
        return input_grad, weight_grad, None, None, None, None


def _quantized_again(weight: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
    """Return a weight as the forward pass quantized it; one that was gathered in fp8 has its numbers."""
    if weight.dtype is FORWARD:
        return QuantizedTensor(weight, scale)
    return quantize(weight, scale * torch.finfo(FORWARD).max, FORWARD)


def _outer(x: QuantizedTensor, gradient: QuantizedTensor, dtype: torch.dtype, recipe: Fp8Product) -> torch.Tensor:
    """Return the weight's gradient. All maxima are known, so it is not collective."""
    return product(gradient.transposed, x.transposed, dtype, native=recipe.native)


def _rowwise_outer(x: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype, recipe: Fp8Product) -> torch.Tensor:
    """Return the weight's gradient. Its sums run over tokens; collective if a context group splits these."""
    return product(recipe.columns(gradient, GRADIENT), recipe.columns(x, INPUT), dtype, native=recipe.native)


def convert_to_fp8(
    stage: DecoderStage, spec: Fp8Spec, group: dist.ProcessGroup | None, tokens: dist.ProcessGroup | None = None
) -> None:
    """Make every linear layer of a stage's blocks compute in fp8; embedding and output projection do not change.

    Args:
        stage: the stage, split over its tensor group but not sharded over replicas.
        spec: the scaling method.
        group: the tensor group; None if there is none.
        tokens: the context group; None if there is none.
    """
    shared: dict[tuple[dist.ProcessGroup | None, bool], Fp8Product] = {}
    misaligned_shapes: set[tuple[int, ...]] = set()
    for module in stage.layers.modules():
        if isinstance(module, Linear):
            weight = module.weight
            split = weight.placements[0] if isinstance(weight, DTensor) else None
            along = split.dim if isinstance(split, ShardPlacement) else None
            kind = (group if along is not None else None, along == 1)
            if spec.update is Fp8Update.DELAYED or kind not in shared:
                shared[kind] = Fp8Product(spec, kind[0], inputs=kind[1], tokens=tokens)
            module.product = shared[kind]
            local_shape = tuple((weight.to_local() if isinstance(weight, DTensor) else weight).shape)
            misaligned_shapes |= set() if is_fp8_aligned(*local_shape) else {local_shape}
    if misaligned_shapes and has_fp8_matmul():
        log.warning(
            "`training.fp8`: weights of %s on a rank are multiplied in fp32, slowly: the GPU's fp8 products take sizes "
            "that are multiples of 16; choose such widths, or another `parallelism.tensor`",
            " and ".join("x".join(map(str, size)) for size in sorted(misaligned_shapes)),
        )
