"""The scheduling loop: waiting pods in order, one binding each, over the API.

Passes run when a pod or node changes, so nothing is polled. A pod that was bound stays *assumed* on its node until the
watch shows it there; otherwise the next pod would be given the same room.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from meshwright.local import clock
from meshwright.local.client import STRATEGIC_PATCH, ApiError
from meshwright.local.events import EventRecorder
from meshwright.local.informers import Informers
from meshwright.local.reflector import Change, ChangeType
from meshwright.local.resources import NAMESPACES, NODES, PODS, Object
from meshwright.local.scheduler import choose, fits, snapshot

logger = logging.getLogger(__name__)

_GATED = "Scheduling is blocked due to non-empty scheduling gates"


class Scheduler:
    """Places pods whose schedulerName is the default one."""

    def __init__(self, informers: Informers) -> None:
        self._client = informers.client
        self._pods = informers.get(PODS)
        self._nodes = informers.get(NODES)
        self._namespaces = informers.get(NAMESPACES)
        self._events = EventRecorder(informers.client, choose.DEFAULT_SCHEDULER)
        self._assumed: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._pods.listeners.append(self._pod_changed)
        self._nodes.listeners.append(self._node_changed)

    async def run(self) -> None:
        """Schedule until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._events.run())
            for reflector in (self._pods, self._nodes, self._namespaces):
                await reflector.synced.wait()
            while True:
                await self._wake.wait()
                self._wake.clear()
                if not await self._pass():
                    await asyncio.sleep(0.5)
                    self._wake.set()

    def _pod_changed(self, change: Change) -> None:
        if change.type is ChangeType.DELETED or change.object["spec"].get("nodeName"):
            self._assumed.pop(change.object["metadata"]["uid"], None)
        self._wake.set()

    def _node_changed(self, change: Change) -> None:
        # Heartbeats change a node's status every few seconds and free nothing.
        if change.old is None or change.type is ChangeType.DELETED or _room(change.old) != _room(change.object):
            self._wake.set()

    async def _pass(self) -> bool:
        """Try every waiting pod once; False when a request failed and the pass must be repeated."""
        waiting = [pod for pod in self._pods.objects.values() if choose.is_waiting(pod)]
        waiting = [pod for pod in waiting if pod["metadata"]["uid"] not in self._assumed]
        if not waiting:
            return True
        spaces = {name: item["metadata"].get("labels") or {} for (_, name), item in self._namespaces.objects.items()}
        view = snapshot.take(self._nodes.objects.values(), self._pods.objects.values(), self._assumed, spaces)
        good = True
        for pod in sorted(waiting, key=choose.queue_order):
            try:
                if pod["spec"].get("schedulingGates"):
                    await self._condition(pod, "SchedulingGated", _GATED)
                else:
                    await self._place(pod, view)
            except ApiError as error:
                # Gone or bound by somebody else: the watch will tell. The rest is worth another pass.
                good = good and error.status in (404, 409)
                logger.debug("%s: %s", pod["metadata"]["name"], error)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                good = False
                logger.debug("%s: %r", pod["metadata"]["name"], error)
        return good

    async def _place(self, pod: Object, view: snapshot.Snapshot) -> None:
        against = {name: fits.reasons_against(pod, node, view) for name, node in view.nodes.items()}
        possible = [view.nodes[name] for name, reasons in against.items() if not reasons]
        metadata = pod["metadata"]
        if not possible:
            message = fits.unschedulable_message(against)
            if await self._condition(pod, "Unschedulable", message):
                self._events.emit(pod, "Warning", "FailedScheduling", message)
            return
        node = choose.best(pod, possible)
        self._assumed[metadata["uid"]] = node.name
        try:
            await self._client.bind(metadata["namespace"], metadata["name"], node.name, uid=metadata["uid"])
        except BaseException:
            self._assumed.pop(metadata["uid"], None)
            raise
        node.add(pod)
        name = f"{metadata['namespace']}/{metadata['name']}"
        self._events.emit(pod, "Normal", "Scheduled", f"Successfully assigned {name} to {node.name}")

    async def _condition(self, pod: Object, reason: str, message: str) -> bool:
        """Say in the pod's status why it waits; False when it says so already."""
        metadata, status = pod["metadata"], pod.get("status") or {}
        old = next((item for item in status.get("conditions") or () if item["type"] == "PodScheduled"), None)
        if old is not None and (old.get("reason"), old.get("message")) == (reason, message):
            return False
        same = old is not None and old["status"] == "False"
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": reason,
            "message": message,
            "lastTransitionTime": old["lastTransitionTime"] if old is not None and same else clock.now(),
        }
        await self._client.patch(
            PODS,
            metadata["name"],
            {"metadata": {"uid": metadata["uid"]}, "status": {"conditions": [condition]}},
            metadata["namespace"],
            subresource="status",
            content_type=STRATEGIC_PATCH,
        )
        return True


def _room(node: Object) -> tuple[object, ...]:
    spec, status = node.get("spec") or {}, node.get("status") or {}
    return spec.get("taints"), spec.get("unschedulable"), node["metadata"].get("labels"), status.get("allocatable")
