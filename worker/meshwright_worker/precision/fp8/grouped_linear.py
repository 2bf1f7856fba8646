"""The products of routed experts in fp8, forward and both of the backward pass, for all experts of this rank at once.

Recipes are those of `linear`, defined so that distributing experts over ranks does not change results. The rows of one
micro-batch correspond to a dense layer's tensor: with one scale per tensor, each row uses the scale of its micro-batch,
taken over all ranks that have its experts or other tokens of it. Each expert's matrix has its own scales; a history
(delayed) stores the largest value of all experts of a layer. Weight gradients, which are sums over tokens, use a scale
per column of each expert's rows of one micro-batch.

Hopper's grouped kernel multiplies e4m3 by e4m3 with a scale per row, which fits the forward pass; gradients are e5m2.
For these, and wherever there is no such kernel, the same quantized numbers are multiplied in bf16 or fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from meshwright.api.precision import Fp8Spec
from meshwright_worker.models.grouped_mm import grouped_linear, grouped_weight_grad
from meshwright_worker.models.moe import Experts
from meshwright_worker.models.split_backward import DeferredWeightGrad, defer_weight_grad_of, local_operand
from meshwright_worker.precision.fp8.quantize import BACKWARD, FORWARD, TILE, QuantizedTensor, absolute_max, quantize
from meshwright_worker.precision.fp8.scaling_recipe import GRADIENT, INPUT, WEIGHT, Fp8Recipe


def supports_grouped_kernel(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> bool:
    """Return whether `scaled_grouped_mm` can multiply these, into `dtype`."""
    if not a.values.is_cuda or dtype is not torch.bfloat16 or not len(a.values):
        return False
    aligned = not any(size % TILE for size in b.values.shape[1:])
    return aligned and a.values.dtype == b.values.dtype == FORWARD and _has_kernel(a.values.device)


def scaled_grouped_mm(a: QuantizedTensor, b: QuantizedTensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of group g with the transposed matrix g, in bf16.

    Args:
        a: [rows, inputs], sorted by group, one scale per row [rows, 1].
        b: [groups, outputs, inputs], scales [groups, 1 or outputs, 1].
        counts: int64 [groups], number of rows per group.

    Returns:
        [rows, outputs].
    """
    groups, outputs, _ = b.values.shape
    # The private name is older than the public one and exists in all supported versions; it accepts only scales per
    # row.
    result: torch.Tensor = torch._scaled_grouped_mm(
        a.values,
        b.values.transpose(-2, -1),
        a.scale.squeeze(1).contiguous(),
        b.scale.squeeze(2).expand(groups, outputs).contiguous(),
        offs=counts.cumsum(0).to(torch.int32),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return result


@cache
def _has_kernel(device: torch.device) -> bool:
    """Try it on two small matrices: torch does not report which GPUs and builds support it."""
    one = torch.ones((), device=device)
    a = QuantizedTensor(torch.ones(32, TILE, device=device).to(FORWARD), one.expand(32, 1))
    b = QuantizedTensor(torch.ones(2, TILE, TILE, device=device).to(FORWARD), one.expand(2, 1, 1))
    try:
        product = scaled_grouped_mm(a, b, torch.tensor([16, 16], device=device))
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return bool((product == TILE).all())


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The expert and the micro-batch of each row of a grouped product."""

    counts: torch.Tensor
    """int64 [groups]: number of consecutive rows per expert."""
    origin: torch.Tensor
    """int64 [rows]: the micro-batch of each row, numbered over the expert group."""
    origins: int
    """Number of micro-batches in the expert group."""

    @property
    def segment(self) -> torch.Tensor:
        """int64 [rows]: equal for the rows of one expert and one micro-batch."""
        group = torch.arange(len(self.counts), device=self.counts.device)
        return group.repeat_interleave(self.counts, output_size=len(self.origin)) * self.origins + self.origin


@dataclass(frozen=True, slots=True)
class Sharing:
    """How micro-batches are distributed over the ranks of one set of experts, if ranks share the tokens of each.

    Either an expert group has all ranks of several micro-batches, or all of its ranks have parts of one.
    """

    ranks: int = 1
    """Number of ranks of the expert group that have parts of one micro-batch."""
    micro_batches: int = 1
    """Number of micro-batches of the expert group."""
    tokens: dist.ProcessGroup | None = None
    """The context group, if it extends beyond the expert group."""
    parts: int = 1
    """Number of different sets of experts in that context group, one per rank of the expert group."""
    part: int = 0
    """Index of this rank's set."""

    @classmethod
    def of(cls, expert_group: dist.ProcessGroup | None, context: dist.ProcessGroup | None) -> Sharing:
        """Return the sharing of an expert group and a context group, one of which divides the other; None means one
        rank.
        """
        experts, sharing = 1 if expert_group is None else expert_group.size(), 1 if context is None else context.size()
        ranks = min(experts, sharing)
        if experts >= sharing:
            return cls(ranks, experts // ranks)
        return cls(ranks, 1, context, experts, 0 if expert_group is None else expert_group.rank())


ALONE = Sharing()


class Fp8GroupedProduct(Fp8Recipe):
    """The products of one matrix of every expert of a layer, see `models.moe.GroupedProduct`.

    Args:
        spec: the scaling method.
        group: the ranks that the experts' widths are split over; None if they are not split.
        inputs: whether a matrix's inputs are split; otherwise, in a group, its outputs are.
        experts: the ranks that the experts are distributed over; None if all are on this rank.
        sharing: how the expert group's ranks share micro-batches.
    """

    def __init__(
        self,
        spec: Fp8Spec,
        group: dist.ProcessGroup | None,
        experts: dist.ProcessGroup | None,
        *,
        inputs: bool,
        sharing: Sharing = ALONE,
    ) -> None:
        super().__init__(spec, group, inputs=inputs, tokens=sharing.tokens)
        self._experts = experts
        self._sharing = sharing
        self._run: Callable[..., torch.Tensor] = _multiply

    def __call__(
        self, rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, origin: torch.Tensor | None
    ) -> torch.Tensor:
        """See `models.moe.GroupedProduct`. Collective if experts are distributed and there is one scale per tensor."""
        micro_batch_index = counts.new_zeros(rows.shape[0]) if origin is None else origin // self._sharing.ranks
        return self._run(rows, weight, RowGroups(counts, micro_batch_index, self._sharing.micro_batches), self)

    def compile(self) -> None:
        """Prepare for torch.compile: rows are counted at run time."""
        self._run = _outside_graph()

    def by_row(self, x: torch.Tensor, role: int, row_groups: RowGroups) -> QuantizedTensor:
        """Quantize rows [rows, columns], with one scale per row."""
        dtype = BACKWARD if role == GRADIENT else FORWARD
        inputs, outputs = self._split
        split = (inputs, True, outputs)[role]
        amax = absolute_max(x, rowwise=True)
        if self.rowwise:
            return quantize(x, self._max_over_group(amax, split), dtype)
        sent = x.new_zeros(row_groups.origins, dtype=torch.float32)
        sent.scatter_reduce_(0, row_groups.origin, amax.squeeze(1), "amax")
        if (fixed_amax := self._fixed_amax(role, sent.amax, x.device)) is not None:
            return quantize(x, fixed_amax.expand(len(x), 1), dtype)
        self._max_over_group(sent, split)
        if self._experts is not None:
            dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=self._experts)
        self._max_over_tokens(sent)
        return quantize(x, sent[row_groups.origin].unsqueeze(1), dtype)

    def by_matrix(self, weight: torch.Tensor) -> QuantizedTensor:
        """Quantize matrices [experts, outputs, inputs], with one scale each, or one per row of outputs."""
        inputs, outputs = self._split
        along = (2,) if self.rowwise else (1, 2)
        amax = weight.abs().amax(along, keepdim=True).float()
        fixed_amax = None if self.rowwise else self._fixed_amax(WEIGHT, amax.amax, weight.device)
        if fixed_amax is not None:
            return quantize(weight, fixed_amax.expand(len(weight), 1, 1), FORWARD)
        return quantize(weight, self._max_over_group(amax, inputs or (outputs and not self.rowwise)), FORWARD)

    def by_input(self, weight: torch.Tensor) -> QuantizedTensor:
        """Quantize matrices [experts, outputs, inputs] with a scale per column of inputs."""
        return quantize(
            weight, self._max_over_group(weight.abs().amax(1, keepdim=True).float(), self._split[1]), FORWARD
        )

    def by_column(self, x: torch.Tensor, role: int, row_groups: RowGroups) -> QuantizedTensor:
        """Quantize rows [rows, columns] with a scale per column of each segment.

        Collective if a context group is wider than the expert group: the rows of one expert and micro-batch are then on
        several of its ranks.
        """
        segment, sharing = row_groups.segment, self._sharing
        amax = x.new_zeros(sharing.parts, len(row_groups.counts) * row_groups.origins, x.shape[1], dtype=torch.float32)
        amax[sharing.part].scatter_reduce_(0, segment.unsqueeze(1).expand(x.shape), x.abs().float(), "amax")
        self._max_over_tokens(amax)
        return quantize(x, amax[sharing.part][segment], BACKWARD if role == GRADIENT else FORWARD)


class _Fp8Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        row_groups: RowGroups,
        recipe: Fp8GroupedProduct,
        deferred: DeferredWeightGrad | None,
    ) -> torch.Tensor:
        a, b = recipe.by_row(rows, INPUT, row_groups), recipe.by_matrix(weight)
        ctx.recipe, ctx.row_groups, ctx.deferred = recipe, row_groups, deferred
        if recipe.rowwise:
            ctx.save_for_backward(rows, weight)
        else:
            # One scale serves both directions: the input is saved with one byte per element.
            ctx.save_for_backward(a.values, a.scale, weight, b.scale)
        if supports_grouped_kernel(a, b, rows.dtype):
            return scaled_grouped_mm(a, b, row_groups.counts)
        dtype = _matmul_dtype(rows)
        return grouped_linear(_dequantize(a, dtype), _dequantize(b, dtype), row_groups.counts).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
        gradient = gradients[0].contiguous()
        recipe: Fp8GroupedProduct = ctx.recipe
        row_groups: RowGroups = ctx.row_groups
        dtype = _matmul_dtype(gradient)
        quantized_grad = recipe.by_row(gradient, GRADIENT, row_groups)
        if recipe.rowwise:
            rows, weight = ctx.saved_tensors
            matrices = recipe.by_input(weight)
            weight_grad_fn = partial(_by_column_outer, rows, gradient, row_groups, recipe, weight.dtype)
        else:
            values, scale, weight, weight_scale = ctx.saved_tensors
            matrices = quantize(weight, weight_scale * torch.finfo(FORWARD).max, FORWARD)
            weight_grad_fn = partial(
                _outer, QuantizedTensor(values, scale), quantized_grad, row_groups, dtype, weight.dtype
            )
        transposed_matrices = _dequantize(matrices, dtype).transpose(1, 2).contiguous()
        input_grad = grouped_linear(_dequantize(quantized_grad, dtype), transposed_matrices, row_groups.counts).to(
            gradient.dtype
        )
        if ctx.deferred is None:
            return input_grad, weight_grad_fn(), None, None, None
        ctx.deferred.defer(weight_grad_fn)
        return input_grad, None, None, None, None


def _outer(
    inputs: QuantizedTensor, outputs: QuantizedTensor, row_groups: RowGroups, dtype: torch.dtype, result: torch.dtype
) -> torch.Tensor:
    """Return the matrices' gradients from quantized rows and gradients, multiplied in `dtype`. Not collective."""
    return grouped_weight_grad(_dequantize(outputs, dtype), _dequantize(inputs, dtype), row_groups.counts).to(result)


def _by_column_outer(
    rows: torch.Tensor, gradient: torch.Tensor, row_groups: RowGroups, recipe: Fp8GroupedProduct, result: torch.dtype
) -> torch.Tensor:
    """Return the matrices' gradients with a scale per column of each segment."""
    outputs, inputs = recipe.by_column(gradient, GRADIENT, row_groups), recipe.by_column(rows, INPUT, row_groups)
    return _outer(inputs, outputs, row_groups, _matmul_dtype(gradient), result)


def _matmul_dtype(like: torch.Tensor) -> torch.dtype:
    """Return the format for products of fp8 numbers: bf16 if a GPU has a grouped kernel for it."""
    return like.dtype if like.is_cuda else torch.float32


def _dequantize(x: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that the fp8 values represent."""
    return (x.values.float() * x.scale).to(dtype)


def _multiply(
    rows: torch.Tensor, weight: torch.Tensor, row_groups: RowGroups, recipe: Fp8GroupedProduct
) -> torch.Tensor:
    deferred = defer_weight_grad_of(rows, weight)
    result: torch.Tensor = _Fp8Grouped.apply(  # type: ignore[no-untyped-call]
        rows, local_operand(rows, weight, deferred), row_groups, recipe, deferred
    )
    return result


@cache
def _outside_graph() -> Callable[..., torch.Tensor]:
    """Return `_multiply` excluded from graphs. Created at the first call, because it imports the compiler."""
    disable_compile: Any = torch.compiler.disable
    uncompiled: Callable[..., torch.Tensor] = disable_compile(_multiply)
    return uncompiled


def convert_experts_to_fp8(
    experts: Experts,
    spec: Fp8Spec,
    group: dist.ProcessGroup | None,
    expert_group: dist.ProcessGroup | None,
    context: dist.ProcessGroup | None = None,
) -> None:
    """Let a mixture's routed experts compute in fp8.

    Args:
        experts: split over their groups, but not sharded over replicas.
        spec: how scales come about.
        group: the tensor group; None where there is none.
        expert_group: the expert group; None where there is none.
        context: the context group, likewise; one of the two divides the other.
    """
    sharing = Sharing.of(expert_group, context)
    for name, matrix in experts.named_parameters():
        along = (
            [p.dim for p in matrix.placements if isinstance(p, ShardPlacement)] if isinstance(matrix, DTensor) else []
        )
        experts.products[name] = Fp8GroupedProduct(spec, group, expert_group, inputs=2 in along, sharing=sharing)
