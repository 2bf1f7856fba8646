"""The fault of the demo: one worker pod is deleted midway, and what came of it is kept as evidence."""

from __future__ import annotations

import time
from dataclasses import dataclass

from meshwright.api import conditions
from meshwright_cli.demo.snapshot import PodView, Snapshot
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.resources import PODS


@dataclass(slots=True)
class Fault:
    """A worker pod deleted as `kubectl delete pod` does, and how the job came back."""

    deleted_pod: PodView | None = None
    generation: int = 0
    """Mesh generation when the pod was deleted."""
    step: int = 0
    """Last step seen before it."""
    deleted_at: float = 0.0
    """Moment of the deletion (monotonic seconds)."""
    recovered_at: float | None = None
    """Moment at which every rank of a newer generation was seen training (monotonic seconds)."""
    replacement: PodView | None = None
    resumed_after: int | None = None
    """Step after which the new generation began."""

    @property
    def repeated_steps(self) -> int | None:
        """Steps that were seen finished before the fault and had to be run again; None while it is not known."""
        return None if self.resumed_after is None else max(0, self.step - self.resumed_after)

    def due(self, now: Snapshot) -> bool:
        """Whether to strike: half of the steps are done and every rank trains."""
        halfway = now.total_steps > 0 and 2 * now.step >= now.total_steps
        return self.deleted_pod is None and halfway and all_ranks_train(now) and bool(now.pods)

    async def inject(self, client: ApiClient, namespace: str, now: Snapshot) -> PodView:
        """Delete the pod of the last worker, gracefully, and say which it was."""
        target = now.pods[-1]
        self.deleted_pod, self.generation, self.step, self.deleted_at = (
            target,
            now.generation,
            now.step,
            time.monotonic(),
        )
        await client.delete(PODS, target.name, namespace)
        return target

    def observe(self, now: Snapshot) -> bool:
        """Take a look at the job; true at the moment when the recovery is seen to be over."""
        if self.deleted_pod is None:
            return False
        self.step = max(self.step, now.step) if now.generation == self.generation else self.step
        if self.recovered_at is not None or now.generation <= self.generation or not all_ranks_train(now):
            return False
        replacement = [
            pod for pod in now.pods if pod.worker == self.deleted_pod.worker and pod.name != self.deleted_pod.name
        ]
        if not replacement:
            return False
        self.recovered_at, self.replacement = time.monotonic(), replacement[-1]
        return True

    @property
    def seconds(self) -> float | None:
        """From the deletion until every rank trained again; None while it is not so."""
        return None if self.recovered_at is None else self.recovered_at - self.deleted_at


def all_ranks_train(now: Snapshot) -> bool:
    """Whether every rank trains (or has finished)."""
    ready, _, world = now.status.ready_ranks.partition("/")
    return now.holds(conditions.COMPLETE) or (now.holds(conditions.READY) and ready == world != "")
