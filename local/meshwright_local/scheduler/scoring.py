"""The order of waiting pods, and the choice among the nodes that a pod fits (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.api.objects import KubeObject
from meshwright_local.kube.selectors import node_term_matches
from meshwright_local.scheduler.resource_requests import allocatable
from meshwright_local.scheduler.snapshot import NodeView

DEFAULT_SCHEDULER = "default-scheduler"


def queue_order(pod: KubeObject) -> tuple[int, str, int]:
    """Return the sort key of waiting pods: priority first, then age, then the revision for ties within a second."""
    metadata = pod["metadata"]
    revision = metadata.get("resourceVersion", "0")
    return -(pod["spec"].get("priority") or 0), metadata["creationTimestamp"], int(revision)


def is_waiting(pod: KubeObject) -> bool:
    """Return whether this scheduler is responsible for a pod, regardless of scheduling gates."""
    spec, metadata = pod["spec"], pod["metadata"]
    mine = spec.get("schedulerName", DEFAULT_SCHEDULER) == DEFAULT_SCHEDULER
    return mine and not spec.get("nodeName") and not metadata.get("deletionTimestamp")


def best_node(pod: KubeObject, views: Iterable[NodeView]) -> NodeView:
    """Return the node with the highest preferred-affinity weight, then the most free resources, then by name."""
    return min(views, key=lambda view: (-_preference(pod, view), -_free_share(view), len(view.pods), view.name))


def _preference(pod: KubeObject, view: NodeView) -> int:
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    return sum(
        int(term["weight"])
        for term in affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
        if node_term_matches(term["preference"], view.node)
    )


def _free_share(view: NodeView) -> float:
    """Return the mean free share of the node's resources: kube-scheduler's LeastAllocated with equal weights."""
    total = allocatable(view.node)
    shares = [view.free[name] / amount for name, amount in total.items() if amount > 0 and name != "pods"]
    return sum(shares) / len(shares) if shares else 0.0
