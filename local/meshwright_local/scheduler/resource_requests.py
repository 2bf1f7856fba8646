"""What a pod asks of a node (pure): its effective resource requests."""

from __future__ import annotations

from collections import Counter

from meshwright_local.kube.quantities import milli_value
from meshwright_local.kube.resources import Object

Amounts = Counter[str]
"""Resource name → thousandths of its unit."""


def pod_requests(pod: Object) -> Amounts:
    """The effective request: containers together, or the largest init container, plus overhead; and one pod.

    Containers that only state a limit request that much, as the API server's defaults would have it.
    """
    spec = pod["spec"]
    total: Amounts = Counter()
    for container in spec.get("containers") or ():
        total.update(_container(container))
    for container in spec.get("initContainers") or ():
        # Init containers run one after the other, before the others.
        total |= _container(container)
    total.update({name: milli_value(amount) for name, amount in (spec.get("overhead") or {}).items()})
    total["pods"] += 1000
    return total


def allocatable(node: Object) -> Amounts:
    """What a node has to give."""
    status = node.get("status") or {}
    amounts = status.get("allocatable") or status.get("capacity") or {}
    return Counter({name: milli_value(amount) for name, amount in amounts.items()})


def _container(container: Object) -> Amounts:
    resources = container.get("resources") or {}
    stated = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return Counter({name: milli_value(amount) for name, amount in stated.items()})
