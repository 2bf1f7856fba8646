"""Topology spread constraints that must hold (pure)."""

from __future__ import annotations

from collections import Counter

from meshwright.local.resources import Object
from meshwright.local.scheduler.snapshot import NodeView, Snapshot
from meshwright.local.selectors import labels_match, node_matches


def reasons_against(pod: Object, view: NodeView, snapshot: Snapshot) -> list[str]:
    """Every `DoNotSchedule` constraint: one more pod here must not raise the skew above `maxSkew`."""
    for constraint in pod["spec"].get("topologySpreadConstraints") or ():
        if constraint.get("whenUnsatisfiable") != "DoNotSchedule":
            continue
        key = constraint["topologyKey"]
        if key not in view.labels:
            return ["node(s) didn't match pod topology spread constraints (missing required label)"]
        counts = _counts(pod, constraint, snapshot)
        lowest = min(counts.values(), default=0)
        if len(counts) < (constraint.get("minDomains") or 1):
            lowest = 0
        selector = constraint.get("labelSelector")
        own = labels_match(selector, pod["metadata"].get("labels") or {})
        if counts[view.labels[key]] + own - lowest > constraint["maxSkew"]:
            return ["node(s) didn't match pod topology spread constraints"]
    return []


def _counts(pod: Object, constraint: Object, snapshot: Snapshot) -> Counter[str]:
    """Matching pods per domain, over the nodes that the pod's own node affinity allows."""
    counts: Counter[str] = Counter()
    space = pod["metadata"].get("namespace")
    for view in snapshot.nodes.values():
        domain = view.labels.get(constraint["topologyKey"])
        if domain is None or not node_matches(pod["spec"], view.node):
            continue
        counts[domain] += sum(
            other["metadata"].get("namespace") == space
            and not other["metadata"].get("deletionTimestamp")
            and labels_match(constraint.get("labelSelector"), other["metadata"].get("labels") or {})
            for other in view.pods
        )
    return counts
