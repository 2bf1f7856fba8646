"""Required affinity and anti-affinity between pods (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.local.resources import Object
from meshwright.local.scheduler.snapshot import NodeView, Snapshot
from meshwright.local.selectors import labels_match


def reasons_against(pod: Object, view: NodeView, snapshot: Snapshot) -> list[str]:
    """The pod's own terms, then those of the pods that are already there."""
    for term in required_terms(pod, "podAffinity"):
        if not _affinity_holds(pod, term, view, snapshot):
            return ["node(s) didn't match pod affinity rules"]
    for term in required_terms(pod, "podAntiAffinity"):
        if any(_selects(term, pod, other, snapshot) for other in _in_domain(term, view, snapshot)):
            return ["node(s) didn't match pod anti-affinity rules"]
    for other, place in snapshot.pods():
        for term in required_terms(other, "podAntiAffinity"):
            if _same_domain(term, view, place) and _selects(term, other, pod, snapshot):
                return ["node(s) didn't satisfy existing pods anti-affinity rules"]
    return []


def required_terms(pod: Object, kind: str) -> list[Object]:
    """The terms that must hold at scheduling time."""
    affinity = (pod["spec"].get("affinity") or {}).get(kind) or {}
    return list(affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or ())


def _affinity_holds(pod: Object, term: Object, view: NodeView, snapshot: Snapshot) -> bool:
    if term["topologyKey"] not in view.labels:
        return False
    if any(_selects(term, pod, other, snapshot) for other in _in_domain(term, view, snapshot)):
        return True
    # The first pod of a group that wants to be together has nobody to join yet.
    nobody = not any(_selects(term, pod, other, snapshot) for other, _ in snapshot.pods())
    return nobody and _selects(term, pod, pod, snapshot)


def _in_domain(term: Object, view: NodeView, snapshot: Snapshot) -> Iterable[Object]:
    return (other for other, place in snapshot.pods() if _same_domain(term, view, place))


def _same_domain(term: Object, one: NodeView, other: NodeView) -> bool:
    key = term["topologyKey"]
    return key in one.labels and one.labels[key] == other.labels.get(key)


def _selects(term: Object, owner: Object, other: Object, snapshot: Snapshot) -> bool:
    """Whether a term of `owner` speaks of `other`: its namespace and its labels."""
    space = other["metadata"].get("namespace") or ""
    named, selector = term.get("namespaces") or [], term.get("namespaceSelector")
    if named or selector is not None:
        inside = space in named or labels_match(selector, snapshot.namespaces.get(space) or {})
    else:
        inside = space == owner["metadata"].get("namespace")
    return inside and labels_match(term.get("labelSelector"), other["metadata"].get("labels") or {})
