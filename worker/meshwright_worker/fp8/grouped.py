"""The products of routed experts in fp8: forward, and both of the backward pass, for all experts here at once.

Recipes are those of `linear`, scaled so that spreading experts over ranks changes no number. What a dense layer's
tensor is there, the rows of one micro-batch are here: with one scale a tensor each row takes that of the micro-batch it
came with, over whichever ranks its experts are, and whichever have other tokens of it. An expert's matrix has scales of
its own; a history (delayed) keeps the largest of all experts of a layer. Sums over tokens, the weights' gradients, take
scales a column of each expert's rows of one micro-batch.

Hopper's grouped kernel multiplies e4m3 by e4m3 with a scale a row, which serves the forward pass; gradients are e5m2.
Those, and all where there is no such kernel, are the same quantised numbers multiplied in bf16 or fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardedAlong

from meshwright.api.precision import Fp8Spec
from meshwright_worker.fp8.formats import BACKWARD, FORWARD, Quantised, largest, quantised
from meshwright_worker.fp8.kernels import grouped_kernel_takes, scaled_groups
from meshwright_worker.fp8.recipe import GRADIENT, INPUT, WEIGHT, Fp8Recipe
from meshwright_worker.models.deferred import Later, later, operand
from meshwright_worker.models.experts import Experts
from meshwright_worker.models.grouped import grouped_linear, grouped_outer


@dataclass(frozen=True, slots=True)
class Rows:
    """Whose the rows of a grouped product are."""

    counts: torch.Tensor
    """int64 [groups]: consecutive rows of each expert."""
    origin: torch.Tensor
    """int64 [rows]: of which micro-batch each row is, numbered over the expert group."""
    origins: int
    """How many micro-batches the expert group has."""

    @property
    def segment(self) -> torch.Tensor:
        """int64 [rows]: equal for the rows of one expert and one micro-batch."""
        group = torch.arange(len(self.counts), device=self.counts.device)
        return group.repeat_interleave(self.counts, output_size=len(self.origin)) * self.origins + self.origin


@dataclass(frozen=True, slots=True)
class Sharing:
    """How micro-batches lie over the ranks that hold one set of experts, where ranks share the tokens of each.

    Either an expert group has all ranks of several micro-batches, or all of its ranks have parts of one.
    """

    ranks: int = 1
    """Of the expert group that have parts of one micro-batch."""
    micro_batches: int = 1
    """Of the expert group."""
    tokens: dist.ProcessGroup | None = None
    """The context group, where some of it is outside of the expert group."""
    parts: int = 1
    """Different sets of experts in that context group, one a rank of the expert group."""
    part: int = 0
    """Which of them is here."""

    @classmethod
    def of(cls, spread: dist.ProcessGroup | None, context: dist.ProcessGroup | None) -> Sharing:
        """The sharing of an expert group and a context group, one of which divides the other; None are of one rank."""
        experts, sharing = 1 if spread is None else spread.size(), 1 if context is None else context.size()
        ranks = min(experts, sharing)
        if experts >= sharing:
            return cls(ranks, experts // ranks)
        return cls(ranks, 1, context, experts, 0 if spread is None else spread.rank())


ALONE = Sharing()


class Fp8GroupedProduct(Fp8Recipe):
    """The products of one matrix of every expert of a layer, see `models.experts.GroupedProduct`.

    Args:
        spec: how scales come about.
        group: the ranks that the experts' widths are split over; None where there are none.
        inputs: whether a matrix's inputs are split; otherwise, in a group, its outputs are.
        experts: the ranks that the experts are spread over; None where all are here.
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
        """See `models.experts.GroupedProduct`. Collective where experts are spread and scales are one a tensor."""
        own = counts.new_zeros(rows.shape[0]) if origin is None else origin // self._sharing.ranks
        return self._run(rows, weight, Rows(counts, own, self._sharing.micro_batches), self)

    def compile(self) -> None:
        """Get ready for torch.compile: rows are counted on the way."""
        self._run = _untraced()

    def by_row(self, x: torch.Tensor, role: int, whose: Rows) -> Quantised:
        """Rows [rows, columns], each with a scale."""
        form = BACKWARD if role == GRADIENT else FORWARD
        inputs, outputs = self._split
        split = (inputs, True, outputs)[role]
        amax = largest(x, rowwise=True)
        if self.rowwise:
            return quantised(x, self._agreed(amax, split), form)
        sent = x.new_zeros(whose.origins, dtype=torch.float32)
        sent.scatter_reduce_(0, whose.origin, amax.squeeze(1), "amax")
        if (known := self._known(role, sent.amax, x.device)) is not None:
            return quantised(x, known.expand(len(x), 1), form)
        self._agreed(sent, split)
        if self._experts is not None:
            dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=self._experts)
        self._agreed_by_parts(sent)
        return quantised(x, sent[whose.origin].unsqueeze(1), form)

    def by_matrix(self, weight: torch.Tensor) -> Quantised:
        """Matrices [experts, outputs, inputs], each with one scale, or with one for each row of outputs."""
        inputs, outputs = self._split
        along = (2,) if self.rowwise else (1, 2)
        amax = weight.abs().amax(along, keepdim=True).float()
        known = None if self.rowwise else self._known(WEIGHT, amax.amax, weight.device)
        if known is not None:
            return quantised(weight, known.expand(len(weight), 1, 1), FORWARD)
        return quantised(weight, self._agreed(amax, inputs or (outputs and not self.rowwise)), FORWARD)

    def by_input(self, weight: torch.Tensor) -> Quantised:
        """Matrices [experts, outputs, inputs] with a scale for each column of inputs."""
        return quantised(weight, self._agreed(weight.abs().amax(1, keepdim=True).float(), self._split[1]), FORWARD)

    def by_column(self, x: torch.Tensor, role: int, whose: Rows) -> Quantised:
        """Rows [rows, columns] with a scale for each column of each segment. Collective where a context group is wider
        than the expert group: then the rows of one expert and micro-batch are on several of its ranks.
        """
        segment, sharing = whose.segment, self._sharing
        amax = x.new_zeros(sharing.parts, len(whose.counts) * whose.origins, x.shape[1], dtype=torch.float32)
        amax[sharing.part].scatter_reduce_(0, segment.unsqueeze(1).expand(x.shape), x.abs().float(), "amax")
        self._agreed_by_parts(amax)
        return quantised(x, amax[sharing.part][segment], BACKWARD if role == GRADIENT else FORWARD)


class _Fp8Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        whose: Rows,
        how: Fp8GroupedProduct,
        left: Later | None,
    ) -> torch.Tensor:
        a, b = how.by_row(rows, INPUT, whose), how.by_matrix(weight)
        ctx.how, ctx.whose, ctx.left = how, whose, left
        if how.rowwise:
            ctx.save_for_backward(rows, weight)
        else:
            # One scale serves both directions: a byte an element is kept of the input.
            ctx.save_for_backward(a.values, a.scale, weight, b.scale)
        if grouped_kernel_takes(a, b, rows.dtype):
            return scaled_groups(a, b, whose.counts)
        form = _multiplied_in(rows)
        return grouped_linear(_wide(a, form), _wide(b, form), whose.counts).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
        gradient = gradients[0].contiguous()
        how: Fp8GroupedProduct = ctx.how
        whose: Rows = ctx.whose
        form = _multiplied_in(gradient)
        incoming = how.by_row(gradient, GRADIENT, whose)
        if how.rowwise:
            rows, weight = ctx.saved_tensors
            matrices = how.by_input(weight)
            of_weight = partial(_by_column_outer, rows, gradient, whose, how, weight.dtype)
        else:
            values, scale, weight, weight_scale = ctx.saved_tensors
            matrices = quantised(weight, weight_scale * torch.finfo(FORWARD).max, FORWARD)
            of_weight = partial(_outer, Quantised(values, scale), incoming, whose, form, weight.dtype)
        turned = _wide(matrices, form).transpose(1, 2).contiguous()
        back = grouped_linear(_wide(incoming, form), turned, whose.counts).to(gradient.dtype)
        if ctx.left is None:
            return back, of_weight(), None, None, None
        ctx.left.leave(of_weight)
        return back, None, None, None, None


def _outer(inputs: Quantised, outputs: Quantised, whose: Rows, form: torch.dtype, result: torch.dtype) -> torch.Tensor:
    """The matrices' gradients from quantised rows and gradients, multiplied in `form`. Not collective."""
    return grouped_outer(_wide(outputs, form), _wide(inputs, form), whose.counts).to(result)


def _by_column_outer(
    rows: torch.Tensor, gradient: torch.Tensor, whose: Rows, how: Fp8GroupedProduct, result: torch.dtype
) -> torch.Tensor:
    """The matrices' gradients with a scale for each column of each segment."""
    outputs, inputs = how.by_column(gradient, GRADIENT, whose), how.by_column(rows, INPUT, whose)
    return _outer(inputs, outputs, whose, _multiplied_in(gradient), result)


def _multiplied_in(like: torch.Tensor) -> torch.dtype:
    """The format of products of fp8 numbers: bf16 where a GPU has a grouped kernel for that."""
    return like.dtype if like.is_cuda else torch.float32


def _wide(x: Quantised, form: torch.dtype) -> torch.Tensor:
    """The numbers that fp8 stands for."""
    return (x.values.float() * x.scale).to(form)


def _multiply(rows: torch.Tensor, weight: torch.Tensor, whose: Rows, how: Fp8GroupedProduct) -> torch.Tensor:
    left = later(rows, weight)
    result: torch.Tensor = _Fp8Grouped.apply(  # type: ignore[no-untyped-call]
        rows, operand(rows, weight, left), whose, how, left
    )
    return result


@cache
def _untraced() -> Callable[..., torch.Tensor]:
    """`_multiply` outside of graphs. When first asked for: it brings the compiler along."""
    leave_out: Any = torch.compiler.disable
    untraced: Callable[..., torch.Tensor] = leave_out(_multiply)
    return untraced


def use_fp8_in_experts(
    experts: Experts,
    spec: Fp8Spec,
    group: dist.ProcessGroup | None,
    spread: dist.ProcessGroup | None,
    context: dist.ProcessGroup | None = None,
) -> None:
    """Let a mixture's routed experts compute in fp8.

    Args:
        experts: split over their groups, but not sharded over replicas.
        spec: how scales come about.
        group: the tensor group; None where there is none.
        spread: the expert group; None where there is none.
        context: the context group, likewise; one of the two divides the other.
    """
    sharing = Sharing.of(spread, context)
    for name, matrix in experts.named_parameters():
        along = [p.dim for p in matrix.placements if isinstance(p, ShardedAlong)] if isinstance(matrix, DTensor) else []
        experts.products[name] = Fp8GroupedProduct(spec, group, spread, inputs=2 in along, sharing=sharing)
