"""When a pod must leave a tainted node (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright_local.kube.resources import Object
from meshwright_local.kube.selectors import toleration_covers

NOT_READY = "node.kubernetes.io/not-ready"
UNREACHABLE = "node.kubernetes.io/unreachable"


def seconds_to_stay(taints: Iterable[Object], tolerations: Sequence[Object], default: float) -> float | None:
    """How long a pod may stay on a node: None for ever, 0 not at all.

    Args:
        taints: The node's taints; only NoExecute ones evict.
        tolerations: The pod's. Among several that cover a taint the shortest time counts, as in Kubernetes.
        default: For taints of an unreachable or not ready node that the pod says nothing about: what Kubernetes'
            admission would add to every pod as tolerationSeconds.
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
