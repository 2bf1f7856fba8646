"""What claims request, as amounts of named resources that placement counts, and which devices they have.

Devices of a class are a resource with the name that Kubernetes gives them in KEP-5004. A request with selectors of its
own is another resource, with a hash of the selectors in its name.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.devices.selectors import selectors_of
from meshwright.devices.slices import MALFORMED, DeviceId

CLASS_PREFIX = "deviceclass.resource.kubernetes.io/"
CHANNEL_CLASS = "compute-domain-default-channel.nvidia.com"
"""The class of the channel with which NVIDIA's driver joins hosts to one NVLink domain: each node has one."""
EXTENDED_CLAIM = "resource.kubernetes.io/extended-resource-claim"
"""Annotation of a claim that the scheduler made for a pod that requests an extended resource."""


@dataclass(frozen=True, slots=True, order=True)
class Wanted:
    """Devices of a class that all selectors select."""

    device_class: str
    selectors: tuple[str, ...] = ()

    @property
    def resource(self) -> str:
        """Its name as a resource of nodes."""
        if not self.selectors:
            return f"{CLASS_PREFIX}{self.device_class}"
        digest = hashlib.sha256("\0".join(self.selectors).encode()).hexdigest()[:8]
        return f"{CLASS_PREFIX}{self.device_class}.{digest}"


def wanted_by(spec: Mapping[str, Any]) -> Counter[Wanted]:
    """How many devices a claim with this spec requests. Of a list of alternatives, the first one counts.

    Raises:
        ValueError: The spec is malformed, or has requests of an unknown kind. So do the other errors of `MALFORMED`.
    """
    found: Counter[Wanted] = Counter()
    for request in (spec.get("devices") or {}).get("requests") or ():
        exact = request.get("exactly") or next(iter(request.get("firstAvailable") or ()), None)
        if exact is None:
            raise ValueError(f"request {request.get('name')} has neither `exactly` nor `firstAvailable`")
        # With `allocationMode: All`, a node needs at least one.
        count = int(exact.get("count") or 1)
        found[Wanted(str(exact["deviceClassName"]), selectors_of(exact))] += count
    return found


@dataclass(frozen=True, slots=True)
class AllocatedClaim:
    """A claim that has devices."""

    devices: frozenset[DeviceId]
    wanted: frozenset[Wanted]
    """What was requested. Empty if it cannot be read: the devices are taken all the same."""
    extended: bool
    """Whether it belongs to an extended resource, which its pod requests too."""
    pod: tuple[str, str, str] | None
    """Namespace, name and uid of the pod for which it was made from a template."""


def read_claim(obj: Mapping[str, Any]) -> AllocatedClaim | None:
    """A ResourceClaim with devices. None if it has none, or they cannot be read."""
    try:
        devices = frozenset(_allocated(obj))
        if not devices:
            return None
        metadata = obj["metadata"]
        extended = (metadata.get("annotations") or {}).get(EXTENDED_CLAIM) == "true"
        owner = next((one for one in metadata.get("ownerReferences") or () if one.get("kind") == "Pod"), None)
        pod = (str(metadata.get("namespace", "")), str(owner["name"]), str(owner["uid"])) if owner else None
    except MALFORMED:
        return None
    try:
        wanted = frozenset(wanted_by(obj["spec"]))
    except MALFORMED:
        wanted = frozenset[Wanted]()
    return AllocatedClaim(devices, wanted, extended, pod)


def _allocated(obj: Mapping[str, Any]) -> Iterator[DeviceId]:
    allocation = (obj.get("status") or {}).get("allocation") or {}
    for result in (allocation.get("devices") or {}).get("results") or ():
        if not result.get("adminAccess"):
            yield str(result["driver"]), str(result["pool"]), str(result["device"])
