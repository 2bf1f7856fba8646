"""The fault of the demo: one worker pod is deleted midway, and what came of it is kept as evidence."""

from __future__ import annotations

import time
from dataclasses import dataclass

from meshwright.api import conditions
from meshwright.cli.demo.snapshot import PodView, Snapshot
from meshwright.local.client import ApiClient
from meshwright.local.resources import PODS


@dataclass(slots=True)
class Fault:
    """A worker pod deleted as `kubectl delete pod` does, and how the job came back."""

    struck: PodView | None = None
    generation: int = 0
    """Mesh generation when the pod was deleted."""
    step: int = 0
    """Last step seen before it."""
    struck_at: float = 0.0
    """Moment of the deletion (monotonic seconds)."""
    recovered_at: float | None = None
    """Moment at which every rank of a newer generation was seen training (monotonic seconds)."""
    replacement: PodView | None = None
    resumed_after: int | None = None
    """Step after which the new generation began."""

    @property
    def repeated(self) -> int | None:
        """Steps that were seen finished before the fault and had to be run again; None while it is not known."""
        return None if self.resumed_after is None else max(0, self.step - self.resumed_after)

    def due(self, now: Snapshot) -> bool:
        """Whether to strike: half of the steps are done and every rank trains."""
        halfway = now.total_steps > 0 and 2 * now.step >= now.total_steps
        return self.struck is None and halfway and trains(now) and bool(now.pods)

    async def strike(self, client: ApiClient, namespace: str, now: Snapshot) -> PodView:
        """Delete the pod of the last worker, gracefully, and say which it was."""
        victim = now.pods[-1]
        self.struck, self.generation, self.step, self.struck_at = victim, now.generation, now.step, time.monotonic()
        await client.delete(PODS, victim.name, namespace)
        return victim

    def observe(self, now: Snapshot) -> bool:
        """Take a look at the job; true at the moment when the recovery is seen to be over."""
        if self.struck is None:
            return False
        self.step = max(self.step, now.step) if now.generation == self.generation else self.step
        if self.recovered_at is not None or now.generation <= self.generation or not trains(now):
            return False
        replacement = [pod for pod in now.pods if pod.worker == self.struck.worker and pod.name != self.struck.name]
        if not replacement:
            return False
        self.recovered_at, self.replacement = time.monotonic(), replacement[-1]
        return True

    @property
    def seconds(self) -> float | None:
        """From the deletion until every rank trained again; None while it is not so."""
        return None if self.recovered_at is None else self.recovered_at - self.struck_at


def trains(now: Snapshot) -> bool:
    """Whether every rank trains (or has finished)."""
    ready, _, world = now.status.ready_ranks.partition("/")
    return now.holds(conditions.COMPLETE) or (now.holds(conditions.READY) and ready == world != "")
