"""Placing one job at a time: the one lock over all jobs, the listing of what runs, the planner's choice.

Whoever places keeps the lock until its pods are made, so that no two jobs are promised the same GPUs: from then on the
pods themselves, gated but pinned, hold the room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshwright.api.labels import LABEL_JOB_UID
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.inventory import Inventory
from meshwright.planner.placement import Placement
from meshwright.planner.pricing import Calibration
from meshwright_operator.cache import Cache
from meshwright_operator.cluster import ApiError, Cluster, pods_path
from meshwright_operator.freeing import advice, holders
from meshwright_operator.line import Line, Waiting, enough, nodes_for, placement_for, turn, without
from meshwright_operator.metrics import OperatorMetrics

Object = dict[str, Any]

ACTIVE = "status.phase!=Succeeded,status.phase!=Failed"
AVOID_SECONDS = 900.0
"""How long a job keeps off a node that did not take its pod: what was in the way may be gone by then."""


class TurnError(Exception):
    """There is room, but a job ahead in the line fits it too and goes first."""

    def __init__(self, ahead: Waiting) -> None:
        super().__init__(f"there is room, but job {ahead.key} is ahead in the line and fits it too")
        self.ahead = ahead.key


class Placer:
    """Finds nodes for workers, and keeps the line of jobs for which there are none."""

    def __init__(self, cluster: Cluster, cache: Cache, metrics: OperatorMetrics, namespaces: Sequence[str]) -> None:
        self._cluster = cluster
        self._cache = cache
        self._metrics = metrics
        self._namespaces = namespaces
        self.lock = asyncio.Lock()
        """Held from placing until the pods are made."""
        self.line = Line()
        self.calibration = Calibration()
        """What running jobs taught about this cluster's GPUs; plans are made with it."""
        self.warnings: tuple[str, ...] = ()
        """What was strange about the nodes and pods that the last placement saw; read it with the lock held."""
        self._avoided: dict[str, dict[str, tuple[float, str]]] = {}

    def nodes(self, spec: ParallelTrainingJobSpec) -> Inventory:
        """The nodes as the job sees them, as if nothing ran on them: enough to plan."""
        return inventory_for(spec, list(self._cache.nodes.values()), (), None)

    def refusals(self, spec: ParallelTrainingJobSpec, names: Iterable[str]) -> Mapping[str, str]:
        """Of these nodes, those that take no pod of the job (any more), and why."""
        nodes = [self._cache.nodes[name] for name in sorted(set(names)) if name in self._cache.nodes]
        return inventory_for(spec, nodes, (), None).unusable

    async def place(self, wish: Waiting) -> Placement:
        """A node for every worker; those in `wish.keep` stay. Call it with the lock held.

        Raises:
            DoesNotFitError: there is no room now; the text says what is short and what would have to end.
            TurnError: there is, but a job ahead in the line gets it.
            ApiError: the pods could not be listed.
        """
        started = time.monotonic()
        result = "error"
        try:
            pods = await self._running_pods()
            ahead = self.line.ahead_of(wish)
            avoided = {waiting.uid: self.avoided(waiting.uid) for waiting in (wish, *ahead)}
            view = _View(avoided, list(self._cache.nodes.values()), pods)
            result = "no_room"
            try:
                placement = await asyncio.to_thread(view.place, wish, ahead)
            finally:
                self.warnings = view.warnings
            result = "placed"
            self._metrics.placement_cost.observe(placement.cost)
            return placement
        finally:
            self._metrics.placement_attempts.labels(result).inc()
            self._metrics.placement_seconds.observe(time.monotonic() - started)

    async def fits_elsewhere(self, wish: Waiting) -> bool:
        """Whether the workers that are not in `wish.keep` find other nodes, without taking anybody's turn."""
        try:
            await self.place(wish)
        except (DoesNotFitError, TurnError):
            return False
        return True

    def avoid(self, uid: str, nodes: Mapping[str, str]) -> None:
        """Keeps this job (its uid) off these nodes (name -> why) for a while."""
        if not nodes:
            return
        until = time.monotonic() + AVOID_SECONDS
        self._avoided.setdefault(uid, {}).update({name: (until, why) for name, why in nodes.items()})

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self.line.leave(uid)
        self._avoided.pop(uid, None)

    def avoided(self, uid: str) -> dict[str, str]:
        """Node -> why this job keeps off it now."""
        now = time.monotonic()
        kept = {name: entry for name, entry in self._avoided.get(uid, {}).items() if entry[0] > now}
        if uid in self._avoided:
            self._avoided[uid] = kept
        return {name: why for name, (_, why) in kept.items()}

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


def inventory_for(
    spec: ParallelTrainingJobSpec, nodes: Sequence[Object], pods: Sequence[Object], without_job: str | None
) -> Inventory:
    """The nodes as a job of this spec sees them; pods of the job `without_job` (its uid) are not counted."""
    return Inventory.from_objects(
        nodes,
        pods,
        gpu_resource=spec.workers.gpu_resource,
        node_selector=spec.workers.node_selector,
        tolerations=spec.workers.tolerations,
        without_job=without_job,
    )


class _View:
    """Nodes and pods at one moment, as each job that is asked about sees them. Runs in a thread: it may take long."""

    def __init__(
        self, avoided: Mapping[str, Mapping[str, str]], nodes: Sequence[Object], pods: Sequence[Object]
    ) -> None:
        self._avoided = avoided
        self._nodes = nodes
        self._pods = pods
        self._others = [pod for pod in pods if not _job_uid(pod)]
        self._known: dict[tuple[object, ...], Inventory] = {}
        self.warnings: tuple[str, ...] = ()
        """What was strange, as the job that was placed sees it."""

    def place(self, wish: Waiting, ahead: Sequence[Waiting]) -> Placement:
        """Nodes for the job's workers, unless they are somebody's ahead.

        Raises:
            DoesNotFitError, TurnError: as `Placer.place`.
        """
        if wish.restarts:
            # They go first, and the room is then anybody's: a job ahead would take it.
            self._pods = [pod for pod in self._pods if _job_uid(pod) != wish.uid]
        left = turn(ahead, wish.asked, self._free, self._whole)
        own = self._free(wish)
        self.warnings = own.warnings
        try:
            return placement_for(wish, without(own, left.reserved))
        except DoesNotFitError as error:
            if left.yield_to is not None and nodes_for(wish, own):
                raise TurnError(left.yield_to) from None
            found = holders(self._pods, wish.spec.workers.gpu_resource, wish.uid)
            hint = advice(found, own, lambda freed: any(enough(plan, freed) for plan in wish.plans))
            line = f"{len(ahead)} {'job is' if len(ahead) == 1 else 'jobs are'} ahead in the line" if ahead else ""
            error.args = ("; ".join(part for part in (str(error), hint, line) if part),)
            raise

    def _free(self, waiting: Waiting) -> Inventory:
        holding = waiting.uid if waiting.holds else ""
        found = self._inventory(waiting.spec, "free", holding, self._pods, holding or None)
        return without(found, self._avoided[waiting.uid])

    def _whole(self, waiting: Waiting) -> Inventory:
        return self._inventory(waiting.spec, "whole", "", self._others, None)

    def _inventory(
        self, spec: ParallelTrainingJobSpec, kind: str, uid: str, pods: Sequence[Object], own: str | None
    ) -> Inventory:
        workers = spec.workers
        tolerations = tuple(toleration.model_dump_json() for toleration in workers.tolerations)
        key = (kind, uid, workers.gpu_resource, tuple(sorted(workers.node_selector.items())), tolerations)
        if key not in self._known:
            self._known[key] = inventory_for(spec, self._nodes, pods, own)
        return self._known[key]


def _job_uid(pod: Object) -> str:
    """The job whose label the pod carries; empty when it carries none that can be read."""
    labels = (pod.get("metadata") or {}).get("labels")
    uid = labels.get(LABEL_JOB_UID) if isinstance(labels, dict) else None
    return uid if isinstance(uid, str) else ""


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
