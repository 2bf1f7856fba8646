"""Node lifecycle: nodes without heartbeats become unreachable, and pods leave nodes that do not want them.

A node's agent renews its Lease. When renewals stop, conditions become Unknown and the node is tainted; the NoExecute
taint evicts pods after the time they tolerate. Pods of a node whose object is gone are removed at once, for nobody is
left to confirm their end. Time is measured from when a renewal was seen here, so clocks need not agree.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass

import aiohttp

from meshwright.local import clock
from meshwright.local.client import STRATEGIC_PATCH, ApiClient, ApiError
from meshwright.local.controllers.eviction import NOT_READY, UNREACHABLE, seconds_to_stay
from meshwright.local.events import EventRecorder
from meshwright.local.informers import Informers
from meshwright.local.reflector import Change, ChangeType, Reflector
from meshwright.local.resources import LEASE_NAMESPACE, LEASES, NODES, PODS, Object

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """How often nodes show that they live and how patient the controller is, in seconds."""

    renew: float = 10.0
    """Between two renewals of a node's lease."""
    heartbeat: float = 40.0
    """Without a renewal for this long, a node is unreachable."""
    tolerate: float = 30.0
    """Pods that do not say otherwise stay this long on an unreachable node. Kubernetes' admission says 300."""
    check: float = 2.0
    """Between two looks at the clock."""


class NodeController:
    """Watches heartbeats, taints and evicts."""

    def __init__(self, informers: Informers, times: NodeTimes) -> None:
        self._client: ApiClient = informers.client
        self._times = times
        self._nodes = informers.get(NODES)
        self._pods = informers.get(PODS)
        self._leases = Reflector(informers.client, LEASES, namespace=LEASE_NAMESPACE)
        self._leases.listeners.append(self._lease_changed)
        self._nodes.listeners.append(self._node_changed)
        self._events = EventRecorder(informers.client, "node-controller")
        self._seen: dict[str, float] = {}
        self._tainted: dict[str, float] = {}
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._leases.run())
            group.create_task(self._events.run())
            for reflector in (self._nodes, self._pods, self._leases):
                await reflector.synced.wait()
            while True:
                for name, node in list(self._nodes.objects.items()):
                    await self._guarded(self._look(name[1], node))
                await self._guarded(self._evict())
                self._wake.clear()
                try:
                    async with asyncio.timeout(self._times.check):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.debug("node controller: %r", error)

    def _lease_changed(self, change: Change) -> None:
        if change.type is not ChangeType.DELETED:
            self._seen[change.object["metadata"]["name"]] = time.monotonic()

    def _node_changed(self, change: Change) -> None:
        name = change.object["metadata"]["name"]
        if change.type is ChangeType.DELETED:
            self._seen.pop(name, None)
            self._tainted.pop(name, None)
            self._wake.set()
        elif (
            change.old is None
            or _ready(change.old) != _ready(change.object)
            or _taints(change.old) != _taints(change.object)
        ):
            self._seen.setdefault(name, time.monotonic())
            self._wake.set()

    async def _look(self, name: str, node: Object) -> None:
        silent = time.monotonic() - self._seen.setdefault(name, time.monotonic())
        ready = _ready(node)
        if silent > self._times.heartbeat and ready != "Unknown":
            await self._mark_unknown(name, node)
            ready = "Unknown"
        await self._set_taints(name, node, {"True": None, "False": NOT_READY}.get(ready, UNREACHABLE))

    async def _mark_unknown(self, name: str, node: Object) -> None:
        conditions = [
            {
                "type": kind,
                "status": "Unknown",
                "reason": "NodeStatusUnknown",
                "message": "Node agent stopped posting node status.",
                "lastTransitionTime": clock.now(),
            }
            for kind in [item["type"] for item in (node.get("status") or {}).get("conditions") or ()] or ["Ready"]
        ]
        body = {"status": {"conditions": conditions}}
        await self._client.patch(NODES, name, body, subresource="status", content_type=STRATEGIC_PATCH)
        self._events.emit(node, "Normal", "NodeNotReady", f"Node {name} status is now: NodeNotReady")
        for pod in self._pods_of(name):
            await self._mark_pod_not_ready(pod)

    async def _mark_pod_not_ready(self, pod: Object) -> None:
        condition = {"type": "Ready", "status": "False", "reason": "NodeNotReady", "lastTransitionTime": clock.now()}
        metadata = pod["metadata"]
        await self._client.patch(
            PODS,
            metadata["name"],
            {"metadata": {"uid": metadata["uid"]}, "status": {"conditions": [condition]}},
            metadata["namespace"],
            subresource="status",
            content_type=STRATEGIC_PATCH,
        )

    async def _set_taints(self, name: str, node: Object, wanted: str | None) -> None:
        """Have exactly the lifecycle taint that fits the node's state, for scheduling and for running pods."""
        old = _taints(node)
        others = [taint for taint in old if taint["key"] not in (NOT_READY, UNREACHABLE)]
        mine = [taint for taint in old if taint["key"] == wanted]
        if wanted and {taint["effect"] for taint in mine} != {"NoSchedule", "NoExecute"}:
            moment = clock.now()
            mine = [{"key": wanted, "effect": effect, "timeAdded": moment} for effect in ("NoSchedule", "NoExecute")]
        if others + mine == old:
            return
        exact = {"resourceVersion": node["metadata"]["resourceVersion"]}
        await self._client.patch(NODES, name, {"metadata": exact, "spec": {"taints": others + mine or None}})

    async def _evict(self) -> None:
        for pod in list(self._pods.objects.values()):
            name = pod["spec"].get("nodeName")
            if not name:
                continue
            node = self._nodes.objects.get(("", name))
            if node is None:
                await self._remove_lost(pod, name)
                continue
            since = self._since_tainted(name, node)
            if since is None or pod["metadata"].get("deletionTimestamp") or _is_over(pod):
                continue
            stay = seconds_to_stay(_taints(node), pod["spec"].get("tolerations") or (), self._times.tolerate)
            if stay is not None and time.monotonic() - since >= stay:
                metadata = pod["metadata"]
                self._events.emit(pod, "Normal", "TaintManagerEviction", f"Marking for deletion Pod {metadata['name']}")
                await self._client.delete(PODS, metadata["name"], metadata["namespace"], uid=metadata["uid"])

    def _since_tainted(self, name: str, node: Object) -> float | None:
        if not any(taint["effect"] == "NoExecute" for taint in _taints(node)):
            self._tainted.pop(name, None)
            return None
        return self._tainted.setdefault(name, time.monotonic())

    async def _remove_lost(self, pod: Object, node: str) -> None:
        """Remove a pod whose node object is gone, after making sure that it is."""
        if await self._client.find(NODES, node) is None:
            metadata = pod["metadata"]
            logger.info("pod %s/%s removed: node %s is gone", metadata["namespace"], metadata["name"], node)
            await self._client.delete(
                PODS, metadata["name"], metadata["namespace"], grace_seconds=0, uid=metadata["uid"]
            )

    def _pods_of(self, node: str) -> list[Object]:
        return [pod for pod in self._pods.objects.values() if pod["spec"].get("nodeName") == node]


def _ready(node: Object) -> str:
    for condition in (node.get("status") or {}).get("conditions") or ():
        if condition["type"] == "Ready":
            return str(condition["status"])
    return "False"


def _taints(node: Object) -> list[Object]:
    return (node.get("spec") or {}).get("taints") or []


def _is_over(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
