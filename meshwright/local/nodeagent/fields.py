"""The downward API: a pod's own fields and resources as text (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.local.quantities import thousandths
from meshwright.local.resources import Object

_ENTRY = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_CPU_DEFAULT_DIVISOR = "1"


class FieldError(Exception):
    """A fieldPath or resource that a pod has not; the message names it."""


@dataclass(frozen=True, slots=True)
class PodPlace:
    """Where a pod runs: its own address and its node's."""

    node: str
    pod_ip: str
    host_ip: str
    allocatable: Mapping[str, str]


def field(pod: Object, path: str, place: PodPlace) -> str:
    """The value of a `fieldRef`.

    Raises:
        FieldError: Not a field that the downward API offers.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    if entry := _ENTRY.fullmatch(path):
        return str((metadata.get(entry[1]) or {}).get(entry[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        return _listing(metadata.get(path.removeprefix("metadata.")) or {})
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": place.node,
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.hostIP": place.host_ip,
        "status.hostIPs": place.host_ip,
        "status.podIP": place.pod_ip,
        "status.podIPs": place.pod_ip,
    }
    if path not in values:
        raise FieldError(f"fieldPath {path!r} is not supported: use one of {', '.join(sorted(values))}")
    return str(values[path])


def resource_field(pod: Object, reference: Object, container: str, place: PodPlace) -> str:
    """The value of a `resourceFieldRef`; a limit that is not set is what the node could give.

    Raises:
        FieldError: Not a resource of the container.
    """
    name = reference.get("containerName") or container
    found = next((item for item in pod["spec"]["containers"] if item["name"] == name), None)
    section, _, resource = reference["resource"].partition(".")
    if found is None or section not in ("limits", "requests") or not resource:
        raise FieldError(f"resource {reference['resource']!r} of container {name!r} is not limits.X or requests.X")
    stated = found.get("resources") or {}
    amount = (stated.get(section) or {}).get(resource)
    if amount is None and section == "limits":
        amount = place.allocatable.get(resource)
    divisor = thousandths(reference.get("divisor") or 0) or thousandths(_CPU_DEFAULT_DIVISOR)
    return str(-(-thousandths(amount or 0) // divisor))


def _listing(entries: Mapping[str, str]) -> str:
    escaped = {
        key: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for key, value in entries.items()
    }
    return "\n".join(f'{key}="{value}"' for key, value in sorted(escaped.items()))
