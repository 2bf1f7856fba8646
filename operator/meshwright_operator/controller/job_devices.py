"""What the pods of a job claim through Dynamic Resource Allocation: reads the claims and templates that a job names."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.devices.claims import CHANNEL_CLASS, Wanted
from meshwright.devices.job_claims import CLAIMS, KINDS, named_claims, wanted_of, with_claims
from meshwright.devices.slices import MALFORMED
from meshwright_operator.decide.missing_claims import UNALLOCATED, MissingClaim
from meshwright_operator.devices.inventory import DeviceInventory
from meshwright_operator.devices.node_selector import selected
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import COMPUTE_DOMAINS, claims_path

FRESH_SECONDS = 30.0
"""For how long an object that was read is not read again."""
MAX_KNOWN = 4096

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Read:
    """What the API server said about an object."""

    at: float
    exists: bool
    wanted: Counter[Wanted] = field(default_factory=Counter)
    nodes: Mapping[str, object] | None = None
    """Of a claim that has devices: the node selector of the nodes that can use them, empty for all nodes."""

    @property
    def allocated(self) -> bool:
        """Whether it is a claim that has devices."""
        return self.nodes is not None


class JobDevices:
    """The claims of jobs. Without the right to read them, they are neither checked nor counted."""

    def __init__(
        self, client: KubeClient, inventory: DeviceInventory, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._inventory = inventory
        self._now = now
        self._known: dict[tuple[str, str, str], _Read] = {}
        self._domains: tuple[float, bool] = (-FRESH_SECONDS, False)

    async def prepare(self, namespace: str, spec: ParallelTrainingJobSpec) -> None:
        """Read the claims and templates that the job names, before it is observed."""
        for _, resource, name in named_claims(spec):
            known = self._known.get((namespace, resource, name))
            if known is None or not known.exists or self._now() - known.at >= FRESH_SECONDS:
                await self._read(namespace, resource, name)

    def requests(self, namespace: str, spec: ParallelTrainingJobSpec) -> dict[str, int]:
        """What each pod claims, by resource: what placement counts. Empty if the cluster's devices are unknown."""
        if not self._inventory.available:
            return {}
        found: Counter[Wanted] = Counter()
        for _, resource, name in named_claims(spec):
            known = self._known.get((namespace, resource, name))
            # An allocated claim has its devices already, and takes no others.
            if known is not None and not known.allocated:
                found += known.wanted
        if spec.joins_hosts and self._inventory.known(CHANNEL_CLASS):
            found[Wanted(CHANNEL_CLASS)] += 1
        for wanted in found:
            self._inventory.count(wanted)
        return {wanted.resource: count for wanted, count in sorted(found.items())}

    def joined(self, namespace: str, spec: ParallelTrainingJobSpec) -> ParallelTrainingJobSpec:
        """The spec that knows what its claims join, as far as they have been read."""
        if not spec.workers.resource_claims:
            return spec

        def wanted(resource: str, name: str) -> Counter[Wanted] | None:
            known = self._known.get((namespace, resource, name))
            return known.wanted if known is not None else None

        return with_claims(spec, wanted)

    def unreachable(
        self, namespace: str, spec: ParallelTrainingJobSpec, nodes: Mapping[str, KubeObject]
    ) -> dict[str, str]:
        """Node -> why it cannot use the devices of a claim that the job's pods share."""
        found: dict[str, str] = {}
        for _, resource, name in named_claims(spec):
            known = self._known.get((namespace, resource, name))
            if known is None or not known.nodes:
                continue
            for node, obj in nodes.items():
                if not selected(obj, known.nodes):
                    found[node] = f"it cannot use the devices of ResourceClaim {name}"
        return found

    async def missing(self, namespace: str, spec: ParallelTrainingJobSpec, workers: int) -> list[MissingClaim]:
        """What the job's pods would wait for: claims and templates that do not exist, and the kind ComputeDomain.

        A claim without devices that several pods share counts as missing: it would get those of the first pod's node.
        """
        absent = []
        for path, resource, name in named_claims(spec):
            # As it was when the job was observed: a request for nodes counts what was known then.
            known = self._known.get((namespace, resource, name))
            if known is None or not known.exists:
                absent.append(MissingClaim(path, name, kind=KINDS[resource]))
            elif resource == CLAIMS and workers > 1 and known.wanted and not known.allocated:
                absent.append(MissingClaim(path, name, kind=UNALLOCATED))
        if spec.joins_hosts and not await self._has_compute_domains():
            absent.append(MissingClaim("topology.multiNodeNVLink", "computedomains.resource.nvidia.com", kind=""))
        return absent

    async def _read(self, namespace: str, resource: str, name: str) -> _Read:
        try:
            obj = await self._client.get(claims_path(namespace, resource, name))
            allocation = (obj.get("status") or {}).get("allocation")
            nodes = (allocation.get("nodeSelector") or {}) if isinstance(allocation, dict) else None
            found = _Read(self._now(), True, _wanted(obj, resource), nodes)
        except ApiError as error:
            if error.code not in (403, 404):
                raise
            # 403 is the role of an earlier version.
            found = _Read(self._now(), error.code == 403)  # noqa: PLR2004
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[namespace, resource, name] = found
        return found

    async def _has_compute_domains(self) -> bool:
        """Whether the cluster has NVIDIA's ComputeDomains. Everybody may ask."""
        at, exists = self._domains
        if not exists or self._now() - at >= FRESH_SECONDS:
            try:
                await self._client.get(COMPUTE_DOMAINS)
                exists = True
            except ApiError as error:
                if error.code not in (403, 404):
                    raise
                exists = error.code == 403  # noqa: PLR2004 - it cannot be known: try
            self._domains = self._now(), exists
        return exists


def _wanted(obj: KubeObject, resource: str) -> Counter[Wanted]:
    try:
        return wanted_of(obj, resource)
    except MALFORMED as error:
        log.warning("devices of a claim are not counted", extra={"claim": obj["metadata"]["name"], "error": str(error)})
        return Counter()
