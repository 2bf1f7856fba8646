"""A pod's effective resource requests and a node's allocatable resources (pure)."""

from __future__ import annotations

from collections import Counter

from meshwright.api.objects import KubeObject, is_sidecar
from meshwright_local.kube.quantities import milli_value

Amounts = Counter[str]
"""Resource name -> thousandths of its unit."""


def pod_requests(pod: KubeObject) -> Amounts:
    """Return the effective request: the sum of all containers or the largest init container, plus overhead and one pod.

    Sidecars count with the containers, and with the init containers after them. A container with only a limit requests
    the same amount, as the API server defaults it.
    """
    spec = pod["spec"]
    total: Amounts = Counter()
    for container in spec.get("containers") or ():
        total.update(_container(container))
    peak: Amounts = Counter()
    sidecars: Amounts = Counter()
    for container in spec.get("initContainers") or ():
        if is_sidecar(container):
            sidecars.update(_container(container))
        else:
            # Init containers run one after the other, before all other containers.
            peak |= _container(container) + sidecars
    total.update(sidecars)
    total |= peak
    total.update({name: milli_value(amount) for name, amount in (spec.get("overhead") or {}).items()})
    total["pods"] += 1000
    return total


def allocatable(node: KubeObject) -> Amounts:
    """Return a node's allocatable resources."""
    status = node.get("status") or {}
    amounts = status.get("allocatable") or status.get("capacity") or {}
    return Counter({name: milli_value(amount) for name, amount in amounts.items()})


def _container(container: KubeObject) -> Amounts:
    resources = container.get("resources") or {}
    stated = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return Counter({name: milli_value(amount) for name, amount in stated.items()})
