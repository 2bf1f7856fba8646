"""Sends rows to the ranks of their experts and back by all-to-all (GShard, arXiv 2006.16668; DeepSpeed-TED,
2303.06318).

Under sequence parallelism each rank of a tensor group sends only the rows of its positions. The tensor group of the
experts, whose widths are split, gathers them there: nothing is sent twice between expert ranks (TED, section 5.1).

Autograd goes through `AllToAllDispatchPlan.dispatch` and `combine`. A schedule that overlaps the exchange with other
computation calls their halves: `out.begin(rows)` starts it, `PendingExchange.wait` finishes it, and `after_dispatch`
and `before_combine` are the steps around the experts. Backward, the gradient is exchanged by
`out.reversed().begin(gradient)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright_worker.distributed.collectives import all_gather, reduce_scatter
from meshwright_worker.parallel.overlapped_passes import wait_overlapped


@dataclass(slots=True)
class PendingExchange:
    """An exchange in progress."""

    received: torch.Tensor
    work: dist.Work | None
    sent: torch.Tensor
    """Referenced until the exchange is finished."""

    def wait(self) -> torch.Tensor:
        """Return the rows of the other ranks, in rank order. While it waits, the other pass of an overlapped pair
        computes.
        """
        if self.work is not None:
            wait_overlapped(self.work)
            self.work = None
        return self.received


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-to-all of rows, with a different number for each rank."""

    send: list[int]
    """Rows for each rank of the group: the first ones for rank 0."""
    receive: list[int]
    """Rows from each rank."""
    group: dist.ProcessGroup

    def begin(self, rows: torch.Tensor) -> PendingExchange:
        """Start to exchange rows [sum of send, hidden]. Without autograd. Collective."""
        sent = rows.detach().contiguous()
        received = sent.new_empty(sum(self.receive), *sent.shape[1:])
        work = dist.all_to_all_single(received, sent, self.receive, self.send, group=self.group, async_op=True)
        return PendingExchange(received, work, sent)

    def reversed(self) -> Exchange:
        """Return the exchange that sends every row back; gradients use it."""
        return Exchange(self.receive, self.send, self.group)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Exchange rows and wait; gradients use the reversed exchange."""
        exchanged: torch.Tensor = _Exchanged.apply(rows, self)  # type: ignore[no-untyped-call]
        return exchanged


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return ctx.exchange.reversed().begin(gradient).wait(), None


@dataclass(frozen=True, slots=True)
class RowGather:
    """Gathers the rows of all ranks of a group on each rank; padded, because collectives need equal sizes."""

    sizes: list[int]
    """Number of rows of each rank."""
    group: dist.ProcessGroup

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """[own rows, hidden] -> [all rows, hidden]. Without autograd. Collective."""
        max_rows, width = max(self.sizes), rows.shape[1]
        padded = torch.cat([rows, rows.new_zeros(max_rows - rows.shape[0], width)])
        gathered = rows.new_empty(len(self.sizes), max_rows, width)
        all_gather(gathered.flatten(0, 1), padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(gathered, self.sizes, strict=True)])

    def scatter_sum(self, rows: torch.Tensor) -> torch.Tensor:
        """[all rows, hidden] on each rank -> this rank's rows of their sum. Without autograd. Collective."""
        max_rows, width = max(self.sizes), rows.shape[1]
        parts = rows.new_zeros(len(self.sizes), max_rows, width)
        for part, local_counts in zip(parts, torch.split(rows, self.sizes), strict=True):
            part[: local_counts.shape[0]] = local_counts
        summed = rows.new_empty(max_rows, width)
        reduce_scatter(summed, parts.flatten(0, 1), group=self.group)
        return summed[: self.sizes[self.group.rank()]]


class _Gathered(torch.autograd.Function):
    """`gather` forward and `scatter_sum` backward or, with `summing`, the reverse."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, row_gather: RowGather, summing: bool) -> torch.Tensor:
        ctx.row_gather, ctx.summing = row_gather, summing
        return row_gather.scatter_sum(rows) if summing else row_gather.gather(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        gradient = gradient.contiguous()
        return (ctx.row_gather.gather(gradient) if ctx.summing else ctx.row_gather.scatter_sum(gradient)), None, None


@dataclass(frozen=True, slots=True)
class AllToAllDispatchPlan:
    """See `models.moe.DispatchPlan`."""

    counts: torch.Tensor
    out: Exchange
    slices: RowGather | None
    order: torch.Tensor
    """int64 [rows here]: arriving rows, which are sorted by source rank, sorted by expert."""
    sent: torch.Tensor
    """int64 [slices x ranks]: rows that arrive from each rank of the expert group, for each slice."""

    @property
    def sent_rows(self) -> int:
        """See `DispatchPlan`."""
        return sum(self.out.send)

    @property
    def origin(self) -> torch.Tensor:
        """See `DispatchPlan`. A slice belongs to the micro-batch of its source rank."""
        ranks = self.out.group.size()
        sender = torch.arange(len(self.sent), device=self.sent.device) % ranks
        return sender.repeat_interleave(self.sent, output_size=len(self.order)).index_select(0, self.order)

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """See `DispatchPlan`."""
        return self.after_dispatch(self.out(rows))

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """See `DispatchPlan`."""
        return self.out.reversed()(self.before_combine(rows))

    def after_dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """Process received rows before the experts compute."""
        if self.slices is not None:
            rows = _Gathered.apply(rows, self.slices, False)  # type: ignore[no-untyped-call]
        return rows.index_select(0, self.order)

    def before_combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Process the experts' rows before they are sent back."""
        rows = rows.index_select(0, self.order.argsort())
        if self.slices is not None:
            rows = _Gathered.apply(rows, self.slices, True)  # type: ignore[no-untyped-call]
        return rows


@dataclass(frozen=True, slots=True)
class EvenDispatchPlan:
    """The same number of rows for each expert from each rank: no sizes are exchanged, and the host does not wait."""

    counts: int
    """See `models.moe.DispatchPlan`."""
    out: Exchange
    slices: RowGather | None
    experts: int
    """Number of experts of this rank."""

    @property
    def sent_rows(self) -> int:
        """See `models.moe.DispatchPlan`."""
        return sum(self.out.send)

    @property
    def origin(self) -> None:
        """See `models.moe.DispatchPlan`. Only fp8 needs it, which is not supported with even dispatch."""
        return

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """See `models.moe.DispatchPlan`."""
        rows = self.out(rows)
        if self.slices is not None:
            rows = _Gathered.apply(rows, self.slices, False)  # type: ignore[no-untyped-call]
        return _swapped(rows, self._senders, self.experts)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """See `models.moe.DispatchPlan`."""
        rows = _swapped(rows, self.experts, self._senders)
        if self.slices is not None:
            rows = _Gathered.apply(rows, self.slices, True)  # type: ignore[no-untyped-call]
        return self.out.reversed()(rows)

    @property
    def _senders(self) -> int:
        return self.out.group.size() * (len(self.slices.sizes) if self.slices is not None else 1)


def _swapped(rows: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Blocks of rows, ordered by `outer` x `inner`, ordered by `inner` x `outer`."""
    return rows.view(outer, inner, -1, rows.shape[1]).transpose(0, 1).reshape(rows.shape)


class AllToAllDispatcher:
    """Dispatches to experts that are distributed over a group in equal, consecutive parts.

    Args:
        experts: the group.
        slices: the tensor group, if each of its ranks has its own positions and a part of the experts' widths.
        local_experts: number of experts of each rank.
    """

    def __init__(self, experts: dist.ProcessGroup, slices: dist.ProcessGroup | None, local_experts: int) -> None:
        self._experts = experts
        self._slices = slices
        self._local_experts = local_experts

    @property
    def gathers(self) -> bool:
        """Whether the ranks of a tensor group have their own positions."""
        return self._slices is not None

    def plan(self, counts: torch.Tensor) -> AllToAllDispatchPlan:
        """See `models.moe.Dispatcher`. Collective: ranks exchange the number of rows that they will send."""
        ranks = self._experts.size()
        local_counts = counts.view(ranks, -1)
        received_counts = torch.empty_like(local_counts)
        dist.all_to_all_single(received_counts, local_counts.contiguous(), group=self._experts)
        counts_by_slice = received_counts.unsqueeze(0)
        if self._slices is not None:
            counts_by_slice = received_counts.new_empty(self._slices.size(), *received_counts.shape)
            all_gather(counts_by_slice.flatten(0, 1), received_counts, group=self._slices)
        # The only time that the host waits: collectives need the sizes on the host.
        sizes = torch.cat([local_counts.sum(1), received_counts.sum(1), counts_by_slice.sum((1, 2))]).tolist()
        out = Exchange(sizes[:ranks], sizes[ranks : 2 * ranks], self._experts)
        local_sizes = sizes[2 * ranks :]
        slices = RowGather(local_sizes, self._slices) if self._slices is not None else None
        blocks = counts_by_slice.flatten(0, 1)
        expert = torch.arange(blocks.shape[1], device=blocks.device).expand_as(blocks).flatten()
        order = expert.repeat_interleave(blocks.flatten(), output_size=sum(local_sizes)).argsort(stable=True)
        return AllToAllDispatchPlan(blocks.sum(0), out, slices, order, blocks.sum(1))

    def plan_even(self, rows: int) -> EvenDispatchPlan:
        """See `models.moe.Dispatcher`."""
        ranks = self._experts.size()
        experts = self._local_experts
        sizes = [rows * experts] * ranks
        slices, senders = None, ranks
        if self._slices is not None:
            senders *= self._slices.size()
            slices = RowGather([sum(sizes)] * self._slices.size(), self._slices)
        return EvenDispatchPlan(rows * senders, Exchange(sizes, sizes, self._experts), slices, experts)
