"""Placing one job at a time: the one lock over all jobs, the listing of what runs, the planner's choice.

Whoever places keeps the lock until its pods are made, so that no two jobs are promised the same GPUs: from then on the
pods themselves, gated but pinned, hold the room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.inventory import Inventory
from meshwright.planner.placement import Placement, place
from meshwright.planner.plan import Plan
from meshwright_operator.cache import Cache
from meshwright_operator.cluster import ApiError, Cluster, pods_path
from meshwright_operator.metrics import OperatorMetrics

Object = dict[str, Any]

ACTIVE = "status.phase!=Succeeded,status.phase!=Failed"


class Placer:
    """Finds nodes for workers."""

    def __init__(self, cluster: Cluster, cache: Cache, metrics: OperatorMetrics, namespaces: Sequence[str]) -> None:
        self._cluster = cluster
        self._cache = cache
        self._metrics = metrics
        self._namespaces = namespaces
        self.lock = asyncio.Lock()
        """Held from placing until the pods are made."""

    def nodes(self, spec: ParallelTrainingJobSpec) -> Inventory:
        """The nodes as the job sees them, as if nothing ran on them: enough to plan."""
        return self._inventory(spec, list(self._cache.nodes.values()), (), None)

    def refusals(self, spec: ParallelTrainingJobSpec, names: Iterable[str]) -> Mapping[str, str]:
        """Of these nodes, those that take no pod of the job (any more), and why."""
        nodes = [self._cache.nodes[name] for name in sorted(set(names)) if name in self._cache.nodes]
        return self._inventory(spec, nodes, (), None).unusable

    async def place(self, plan: Plan, spec: ParallelTrainingJobSpec, uid: str, keep: Mapping[int, str]) -> Placement:
        """A node for every worker; those in `keep` stay. Call it with the lock held.

        Raises:
            DoesNotFitError: there is no room now.
            ApiError: the pods could not be listed.
        """
        started = time.monotonic()
        result = "error"
        try:
            pods = await self._running_pods()
            inventory = self._inventory(spec, list(self._cache.nodes.values()), pods, uid)
            result = "no_room"
            placement = await asyncio.to_thread(place, plan, inventory, keep)
            result = "placed"
            return placement
        finally:
            self._metrics.placement_attempts.labels(result).inc()
            self._metrics.placement_seconds.observe(time.monotonic() - started)

    def _inventory(
        self, spec: ParallelTrainingJobSpec, nodes: Sequence[Object], pods: Sequence[Object], without: str | None
    ) -> Inventory:
        return Inventory.from_objects(
            nodes,
            pods,
            gpu_resource=spec.workers.gpu_resource,
            node_selector=spec.workers.node_selector,
            tolerations=spec.workers.tolerations,
            without_job=without,
        )

    async def _running_pods(self) -> list[Object]:
        """Every pod that holds something, whoever made it: read from the server now, not from a cache.

        An operator that serves a few namespaces and may not list the others' pods does not see what those hold; the
        scheduler, which checks every pinned pod, then has the last word.
        """
        try:
            return await self._pods_of((None,))
        except ApiError as error:
            if error.code != 403 or not self._namespaces:
                raise
            return await self._pods_of(self._namespaces)

    async def _pods_of(self, namespaces: Sequence[str | None]) -> list[Object]:
        found: list[Object] = []
        for namespace in namespaces:
            async for page in self._cluster.pages(pods_path(namespace), fieldSelector=ACTIVE):
                found += [_slim(pod) for pod in page if isinstance(pod, dict)]
        return found


def _slim(pod: Object) -> Object:
    """What an inventory reads of a pod; thousands of whole ones would be hundreds of megabytes."""
    metadata, spec = pod.get("metadata") or {}, pod.get("spec") or {}
    kept = ("nodeName", "nodeSelector", "affinity", "overhead", "resources")
    containers = ("containers", "initContainers")
    return {
        "metadata": {
            k: metadata[k] for k in ("name", "namespace", "uid", "labels", "ownerReferences") if k in metadata
        },
        "spec": {
            **{k: spec[k] for k in kept if k in spec},
            **{k: [_slim_container(c) for c in spec[k]] for k in containers if spec.get(k)},
        },
        "status": {"phase": (pod.get("status") or {}).get("phase")},
    }


def _slim_container(container: Object) -> Object:
    return {k: container[k] for k in ("resources", "restartPolicy") if k in container}
