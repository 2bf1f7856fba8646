"""The parameter server of asynchronous training, in the ranks of island 0: one thread per other island.

Each rank serves its parts of the parameters to the ranks at the same coordinates of other islands. Rank 0 decides the
order of reads and writes and sends it to the other ranks of its island, so that all parts use the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from meshwright.api.training import OptimizerSpec
from meshwright_worker.distributed.collectives import flatten_tensors, unflatten_into
from meshwright_worker.local_sgd.bounded_staleness import Event, ReplayOrder, StalenessGate
from meshwright_worker.optimizers.adamw import AdamW
from meshwright_worker.parallel.shards import ParameterShard


class ServerFailedError(RuntimeError):
    """A thread that serves another island failed; the cause is chained."""


class ParameterServer:
    """Parameters, an optimizer and the order of the islands' reads and writes. Thread-safe.

    Args:
        shards: what this rank updates; the server works on a copy.
        optimizer: its settings.
        islands: number of islands.
        order: decides which island may read or write next.
        on_event: called with every event, before the next can happen.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        optimizer: OptimizerSpec,
        islands: int,
        order: StalenessGate | ReplayOrder,
        on_event: Callable[[Event], None],
    ) -> None:
        self.order = order
        self._parameters = [shard.local.clone() for shard in shards]
        self.shards = [
            replace(shard, local=copy, parameter=nn.Parameter(copy))
            for shard, copy in zip(shards, self._parameters, strict=True)
        ]
        self.optimizer = AdamW(self.shards, optimizer)
        self._islands = islands
        self._on_event = on_event
        self._change = threading.Condition()
        self._failure: BaseException | None = None
        self._arrived = 0
        self._stop = False
        self._stop_by_round: list[bool] = []
        """For every synchronization, whether any island was asked to stop."""

    def read(self, island: int) -> torch.Tensor:
        """Return the parameters, [elements], when it is the island's turn."""
        with self._change:
            self._wait(lambda: self.order.may_read(island))
            self._on_event(self.order.read(island))
            self._change.notify_all()
            return flatten_tensors(self._parameters)

    def write(self, island: int, flat: torch.Tensor, rate: float) -> None:
        """Apply the island's gradients, [elements], when it is their turn."""
        gradients = [torch.empty_like(parameter) for parameter in self._parameters]
        unflatten_into(flat, gradients)
        with self._change:
            self._wait(lambda: self.order.may_write(island))
            self._on_event(self.order.write(island))
            self.optimizer.step(gradients, rate)
            self._change.notify_all()

    def synchronize(self, *, stop: bool) -> tuple[torch.Tensor, bool]:
        """Wait for all islands; return the parameters, and whether any island is asked to stop."""
        with self._change:
            self._arrived += 1
            self._stop |= stop
            round_index = len(self._stop_by_round)
            if self._arrived == self._islands:
                self._stop_by_round.append(self._stop)
                self._arrived, self._stop = 0, False
                self._change.notify_all()
            self._wait(lambda: len(self._stop_by_round) > round_index)
            return flatten_tensors(self._parameters), self._stop_by_round[round_index]

    def load(self, parameters: Sequence[torch.Tensor], updates: int) -> None:
        """Start from these parameters, after this number of updates."""
        with self._change:
            torch._foreach_copy_(self._parameters, list(parameters))
            self.optimizer.set_step_count(updates)

    def allow(self, kind: str, island: int) -> None:
        """Allow this event: it happened on the first rank's server."""
        with self._change:
            if isinstance(self.order, ReplayOrder):
                self.order.add(kind, island)
            self._change.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make every waiting call raise."""
        with self._change:
            self._failure = self._failure or error
            self._change.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._change.wait_for(lambda: self._failure is not None or ready())
        if self._failure is not None:
            raise ServerFailedError(f"a thread of the parameter server failed: {self._failure}") from self._failure
