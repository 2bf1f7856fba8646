"""Whether a pod fits a node, and why not (pure). Filters run in kube-scheduler's order and speak with its words
(of taints with those of releases before 1.35, which name the taint).

Covered: cordoned nodes, taints, node selector and affinity, resources, topology spread, pod affinity and
anti-affinity. Not covered: host ports, volume topology and dynamic resource claims, of which embedded nodes have none.
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.local.resources import Object
from meshwright.local.scheduler import pod_affinity, spread
from meshwright.local.scheduler.requests import pod_requests
from meshwright.local.scheduler.snapshot import NodeView, Snapshot
from meshwright.local.selectors import node_matches, pinned_to, tolerates

_CORDONED = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


def reasons_against(pod: Object, view: NodeView, snapshot: Snapshot) -> list[str]:
    """Why a pod cannot run on a node; empty when it can. The first filter that objects is the one that speaks."""
    for check in _FILTERS:
        if reasons := check(pod, view, snapshot):
            return reasons
    return []


def unschedulable_message(reasons: dict[str, list[str]]) -> str:
    """kube-scheduler's sentence for a pod that fits nowhere, from every node's reasons."""
    if not reasons:
        return "no nodes available to schedule pods"
    counts: dict[str, int] = {}
    for node in reasons.values():
        for reason in node:
            counts[reason] = counts.get(reason, 0) + 1
    parts = ", ".join(sorted(f"{count} {reason}" for reason, count in counts.items()))
    return f"0/{len(reasons)} nodes are available: {parts}."


def _pinned_elsewhere(pod: Object, view: NodeView, _: Snapshot) -> list[str]:
    names = pinned_to(pod["spec"])
    return [] if names is None or view.name in names else ["node(s) didn't satisfy plugin(s) [NodeAffinity]"]


def _cordon(pod: Object, view: NodeView, _: Snapshot) -> list[str]:
    cordoned = (view.node.get("spec") or {}).get("unschedulable")
    if cordoned and not tolerates(pod["spec"].get("tolerations") or (), _CORDONED):
        return ["node(s) were unschedulable"]
    return []


def _taints(pod: Object, view: NodeView, _: Snapshot) -> list[str]:
    tolerations = pod["spec"].get("tolerations") or ()
    for taint in (view.node.get("spec") or {}).get("taints") or ():
        if taint["effect"] in ("NoSchedule", "NoExecute") and not tolerates(tolerations, taint):
            return [f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value') or ''}}}"]
    return []


def _node_affinity(pod: Object, view: NodeView, _: Snapshot) -> list[str]:
    return [] if node_matches(pod["spec"], view.node) else ["node(s) didn't match Pod's node affinity/selector"]


def _resources(pod: Object, view: NodeView, _: Snapshot) -> list[str]:
    short = [name for name, amount in pod_requests(pod).items() if amount and amount > view.free[name]]
    return ["Too many pods" if name == "pods" else f"Insufficient {name}" for name in short]


_FILTERS: tuple[Callable[[Object, NodeView, Snapshot], list[str]], ...] = (
    _pinned_elsewhere,
    _cordon,
    _taints,
    _node_affinity,
    _resources,
    spread.reasons_against,
    pod_affinity.reasons_against,
)
