"""Node lifecycle: taints of cordoned nodes and of nodes without heartbeats, and eviction from the latter.

A node's agent renews its Lease. If renewals stop, the node's conditions become Unknown and the node is tainted; the
NoExecute taint evicts pods after the time they tolerate. Pods of a node whose object is gone are deleted at once,
because no agent is left to confirm that they stopped. Time is measured from the moment when this process received a
renewal, so clocks need not agree.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.api.objects import KubeObject
from meshwright_local.controllers.base import Controller, Key
from meshwright_local.kube import timestamps
from meshwright_local.kube.client import STRATEGIC_PATCH
from meshwright_local.kube.reflector import Change, ChangeType, Informers
from meshwright_local.kube.resources import LEASE_NAMESPACE, LEASES, NODES, PODS, has_ended, key_of
from meshwright_local.kube.selectors import toleration_covers

NOT_READY = "node.kubernetes.io/not-ready"
UNREACHABLE = "node.kubernetes.io/unreachable"
CORDONED = "node.kubernetes.io/unschedulable"


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Intervals and timeouts of heartbeats, in seconds."""

    renew: float = 10.0
    """Interval between two renewals of a node's lease."""
    heartbeat: float = 40.0
    """Without a renewal for this long, a node is unreachable."""
    tolerate: float = 30.0
    """Default time that pods stay on an unreachable node. Kubernetes' admission sets 300."""
    check: float = 2.0
    """Interval between two checks."""


class NodeController(Controller):
    """Watches heartbeats, taints and evicts. Keys are `("", node)`."""

    def __init__(self, informers: Informers, times: NodeTimes) -> None:
        super().__init__(informers, "node-controller")
        self._times = times
        self._seen: dict[str, float] = {}
        self._tainted: dict[str, float] = {}
        self._on: defaultdict[str, dict[Key, KubeObject]] = defaultdict(dict)
        self._nodes = self.watch_resource(NODES)
        self.watch_resource(PODS, self._pod_changed)
        self.watch_resource(LEASES, self._lease_changed)

    def _pod_changed(self, change: Change) -> Iterable[Key]:
        pod, node = change.object, change.object["spec"].get("nodeName")
        if not node:
            return ()
        if change.type is ChangeType.DELETED:
            self._on[node].pop(key_of(pod), None)
        else:
            self._on[node][key_of(pod)] = pod
        return (("", node),)

    def _lease_changed(self, change: Change) -> Iterable[Key]:
        # Only record a renewal: the node is checked when its timeout would have passed.
        if key_of(change.object)[0] == LEASE_NAMESPACE and change.type is not ChangeType.DELETED:
            self._seen[change.object["metadata"]["name"]] = time.monotonic()
        return ()

    async def reconcile(self, key: Key) -> float | None:
        """Update one node's conditions and taints from its heartbeats, and evict pods."""
        name, node = key[1], self._nodes.get(key)
        if node is None:
            self._seen.pop(name, None)
            self._tainted.pop(name, None)
            if self._on[name] and await self.client.find(NODES, name) is None:
                for pod in list(self._on[name].values()):
                    await self._remove(pod, grace_seconds=0)
            return None
        silent = time.monotonic() - self._seen.setdefault(name, time.monotonic())
        ready = _ready(node)
        if silent > self._times.heartbeat and ready != "Unknown":
            await self._mark_unknown(name, node)
            ready = "Unknown"
        await self._set_taints(name, node, {"True": None, "False": NOT_READY}.get(ready, UNREACHABLE))
        await self._evict(name, node)
        return self._times.check if ready != "True" or name in self._tainted else self._times.heartbeat - silent + 0.01

    async def _mark_unknown(self, name: str, node: KubeObject) -> None:
        known = [item["type"] for item in (node.get("status") or {}).get("conditions") or ()] or ["Ready"]
        unknown = {"status": "Unknown", "reason": "NodeStatusUnknown", "lastTransitionTime": timestamps.now()}
        unknown["message"] = "Node agent stopped posting node status."
        body = {"status": {"conditions": [{"type": kind, **unknown} for kind in known]}}
        await self.client.patch(NODES, name, body, subresource="status", content_type=STRATEGIC_PATCH)
        self.events.emit(node, "Normal", "NodeNotReady", f"Node {name} status is now: NodeNotReady")
        condition = {
            "type": "Ready",
            "status": "False",
            "reason": "NodeNotReady",
            "lastTransitionTime": timestamps.now(),
        }
        for pod in list(self._on[name].values()):
            await self.client.set_condition(PODS, pod, condition)

    async def _set_taints(self, name: str, node: KubeObject, wanted: str | None) -> None:
        """Set exactly the taints that match the node's state: no contact, for scheduling and running pods; cordoned."""
        old = _taints(node)
        others = [taint for taint in old if taint["key"] not in (NOT_READY, UNREACHABLE, CORDONED)]
        if (node.get("spec") or {}).get("unschedulable"):
            before = [taint for taint in old if taint["key"] == CORDONED]
            others += before or [{"key": CORDONED, "effect": "NoSchedule", "timeAdded": timestamps.now()}]
        mine = [taint for taint in old if taint["key"] == wanted]
        if wanted and {taint["effect"] for taint in mine} != {"NoSchedule", "NoExecute"}:
            moment = timestamps.now()
            mine = [{"key": wanted, "effect": effect, "timeAdded": moment} for effect in ("NoSchedule", "NoExecute")]
        if others + mine != old:
            exact = {"resourceVersion": node["metadata"]["resourceVersion"]}
            await self.client.patch(NODES, name, {"metadata": exact, "spec": {"taints": others + mine or None}})

    async def _evict(self, name: str, node: KubeObject) -> None:
        if not any(taint["effect"] == "NoExecute" for taint in _taints(node)):
            self._tainted.pop(name, None)
            return
        since = self._tainted.setdefault(name, time.monotonic())
        for pod in list(self._on[name].values()):
            stay = seconds_to_stay(_taints(node), pod["spec"].get("tolerations") or (), self._times.tolerate)
            leaving = has_ended(pod) or pod["metadata"].get("deletionTimestamp")
            if stay is not None and not leaving and time.monotonic() - since >= stay:
                text = f"Marking for deletion Pod {pod['metadata']['name']}"
                self.events.emit(pod, "Normal", "TaintManagerEviction", text)
                await self._remove(pod)

    async def _remove(self, pod: KubeObject, grace_seconds: int | None = None) -> None:
        space, name = key_of(pod)
        await self.client.delete(PODS, name, space, grace_seconds=grace_seconds, uid=pod["metadata"]["uid"])


def _ready(node: KubeObject) -> str:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return next((str(item["status"]) for item in conditions if item["type"] == "Ready"), "False")


def _taints(node: KubeObject) -> list[KubeObject]:
    return (node.get("spec") or {}).get("taints") or []


def seconds_to_stay(taints: Iterable[KubeObject], tolerations: Sequence[KubeObject], default: float) -> float | None:
    """Return how many seconds a pod may stay on a node: None is forever.

    Args:
        taints: The node's taints; only NoExecute ones evict.
        tolerations: The pod's. If several cover a taint the shortest time counts, as in Kubernetes.
        default: Time for the taints of an unreachable or not ready node that the pod has no toleration for, as
            Kubernetes' admission adds it to every pod as tolerationSeconds.
    """
    shortest: float | None = None
    for taint in taints:
        if taint["effect"] != "NoExecute":
            continue
        covering = [item for item in tolerations if toleration_covers(item, taint)]
        if not covering:
            stay: float | None = default if taint["key"] in (NOT_READY, UNREACHABLE) else 0.0
        else:
            limits = [max(0.0, float(item["tolerationSeconds"])) for item in covering if "tolerationSeconds" in item]
            stay = min(limits) if limits else None
        if stay is not None:
            shortest = stay if shortest is None else min(shortest, stay)
    return shortest
