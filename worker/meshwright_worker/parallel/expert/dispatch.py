"""Rows to the ranks of their experts and back by all-to-all (GShard, arXiv 2006.16668; DeepSpeed-TED, 2303.06318).

Under sequence parallelism each rank of a tensor group sends its own positions' rows alone, and the tensor group of the
experts, whose widths are split, gathers them there: nothing is sent twice between expert ranks (TED, section 5.1).

Autograd goes through `AllToAllDispatchPlan.dispatch` and `combine`. A schedule that hides the exchange under other
computation
takes their halves: `out.begin(rows)` starts it, `PendingExchange.wait` ends it, `after_dispatch` and
`before_combine` are what surrounds it; the
gradient takes the same way backward, `out.reversed().begin(gradient)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright_worker.distributed.collectives import all_gather, reduce_scatter
from meshwright_worker.parallel.pipeline.overlapped_passes import wait_overlapped


@dataclass(slots=True)
class PendingExchange:
    """An exchange under way."""

    received: torch.Tensor
    work: dist.Work | None
    sent: torch.Tensor
    """Kept until the exchange is over."""

    def wait(self) -> torch.Tensor:
        """What the others sent, in the order of ranks. Meanwhile the other pass of an overlapped pair computes."""
        if self.work is not None:
            wait_overlapped(self.work)
            self.work = None
        return self.received


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-to-all of rows, unevenly many for each rank."""

    send: list[int]
    """Rows for each rank of the group: the first ones for rank 0."""
    receive: list[int]
    """Rows from each rank."""
    group: dist.ProcessGroup

    def begin(self, rows: torch.Tensor) -> PendingExchange:
        """Start to exchange rows [sum of send, hidden]. No gradient flows. Collective."""
        sent = rows.detach().contiguous()
        received = sent.new_empty(sum(self.receive), *sent.shape[1:])
        work = dist.all_to_all_single(received, sent, self.receive, self.send, group=self.group, async_op=True)
        return PendingExchange(received, work, sent)

    def reversed(self) -> Exchange:
        """The exchange that brings every row back, and that gradients take."""
        return Exchange(self.receive, self.send, self.group)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Exchange rows and wait; gradients come back the reversed way."""
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
    """Rows of all ranks of a group on each of them, unevenly many of each; padded, since collectives want them even."""

    sizes: list[int]
    """Rows of each rank."""
    group: dist.ProcessGroup

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """[own rows, hidden] -> [all rows, hidden]. No gradient flows. Collective."""
        max_rows, width = max(self.sizes), rows.shape[1]
        padded = torch.cat([rows, rows.new_zeros(max_rows - rows.shape[0], width)])
        gathered = rows.new_empty(len(self.sizes), max_rows, width)
        all_gather(gathered.flatten(0, 1), padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(gathered, self.sizes, strict=True)])

    def scatter_sum(self, rows: torch.Tensor) -> torch.Tensor:
        """[all rows, hidden] on each rank -> of their sum the own rows. No gradient flows. Collective."""
        max_rows, width = max(self.sizes), rows.shape[1]
        parts = rows.new_zeros(len(self.sizes), max_rows, width)
        for part, local_counts in zip(parts, torch.split(rows, self.sizes), strict=True):
            part[: local_counts.shape[0]] = local_counts
        summed = rows.new_empty(max_rows, width)
        reduce_scatter(summed, parts.flatten(0, 1), group=self.group)
        return summed[: self.sizes[self.group.rank()]]


class _Gathered(torch.autograd.Function):
    """`gather` forward and `scatter_sum` backward, or, with `summing`, the other way round."""

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
    """See `models.moe.Journey`."""

    counts: torch.Tensor
    out: Exchange
    slices: RowGather | None
    order: torch.Tensor
    """int64 [rows here]: arriving rows, which are sorted by where they come from, sorted by expert."""
    sent: torch.Tensor
    """int64 [slices x ranks]: rows that arrive from each rank of the expert group, for each slice."""

    @property
    def sent_rows(self) -> int:
        """See `Journey`."""
        return sum(self.out.send)

    @property
    def origin(self) -> torch.Tensor:
        """See `Journey`. A slice is of the micro-batch of the rank that it is a slice of."""
        ranks = self.out.group.size()
        sender = torch.arange(len(self.sent), device=self.sent.device) % ranks
        return sender.repeat_interleave(self.sent, output_size=len(self.order)).index_select(0, self.order)

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Journey`."""
        return self.after_dispatch(self.out(rows))

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Journey`."""
        return self.out.reversed()(self.before_combine(rows))

    def after_dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """What to do with received rows before the experts compute."""
        if self.slices is not None:
            rows = _Gathered.apply(rows, self.slices, False)  # type: ignore[no-untyped-call]
        return rows.index_select(0, self.order)

    def before_combine(self, rows: torch.Tensor) -> torch.Tensor:
        """What to do with the experts' rows before they are sent back."""
        rows = rows.index_select(0, self.order.argsort())
        if self.slices is not None:
            rows = _Gathered.apply(rows, self.slices, True)  # type: ignore[no-untyped-call]
        return rows


class AllToAllDispatcher:
    """Experts are spread over a group in equal, consecutive parts.

    Args:
        experts: the group.
        slices: the tensor group, where each of its ranks has positions of its own and a part of the experts' widths.
    """

    def __init__(self, experts: dist.ProcessGroup, slices: dist.ProcessGroup | None) -> None:
        self._experts = experts
        self._slices = slices

    @property
    def gathers(self) -> bool:
        """Whether the ranks of a tensor group have positions of their own."""
        return self._slices is not None

    def plan(self, counts: torch.Tensor) -> AllToAllDispatchPlan:
        """See `models.moe.Dispatcher`. Collective: ranks tell each other what they will send."""
        ranks = self._experts.size()
        local_counts = counts.view(ranks, -1)
        received_counts = torch.empty_like(local_counts)
        dist.all_to_all_single(received_counts, local_counts.contiguous(), group=self._experts)
        counts_by_slice = received_counts.unsqueeze(0)
        if self._slices is not None:
            counts_by_slice = received_counts.new_empty(self._slices.size(), *received_counts.shape)
            all_gather(counts_by_slice.flatten(0, 1), received_counts, group=self._slices)
        # The one thing that the host has to wait for: collectives take sizes from there.
        sizes = torch.cat([local_counts.sum(1), received_counts.sum(1), counts_by_slice.sum((1, 2))]).tolist()
        out = Exchange(sizes[:ranks], sizes[ranks : 2 * ranks], self._experts)
        local_sizes = sizes[2 * ranks :]
        slices = RowGather(local_sizes, self._slices) if self._slices is not None else None
        blocks = counts_by_slice.flatten(0, 1)
        expert = torch.arange(blocks.shape[1], device=blocks.device).expand_as(blocks).flatten()
        order = expert.repeat_interleave(blocks.flatten(), output_size=sum(local_sizes)).argsort(stable=True)
        return AllToAllDispatchPlan(blocks.sum(0), out, slices, order, blocks.sum(1))
