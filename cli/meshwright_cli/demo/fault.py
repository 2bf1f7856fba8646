"""The fault of the demo: it deletes one worker pod early in the run and records the recovery as evidence."""

from __future__ import annotations

import time
from dataclasses import dataclass

from meshwright.api import conditions
from meshwright_cli.demo.snapshot import PodView, Snapshot
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.resources import PODS


@dataclass(slots=True)
class Fault:
    """A worker pod that is deleted as with `kubectl delete pod`, and the recovery of the job."""

    deleted_pod: PodView | None = None
    generation: int = 0
    """Mesh generation when the pod was deleted."""
    step: int = 0
    """Last step observed before the deletion."""
    deleted_at: float = 0.0
    """Time of the deletion (monotonic seconds)."""
    recovered_at: float | None = None
    """Time at which every rank of a newer generation was first observed training (monotonic seconds)."""
    replacement: PodView | None = None
    resumed_after: int | None = None
    """Step after which the new generation resumed."""

    @property
    def repeated_steps(self) -> int | None:
        """Steps that finished before the fault and were repeated. None until this is known."""
        return None if self.resumed_after is None else max(0, self.step - self.resumed_after)

    def due(self, now: Snapshot) -> bool:
        """Whether to delete the pod: a tenth of the steps is done and every rank is training."""
        late = now.total_steps > 0 and 10 * now.step >= now.total_steps
        return self.deleted_pod is None and late and all_ranks_train(now) and bool(now.pods)

    async def inject(self, client: ApiClient, namespace: str, now: Snapshot) -> PodView:
        """Delete the pod of the last worker gracefully, and return it."""
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
        """Observe the job. Returns true once, when the recovery has finished."""
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
        """Seconds from the deletion until every rank trained again. None until then."""
        return None if self.recovered_at is None else self.recovered_at - self.deleted_at


def all_ranks_train(now: Snapshot) -> bool:
    """Whether every rank is training or has finished."""
    ready, _, world = now.status.ready_ranks.partition("/")
    return now.holds(conditions.COMPLETE) or (now.holds(conditions.READY) and ready == world != "")
