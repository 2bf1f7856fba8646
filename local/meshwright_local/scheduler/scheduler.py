"""The scheduling loop: binds waiting pods in order, over the API.

A pass runs when a pod or node changes, so nothing is polled. A pod that was bound stays *assumed* on its node until the
watch shows it there; otherwise the next pod would get the same resources.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from meshwright.api.objects import KubeObject
from meshwright_local.controllers.base import Controller, Key
from meshwright_local.kube import timestamps
from meshwright_local.kube.client import REQUEST_ERRORS, ApiError
from meshwright_local.kube.reflector import Change, ChangeType, Informers
from meshwright_local.kube.resources import CLAIMS, NAMESPACES, NODES, PODS, key_of
from meshwright_local.scheduler import filters, scoring, snapshot

logger = logging.getLogger(__name__)

_GATED = "Scheduling is blocked due to non-empty scheduling gates"
_PASS: Key = ("", "")
_RETRY_SECONDS = 0.5


class Scheduler(Controller):
    """Schedules pods with the default schedulerName. Its only key stands for a pass over all waiting pods."""

    def __init__(self, informers: Informers) -> None:
        super().__init__(informers, scoring.DEFAULT_SCHEDULER)
        self._assumed: dict[str, str] = {}
        self._pods = self.watch_resource(PODS, self._pod_changed)
        self._nodes = self.watch_resource(NODES, _node_changed)
        self._namespaces = self.watch_resource(NAMESPACES, lambda _: ())
        self._claims = self.watch_resource(CLAIMS, lambda _: (_PASS,))

    def _pod_changed(self, change: Change) -> Iterable[Key]:
        if change.type is ChangeType.DELETED or change.object["spec"].get("nodeName"):
            self._assumed.pop(change.object["metadata"]["uid"], None)
        return (_PASS,)

    async def reconcile(self, _: Key) -> float | None:
        """Try every waiting pod once, in order. Retry soon if a request failed."""
        waiting = [pod for pod in self._pods.values() if scoring.is_waiting(pod)]
        waiting = [pod for pod in waiting if pod["metadata"]["uid"] not in self._assumed]
        if not waiting:
            return None
        spaces = {name: item["metadata"].get("labels") or {} for (_, name), item in self._namespaces.items()}
        view = snapshot.take_snapshot(self._nodes.values(), self._pods.values(), self._assumed, spaces)
        again: float | None = None
        for pod in sorted(waiting, key=scoring.queue_order):
            try:
                if pod["spec"].get("schedulingGates"):
                    await self._set_unscheduled_condition(pod, "SchedulingGated", _GATED)
                else:
                    await self._place(pod, view)
            except REQUEST_ERRORS as error:
                # Deleted or bound by another scheduler: the watch reports it. Retry after any other error.
                if not (isinstance(error, ApiError) and error.status in (404, 409)):
                    again = _RETRY_SECONDS
                logger.debug("%s: %r", pod["metadata"]["name"], error)
        return again

    async def _place(self, pod: KubeObject, view: snapshot.Snapshot) -> None:
        waits = filters.claim_reason(pod, self._claims)
        rejections = {name: filters.filter_reasons(pod, node, view) for name, node in view.nodes.items()}
        possible = [view.nodes[name] for name, reasons in rejections.items() if not reasons and not waits]
        if not possible:
            message = filters.unschedulable_message(rejections, waits)
            if await self._set_unscheduled_condition(pod, "Unschedulable", message):
                self.events.emit(pod, "Warning", "FailedScheduling", message)
            return
        node = scoring.best_node(pod, possible)
        uid = pod["metadata"]["uid"]
        self._assumed[uid] = node.name
        try:
            await self._bind(pod, node.name)
        except BaseException:
            self._assumed.pop(uid, None)
            raise
        node.add(pod)
        text = f"Successfully assigned {'/'.join(key_of(pod))} to {node.name}"
        self.events.emit(pod, "Normal", "Scheduled", text)

    async def _bind(self, pod: KubeObject, node: str) -> None:
        space, name = key_of(pod)
        metadata = {"namespace": space, "name": name, "uid": pod["metadata"]["uid"]}
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        await self.client.request("POST", PODS.path(space, name, "binding"), body=body)

    async def _set_unscheduled_condition(self, pod: KubeObject, reason: str, message: str) -> bool:
        """Write to the pod's status why it waits. Return False if the status already says so."""
        conditions = (pod.get("status") or {}).get("conditions") or ()
        old: KubeObject = next((item for item in conditions if item["type"] == "PodScheduled"), {})
        if (old.get("reason"), old.get("message")) == (reason, message):
            return False
        since = old["lastTransitionTime"] if old.get("status") == "False" else timestamps.now()
        condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
        await self.client.set_condition(PODS, pod, {**condition, "lastTransitionTime": since})
        return True


def _node_changed(change: Change) -> Iterable[Key]:
    # Heartbeats change a node's status every few seconds, but free no resources.
    known = change.old is not None and change.type is not ChangeType.DELETED
    return () if known and _scheduling_state(change.old or {}) == _scheduling_state(change.object) else (_PASS,)


def _scheduling_state(node: KubeObject) -> tuple[object, ...]:
    spec, status = node.get("spec") or {}, node.get("status") or {}
    return spec.get("taints"), spec.get("unschedulable"), node["metadata"].get("labels"), status.get("allocatable")
