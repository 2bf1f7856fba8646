"""The cluster as one scheduling pass sees it (pure): nodes with their pods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshwright.api.objects import KubeObject
from meshwright_local.kube.resources import has_ended
from meshwright_local.scheduler.resource_requests import Amounts, allocatable, pod_requests


@dataclass(slots=True)
class NodeView:
    """A node, its pods and its free resources."""

    node: KubeObject
    free: Amounts
    pods: list[KubeObject] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The node's name."""
        return str(self.node["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        """The node's labels."""
        return self.node["metadata"].get("labels") or {}

    def add(self, pod: KubeObject) -> None:
        """Add a pod and subtract its requests."""
        self.pods.append(pod)
        self.free.subtract(pod_requests(pod))


@dataclass(slots=True)
class Snapshot:
    """Every node, and the labels of every namespace."""

    nodes: dict[str, NodeView]
    namespaces: Mapping[str, Mapping[str, str]]

    def pods(self) -> Iterable[tuple[KubeObject, NodeView]]:
        """Yield every assigned pod that has not ended, with its node."""
        for view in self.nodes.values():
            for pod in view.pods:
                yield pod, view


def take_snapshot(
    nodes: Iterable[KubeObject],
    pods: Iterable[KubeObject],
    assumed: Mapping[str, str],
    namespaces: Mapping[str, Mapping[str, str]],
) -> Snapshot:
    """Build a snapshot.

    Args:
        nodes: Node objects.
        pods: Pod objects, assigned or not.
        assumed: Pod uid -> node, for pods just bound that `pods` may still show as unassigned.
        namespaces: Namespace -> labels.
    """
    views = {node["metadata"]["name"]: NodeView(node, Counter(allocatable(node))) for node in nodes}
    for pod in pods:
        name = pod["spec"].get("nodeName") or assumed.get(pod["metadata"]["uid"])
        if name in views and not has_ended(pod):
            views[name].add(pod)
    return Snapshot(views, namespaces)
