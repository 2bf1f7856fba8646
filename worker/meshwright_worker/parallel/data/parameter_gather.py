"""Gathers updated rows into the parameters of every replica, while the next forward pass already runs.

Buckets are gathered in the order in which a forward pass uses them: first what belongs to no layer, then layer by
layer. Two are under way at a time, so they take little memory. A module waits for its parameters when it runs first
after the update. All replicas run the same modules in the same order, and so wait for the same collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from meshwright_worker.distributed.collectives import all_gather_into
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.parallel.data.gradient_buckets import split_into_buckets
from meshwright_worker.parallel.shards import ParameterShard

_UNDER_WAY = 2
"""Buckets that are gathered at a time: one while the modules before the other compute."""


@dataclass(frozen=True)
class _Rows:
    """A parameter, and the rows of it that this rank has updated."""

    parameter: ParameterShard
    own: ParameterShard
    unit: int
    """Number of the module that uses it, in the order of the forward pass."""

    def padded(self, ranks: int) -> torch.Tensor:
        """Its own rows in the parameter's format, as many elements as those of the first rank."""
        rows = self.own.local.flatten().to(self.parameter.local.dtype)
        return F.pad(rows, (0, self.width(ranks) - rows.numel()))

    def width(self, ranks: int) -> int:
        """Elements of a rank's rows, with the padding of the last one."""
        local = self.parameter.local
        return -(-local.shape[0] // ranks) * local[0].numel()


@dataclass(frozen=True)
class _UnderWay:
    members: Sequence[_Rows]
    rows: torch.Tensor
    """Referenced until it is sent."""
    gathered: torch.Tensor
    """[ranks, rows of all members]."""
    work: dist.Work | None


class ParameterGather:
    """Gathers every parameter from the rows that each rank has of it.

    Args:
        shards: the full parameters.
        own: the rows of each that this rank updates.
        stages: the modules that use them.
        group: the ranks that share a set of shards.
        limit: elements of a bucket; a larger parameter has its own.
        overlap: whether modules wait, or `start` does.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        own: Sequence[ParameterShard],
        stages: Sequence[DecoderStage],
        group: dist.ProcessGroup,
        limit: int,
        *,
        overlap: bool,
    ) -> None:
        self._group = group
        self._overlap = overlap
        units = _units(stages)
        numbers = {id(parameter): number for number, (_, owned) in enumerate(units) for parameter in owned}
        pairs = zip(shards, own, strict=True)
        rows = sorted((_Rows(full, part, numbers[id(full.parameter)]) for full, part in pairs), key=lambda r: r.unit)
        self._buckets = split_into_buckets(rows, lambda row: row.parameter.local.numel(), limit)
        self._under_way: deque[_UnderWay] = deque()
        self._begun = self._gathered = len(self._buckets)
        last = {row.unit: number for number, bucket in enumerate(self._buckets) for row in bucket}
        for unit, number in last.items():
            units[unit][0].register_forward_pre_hook(self._wait_for(number))

    @torch.no_grad()
    def start(self) -> None:
        """Begin to gather the updated rows. Collective."""
        self.finish()
        self._begun = self._gathered = 0
        for _ in range(_UNDER_WAY):
            self._begin_next()
        if not self._overlap:
            self.finish()

    def finish(self) -> None:
        """Wait for all parameters. Collective."""
        self._wait_through(len(self._buckets) - 1)

    def _wait_for(self, number: int) -> Callable[[nn.Module, object], None]:
        def before_forward(_: nn.Module, __: object) -> None:
            if self._gathered <= number:
                self._wait_through(number)

        return before_forward

    @torch.no_grad()
    def _wait_through(self, number: int) -> None:
        while self._gathered <= number:
            self._complete_next()
            self._begin_next()

    def _begin_next(self) -> None:
        if self._begun == len(self._buckets):
            return
        members, ranks = self._buckets[self._begun], self._group.size()
        self._begun += 1
        rows = torch.cat([row.padded(ranks) for row in members])
        gathered = rows.new_empty(ranks, len(rows))
        work = all_gather_into(gathered, rows, self._group, async_op=True)
        self._under_way.append(_UnderWay(members, rows, gathered, work))

    def _complete_next(self) -> None:
        one, ranks = self._under_way.popleft(), self._group.size()
        self._gathered += 1
        if one.work is not None:
            one.work.wait()
        widths = [row.width(ranks) for row in one.members]
        for row, gathered in zip(one.members, torch.split(one.gathered, widths, dim=1), strict=True):
            local = row.parameter.local
            local.copy_(gathered.flatten()[: local.numel()].view_as(local))


def _units(stages: Sequence[DecoderStage]) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Return the modules that wait, each with its parameters: stages with what is in no layer, and then layers."""
    layers = [(layer, list(layer.parameters())) for stage in stages for layer in stage.layers.values()]
    in_layers = {id(parameter) for _, owned in layers for parameter in owned}
    roots: list[tuple[nn.Module, list[nn.Parameter]]] = [
        (stage, [parameter for parameter in stage.parameters() if id(parameter) not in in_layers]) for stage in stages
    ]
    return [*roots, *layers]
