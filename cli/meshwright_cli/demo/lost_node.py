"""A node of the demo that is lost for good, the fewer replicas that train on, and the node that joins later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.api import conditions
from meshwright.api.status import WorkerPlacement
from meshwright_cli.demo.fault import all_ranks_train
from meshwright_cli.demo.snapshot import Snapshot
from meshwright_local import control_socket

JOIN_SECONDS = 3.0
"""How long the job trains with fewer replicas before a node joins, so that this can be seen."""


@dataclass(frozen=True, slots=True)
class Resize:
    """A change of the number of replicas, after which every rank trained."""

    replicas: int
    generation: int
    seconds: float
    """Seconds from its cause until every rank was first observed training."""
    at: float
    """Time of that observation (monotonic seconds)."""
    resumed_after: int | None
    """Step after which the generation resumed."""


@dataclass(slots=True)
class LostNode:
    """A node that vanishes, with its pods, when no other node is free. Later another node joins."""

    control: Path
    """Directory of the cluster, which the commands to its nodes go to."""
    rack: str = ""
    """Its rack, which the node that joins is in too."""
    name: str = ""
    """Empty until the node is removed."""
    replicas: int = 0
    """Replicas before."""
    generation: int = 0
    """Mesh generation when the node was removed."""
    step: int = 0
    """Last step observed in that generation."""
    lost_at: float = 0.0
    shrunk: Resize | None = None
    joined: str = ""
    """Name of the node that joined."""
    joined_at: float = 0.0
    grown: Resize | None = None

    @property
    def repeated_steps(self) -> int | None:
        """Steps that finished before the loss and were repeated. None until this is known."""
        resumed = self.shrunk.resumed_after if self.shrunk is not None else None
        return None if resumed is None else max(0, self.step - resumed)

    def due(self, now: Snapshot) -> bool:
        """Whether to remove a node: a fifth of the steps is done, and every rank of several replicas trains."""
        late = now.total_steps > 0 and 5 * now.step >= now.total_steps
        return not self.name and late and now.replicas > 1 and settled(now) and bool(self._target(now))

    async def remove(self, now: Snapshot) -> str:
        """Remove the last worker's node from the cluster: processes and object vanish. Returns its name."""
        node = self._target(now)
        self.replicas, self.generation, self.step = now.replicas, now.generation, now.step
        self.rack = next((entry.rack for entry in placed(now) if entry.node == node), "") or "rack0"
        await asyncio.to_thread(control_socket.send, self.control, action="remove", node=node)
        self.name, self.lost_at = node, time.monotonic()
        return node

    def join_due(self, now: Snapshot) -> bool:
        """Whether another node joins now: fewer replicas have trained for a while."""
        trained = self.shrunk is not None and time.monotonic() - self.shrunk.at >= JOIN_SECONDS
        return trained and not self.joined and settled(now)

    async def join(self) -> str:
        """Add a node in the same rack. Returns its name."""
        name = f"{self.rack}-spare"
        await asyncio.to_thread(control_socket.send, self.control, action="add", node=name, rack=self.rack)
        self.joined, self.joined_at = name, time.monotonic()
        return name

    def observe(self, now: Snapshot) -> bool:
        """Note the last step before the loss. Returns whether a resize has finished: `resized` notes it."""
        if not self.name:
            return False
        if now.generation == self.generation:
            self.step = max(self.step, now.step)
        if not settled(now):
            return False
        if self.shrunk is None:
            return now.generation > self.generation and 0 < now.replicas < self.replicas
        return bool(self.joined) and self.grown is None and now.replicas > self.shrunk.replicas

    def resized(self, now: Snapshot, resumed_after: int | None) -> Resize:
        """Note the resize that has finished, and return it."""
        moment, began = time.monotonic(), self.lost_at if self.shrunk is None else self.joined_at
        resize = Resize(now.replicas, now.generation, moment - began, moment, resumed_after)
        if self.shrunk is None:
            self.shrunk = resize
        else:
            self.grown = resize
        return resize

    @staticmethod
    def _target(now: Snapshot) -> str:
        """The last worker's node; empty if rank 0 is on it too."""
        nodes = [pod.node for pod in now.pods]
        return nodes[-1] if nodes and nodes[-1] != nodes[0] else ""


def settled(now: Snapshot) -> bool:
    """Whether every rank trains or has finished, and no resize is in progress."""
    return all_ranks_train(now) and not now.holds(conditions.RESCALING)


def placed(now: Snapshot) -> Sequence[WorkerPlacement]:
    """Where each worker runs."""
    return now.status.placement.workers if now.status.placement else ()
