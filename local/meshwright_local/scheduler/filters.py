"""Whether a pod fits a node, and why not (pure).

Filters run in kube-scheduler's order and return its messages; for taints those of releases before 1.35, which name the
taint. Supported: bound volume claims, cordoned nodes, taints, node selector and affinity, resources, pod affinity and
anti-affinity. Not supported: topology spread, host ports, volume topology and dynamic resource claims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from meshwright.api.objects import KubeObject
from meshwright_local.kube.selectors import labels_match, node_matches, pinned_to, tolerates
from meshwright_local.scheduler.resource_requests import pod_requests
from meshwright_local.scheduler.snapshot import NodeView, Snapshot

_CORDONED = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


def filter_reasons(pod: KubeObject, view: NodeView, snapshot: Snapshot) -> list[str]:
    """Return why a pod cannot run on a node, from the first filter that rejects it; empty if it can."""
    return next((reasons for check in _FILTERS if (reasons := check(pod, view, snapshot))), [])


def claim_reason(pod: KubeObject, claims: Mapping[tuple[str, str], KubeObject]) -> str:
    """Return why no node can have the pod's volumes yet; empty if its claims are bound."""
    space = pod["metadata"].get("namespace") or ""
    for volume in pod["spec"].get("volumes") or ():
        name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        claim = claims.get((space, name)) if name else None
        if name and claim is None:
            return f'persistentvolumeclaim "{name}" not found'
        if claim is not None and claim["metadata"].get("deletionTimestamp"):
            return f'persistentvolumeclaim "{name}" is being deleted'
        if claim is not None and (claim.get("status") or {}).get("phase") != "Bound":
            return "pod has unbound immediate PersistentVolumeClaims"
    return ""


def unschedulable_message(reasons: dict[str, list[str]], claim: str = "") -> str:
    """Return kube-scheduler's message for a pod that fits no node, from every node's reasons or that of a claim."""
    if not reasons:
        return "no nodes available to schedule pods"
    if claim:
        return f"0/{len(reasons)} nodes are available: {claim}."
    counts = Counter(reason for node in reasons.values() for reason in node)
    parts = ", ".join(sorted(f"{count} {reason}" for reason, count in counts.items()))
    return f"0/{len(reasons)} nodes are available: {parts}."


def _pinned_elsewhere(pod: KubeObject, view: NodeView, _: Snapshot) -> list[str]:
    names = pinned_to(pod["spec"])
    return [] if names is None or view.name in names else ["node(s) didn't satisfy plugin(s) [NodeAffinity]"]


def _cordon(pod: KubeObject, view: NodeView, _: Snapshot) -> list[str]:
    cordoned = (view.node.get("spec") or {}).get("unschedulable")
    if cordoned and not tolerates(pod["spec"].get("tolerations") or (), _CORDONED):
        return ["node(s) were unschedulable"]
    return []


def _taints(pod: KubeObject, view: NodeView, _: Snapshot) -> list[str]:
    tolerations = pod["spec"].get("tolerations") or ()
    for taint in (view.node.get("spec") or {}).get("taints") or ():
        if taint["effect"] in ("NoSchedule", "NoExecute") and not tolerates(tolerations, taint):
            return [f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value') or ''}}}"]
    return []


def _node_affinity(pod: KubeObject, view: NodeView, _: Snapshot) -> list[str]:
    return [] if node_matches(pod["spec"], view.node) else ["node(s) didn't match Pod's node affinity/selector"]


def _resources(pod: KubeObject, view: NodeView, _: Snapshot) -> list[str]:
    short = [name for name, amount in pod_requests(pod).items() if amount and amount > view.free[name]]
    return ["Too many pods" if name == "pods" else f"Insufficient {name}" for name in short]


def _pod_affinity(pod: KubeObject, view: NodeView, snapshot: Snapshot) -> list[str]:
    """Check the pod's own terms, then those of the pods on nodes."""
    for term in _required(pod, "podAffinity"):
        near = any(_selects(term, pod, other, snapshot) for other in _in_domain(term, view, snapshot))
        # The first pod of a group with affinity to itself has no other pod to join yet.
        alone = not any(_selects(term, pod, other, snapshot) for other, _ in snapshot.pods())
        if term["topologyKey"] not in view.labels or not (near or (alone and _selects(term, pod, pod, snapshot))):
            return ["node(s) didn't match pod affinity rules"]
    for term in _required(pod, "podAntiAffinity"):
        if any(_selects(term, pod, other, snapshot) for other in _in_domain(term, view, snapshot)):
            return ["node(s) didn't match pod anti-affinity rules"]
    for other, place in snapshot.pods():
        for term in _required(other, "podAntiAffinity"):
            if _same_domain(term, view, place) and _selects(term, other, pod, snapshot):
                return ["node(s) didn't satisfy existing pods anti-affinity rules"]
    return []


def _required(pod: KubeObject, kind: str) -> list[KubeObject]:
    affinity = (pod["spec"].get("affinity") or {}).get(kind) or {}
    return affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or []


def _in_domain(term: KubeObject, view: NodeView, snapshot: Snapshot) -> Iterable[KubeObject]:
    return (other for other, place in snapshot.pods() if _same_domain(term, view, place))


def _same_domain(term: KubeObject, one: NodeView, other: NodeView) -> bool:
    key = term["topologyKey"]
    return key in one.labels and one.labels[key] == other.labels.get(key)


def _selects(term: KubeObject, owner: KubeObject, other: KubeObject, snapshot: Snapshot) -> bool:
    """Return whether a term of `owner` selects `other`, by namespace and labels."""
    space = other["metadata"].get("namespace") or ""
    named, selector = term.get("namespaces") or [], term.get("namespaceSelector")
    if named or selector is not None:
        inside = space in named or labels_match(selector, snapshot.namespaces.get(space) or {})
    else:
        inside = space == owner["metadata"].get("namespace")
    return inside and labels_match(term.get("labelSelector"), other["metadata"].get("labels") or {})


_FILTERS: tuple[Callable[[KubeObject, NodeView, Snapshot], list[str]], ...] = (
    _pinned_elsewhere,
    _cordon,
    _taints,
    _node_affinity,
    _resources,
    _pod_affinity,
)
