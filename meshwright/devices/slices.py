"""The devices of each node, read from ResourceSlices, and how many of them a request can get.

Only devices of one node count: those of a pool that several nodes share may be given to another node. Devices that
share counters (partitions of a GPU) count as long as the counters suffice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from meshwright.api.objects import KubeObject
from meshwright.devices.selectors import selects, variables_of
from meshwright.planner.cluster.quantities import parse_quantity

DeviceId = tuple[str, str, str]
"""Driver, pool and name."""
MALFORMED = (AttributeError, KeyError, TypeError, ValueError, OverflowError, StopIteration)


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a node."""

    id: DeviceId
    variables: KubeObject
    """What its selectors read."""
    consumes: tuple[tuple[str, str, Fraction], ...] = ()
    """Counter set, counter and amount that it takes of what the devices of its pool share."""
    usable: bool = True
    """Whether it has no taint that keeps pods away."""
    matches: dict[tuple[str, ...], bool] = field(default_factory=dict, compare=False, repr=False)
    """What selectors said about it."""

    def matched_by(self, expressions: tuple[str, ...]) -> bool:
        """Whether all selectors select it."""
        known = self.matches.get(expressions)
        if known is None:
            known = self.matches[expressions] = selects(expressions, self.variables)
        return known


@dataclass(slots=True)
class NodeDevices:
    """The devices of one node."""

    devices: list[Device] = field(default_factory=list)
    counters: dict[tuple[str, str, str, str], Fraction] = field(default_factory=dict)
    """Driver, pool, counter set and counter -> what its devices share."""

    def count(self, expressions: tuple[str, ...], allocated: Set[DeviceId]) -> int:
        """How many devices that all selectors select can be used beside the allocated ones."""
        left = dict(self.counters)
        for device in self.devices:
            if device.id in allocated:
                self._take(device, left)
        return sum(
            self._fits(device, left) and self._take(device, left)
            for device in self.devices
            if device.id not in allocated and device.usable and device.matched_by(expressions)
        )

    @staticmethod
    def _fits(device: Device, left: Mapping[tuple[str, str, str, str], Fraction]) -> bool:
        driver, pool, _ = device.id
        return all(left.get((driver, pool, which, name), 0) >= amount for which, name, amount in device.consumes)

    @staticmethod
    def _take(device: Device, left: dict[tuple[str, str, str, str], Fraction]) -> bool:
        driver, pool, _ = device.id
        for which, name, amount in device.consumes:
            key = driver, pool, which, name
            left[key] = left.get(key, Fraction(0)) - amount
        return True


def devices_by_node(slices: Iterable[Mapping[str, Any]]) -> dict[str, NodeDevices]:
    """Node -> its devices. Pools that are not published completely yet, and malformed slices, are left out."""
    pools: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for one in slices:
        try:
            spec = one["spec"]
            pools[str(spec["driver"]), str(spec["pool"]["name"])].append(spec)
        except MALFORMED:
            continue
    found: defaultdict[str, NodeDevices] = defaultdict(NodeDevices)
    for (driver, pool), specs in pools.items():
        try:
            newest = max(int(spec["pool"].get("generation", 0)) for spec in specs)
            current = [spec for spec in specs if int(spec["pool"].get("generation", 0)) == newest]
            if len(current) == int(current[0]["pool"].get("resourceSliceCount", 1)):
                for spec in current:
                    _read(spec, driver, pool, found)
        except MALFORMED:
            continue
    return dict(found)


def _read(spec: Mapping[str, Any], driver: str, pool: str, found: Mapping[str, NodeDevices]) -> None:
    node = spec.get("nodeName")
    if not isinstance(node, str) or not node:
        return
    counters = {
        (driver, pool, shared["name"], name): Fraction(parse_quantity(value["value"]))
        for shared in spec.get("sharedCounters") or ()
        for name, value in (shared.get("counters") or {}).items()
    }
    devices = [_device(device, driver, pool) for device in spec.get("devices") or ()]
    found[node].counters.update(counters)
    found[node].devices.extend(devices)


def _device(device: Mapping[str, Any], driver: str, pool: str) -> Device:
    consumes = tuple(
        (str(part["counterSet"]), str(name), Fraction(parse_quantity(value["value"])))
        for part in device.get("consumesCounters") or ()
        for name, value in (part.get("counters") or {}).items()
    )
    variables = variables_of(driver, device.get("attributes") or {}, device.get("capacity") or {})
    usable = all(taint.get("effect") not in ("NoSchedule", "NoExecute") for taint in device.get("taints") or ())
    return Device((driver, pool, str(device["name"])), variables, consumes, usable)
