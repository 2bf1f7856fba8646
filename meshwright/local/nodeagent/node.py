"""The Node object and its heartbeat."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from meshwright import __version__
from meshwright.local import clock
from meshwright.local.client import STRATEGIC_PATCH, ApiClient, ApiError
from meshwright.local.resources import LEASE_NAMESPACE, LEASES, NAMESPACES, NODES, Object

logger = logging.getLogger(__name__)

_LEASE_DURATION = 40
_STATUS_SECONDS = 300.0
_RETRY_SECONDS = 0.5

_HEALTHY = (
    ("MemoryPressure", "False", "KubeletHasSufficientMemory", "no memory pressure"),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure", "no disk pressure"),
    ("PIDPressure", "False", "KubeletHasSufficientPID", "no shortage of process ids"),
    ("Ready", "True", "KubeletReady", "node agent is posting ready status"),
)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One simulated node."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Object, ...] = ()
    capacity: Mapping[str, str] = field(default_factory=lambda: {"cpu": "64", "memory": "256Gi", "pods": "110"})
    """What it claims to have; not measured, because several nodes share one machine."""
    address: str = "127.0.0.1"


class NodeRegistration:
    """Registers a node, keeps its lease fresh and its status current."""

    def __init__(self, client: ApiClient, spec: NodeSpec, kubelet_port: int, renew_seconds: float) -> None:
        self._client = client
        self._spec = spec
        self._port = kubelet_port
        self._renew_seconds = renew_seconds
        self._ready_since = clock.now()

    async def register(self) -> None:
        """Create or update the Node object and its lease."""
        spec = self._spec
        labels = {
            "kubernetes.io/hostname": spec.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": _architecture(),
            **spec.labels,
        }
        if await self._client.find(NODES, spec.name) is None:
            body = {
                "metadata": {"name": spec.name, "labels": labels},
                "spec": {"taints": list(spec.taints)} if spec.taints else {},
            }
            await self._client.create(NODES, body)
        else:
            await self._client.patch(NODES, spec.name, {"metadata": {"labels": labels}})
        await self._post_status()
        await self._renew()

    async def run(self) -> None:
        """Renew the lease every few seconds, the status every few minutes, until cancelled."""
        posted = time.monotonic()
        while True:
            await asyncio.sleep(self._renew_seconds)
            try:
                await self._renew()
                if time.monotonic() - posted >= _STATUS_SECONDS or await self._doubted():
                    await self._post_status()
                    posted = time.monotonic()
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
                logger.debug("heartbeat of %s: %r", self._spec.name, error)

    async def _doubted(self) -> bool:
        """Whether somebody else says that the node is not ready, or it was deleted."""
        node = await self._client.find(NODES, self._spec.name)
        if node is None:
            await self.register()
            return False
        conditions = (node.get("status") or {}).get("conditions") or ()
        doubted = not any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
        if doubted:
            self._ready_since = clock.now()
        return doubted

    async def _renew(self) -> None:
        name, moment = self._spec.name, clock.now_micro()
        spec = {"holderIdentity": name, "leaseDurationSeconds": _LEASE_DURATION, "renewTime": moment}
        try:
            await self._client.patch(LEASES, name, {"spec": spec}, LEASE_NAMESPACE)
        except ApiError as error:
            if error.status != 404:
                raise
            await self._create_lease({"metadata": {"name": name, "namespace": LEASE_NAMESPACE}, "spec": spec})

    async def _create_lease(self, body: Object) -> None:
        try:
            await self._client.create(LEASES, body)
        except ApiError as error:
            if error.status != 404:
                raise
            # The control plane makes the namespace, and may be a moment behind. So may another node.
            try:
                await self._client.create(NAMESPACES, {"metadata": {"name": LEASE_NAMESPACE}})
            except ApiError as conflict:
                if conflict.status != 409:
                    raise
            await self._client.create(LEASES, body)

    async def _post_status(self) -> None:
        moment, spec = clock.now(), self._spec
        conditions = [
            {
                "type": kind,
                "status": value,
                "reason": reason,
                "message": message,
                "lastHeartbeatTime": moment,
                "lastTransitionTime": self._ready_since,
            }
            for kind, value, reason, message in _HEALTHY
        ]
        status = {
            "capacity": dict(spec.capacity),
            "allocatable": dict(spec.capacity),
            "conditions": conditions,
            "addresses": [
                {"type": "InternalIP", "address": spec.address},
                {"type": "Hostname", "address": spec.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            # From 1.36 on a kube-apiserver passes exec on as a WebSocket to nodes that say this, to others as SPDY.
            "declaredFeatures": ["ExtendWebSocketsToKubelet"],
            "nodeInfo": _node_info(),
        }
        body = {"status": status}
        await self._client.patch(NODES, spec.name, body, subresource="status", content_type=STRATEGIC_PATCH)


def _architecture() -> str:
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def _node_info() -> Object:
    machine_id = _first_line(Path("/etc/machine-id"))
    return {
        "machineID": machine_id,
        "systemUUID": machine_id,
        "bootID": _first_line(Path("/proc/sys/kernel/random/boot_id")),
        "kernelVersion": os.uname().release,
        "osImage": platform.platform(terse=True),
        "containerRuntimeVersion": f"process://{__version__}",
        "kubeletVersion": f"v{__version__}-meshwright",
        "kubeProxyVersion": "",
        "operatingSystem": "linux",
        "architecture": _architecture(),
    }


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
