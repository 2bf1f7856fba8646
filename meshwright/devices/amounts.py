"""How many devices of each kind each node has for pods, as amounts of resources. Pure.

Devices that a pod's own request counts are not subtracted here, because placement subtracts what pods request: those of
extended resources, and those of worker pods, whose annotation repeats their claims.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from meshwright.devices.claims import AllocatedClaim, Wanted
from meshwright.devices.slices import DeviceId, NodeDevices

Amounts = dict[str, int]
"""Resource -> number of devices."""


def amounts_by_node(
    nodes: Mapping[str, NodeDevices],
    classes: Mapping[str, tuple[tuple[str, ...], str]],
    claims: Iterable[AllocatedClaim],
    requested: Collection[Wanted],
    counted_with_pod: Callable[[AllocatedClaim], bool],
) -> dict[str, Amounts]:
    """Node -> amounts of the resources that classes and requests stand for.

    Args:
        nodes: The devices of each node.
        classes: Device class -> its selectors, and the extended resource that it stands for, if any.
        claims: All claims that have devices.
        requested: Requests of jobs, besides those for any device of a class.
        counted_with_pod: Whether placement counts the devices of a claim as part of a pod's request.
    """
    allocated = list(claims)
    with_pods = [counted_with_pod(claim) for claim in allocated]
    found: dict[str, Amounts] = {name: {} for name in nodes}
    for wanted in sorted({*(Wanted(name) for name in classes), *requested}):
        if wanted.device_class not in classes:
            continue
        own, extended = classes[wanted.device_class]
        taken = frozenset(_taken(wanted, allocated, with_pods))
        for name, node in nodes.items():
            count = node.count((*own, *wanted.selectors), taken)
            names = [wanted.resource, *([extended] if extended and not wanted.selectors else ())]
            found[name].update(dict.fromkeys(names, count))
    return {name: {key: count for key, count in amounts.items() if count} for name, amounts in found.items()}


def _taken(wanted: Wanted, claims: Iterable[AllocatedClaim], with_pods: Iterable[bool]) -> Iterable[DeviceId]:
    """The devices that are not available for a request, and that no pod's request counts under the same name."""
    for claim, with_pod in zip(claims, with_pods, strict=True):
        if claim.extended:
            counted = not wanted.selectors and wanted.device_class in {one.device_class for one in claim.wanted}
        else:
            counted = with_pod and wanted in claim.wanted
        if not counted:
            yield from claim.devices


def with_amounts(allocatable: Mapping[str, Any], amounts: Mapping[str, int]) -> dict[str, Any]:
    """A node's resources with its devices. A resource that the node itself offers is not replaced.

    A device plugin that is gone leaves its resource behind with the value 0.
    """
    own = {key: value for key, value in allocatable.items() if str(value) != "0" or key not in amounts}
    return {**{key: str(count) for key, count in amounts.items()}, **own}
