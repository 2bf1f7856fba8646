"""The parameter server of asynchronous training, in the ranks of island 0: one thread per other island.

Each rank serves its parts of the parameters to the ranks at the same coordinates of other islands. Rank 0 decides the
order of reads and writes and sends it to the other ranks of its island, so that all parts use the same order.

Between rounds nothing changes: another island's first read of a round waits until island 0 begins the round. Until then
the server's rank may fill parameters and moments from a checkpoint, or copy them into one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from meshwright.api.training import OptimizerSpec
from meshwright_worker.distributed.collectives import flatten_tensors, unflatten_into
from meshwright_worker.local_sgd.bounded_staleness import Event, ReplayOrder, StalenessGate
from meshwright_worker.optimizers.adamw import AdamW
from meshwright_worker.parallel.shards import ParameterShard

_OWN_ISLAND = 0


class ServerFailedError(RuntimeError):
    """A thread that serves another island failed; the cause is chained."""


@dataclass(slots=True)
class _Synchronization:
    """The end of a round."""

    arrived: int = 0
    """Number of islands."""
    stop: bool = False
    """Whether any of them is asked to stop."""
    parameters: torch.Tensor | None = None
    """[elements], once all islands have arrived."""


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
        self._in_round = False
        """Whether island 0 has begun the round."""
        self._synchronization = _Synchronization()
        """That of the current round."""

    def read(self, island: int) -> torch.Tensor:
        """Return the parameters, [elements], when it is the island's turn. Island 0's first read begins the round."""
        with self._change:
            if island == _OWN_ISLAND and not self._in_round:
                self._in_round = True
                self._change.notify_all()
            self._wait(lambda: self._in_round and self.order.may_read(island))
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
            # A reference: islands that wake up late must not get what others write in the next round.
            own = self._synchronization
            own.arrived += 1
            own.stop |= stop
            if own.arrived == self._islands:
                own.parameters = flatten_tensors(self._parameters)
                self._synchronization, self._in_round = _Synchronization(), False
                self._change.notify_all()
            self._wait(lambda: own.parameters is not None)
            assert own.parameters is not None
            return own.parameters, own.stop

    def load(self, parameters: Sequence[torch.Tensor], updates: int) -> None:
        """Start from these parameters, after this number of updates. Call it before island 0 reads."""
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
