"""The Node object and its heartbeat."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

from meshwright import __version__
from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright_local.kube import timestamps
from meshwright_local.kube.client import STRATEGIC_PATCH, ApiClient, ApiError
from meshwright_local.kube.resources import LEASE_NAMESPACE, LEASES, NAMESPACES, NODES, Resource

logger = logging.getLogger(__name__)

FILE_SYSTEM_ANNOTATION = f"{labels.GROUP}/pod-file-system"
"""On nodes: `mounted` if containers see their volumes at their mount paths, else `rewritten`."""

_LEASE_DURATION = 40
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
    taints: tuple[KubeObject, ...] = ()
    capacity: Mapping[str, str] = field(default_factory=lambda: {"cpu": "64", "memory": "256Gi", "pods": "110"})
    """Advertised resources. They are not measured, because several nodes share one machine."""
    address: str = "127.0.0.1"


class NodeRegistration:
    """Registers a node, renews its lease and updates its status."""

    def __init__(self, client: ApiClient, spec: NodeSpec, kubelet_port: int, file_system: str) -> None:
        self._client = client
        self._spec = spec
        self._port = kubelet_port
        self._file_system = file_system
        self._ready_since = timestamps.now()

    async def register(self) -> None:
        """Create or update the Node object and its lease."""
        spec = self._spec
        system = {"kubernetes.io/os": "linux", "kubernetes.io/arch": _architecture()}
        metadata: KubeObject = {
            "name": spec.name,
            "labels": {"kubernetes.io/hostname": spec.name, **system, **spec.labels},
            "annotations": {FILE_SYSTEM_ANNOTATION: self._file_system},
        }
        if await self._client.find(NODES, spec.name) is None:
            taints = {"taints": list(spec.taints)} if spec.taints else {}
            await self._client.create(NODES, {"metadata": metadata, "spec": taints})
        else:
            await self._client.patch(NODES, spec.name, {"metadata": metadata})
        await self._post_status()
        await self._renew()

    async def run(self, renew_seconds: float) -> None:
        """Renew the lease every few seconds until cancelled. Repair the node if it was tainted, changed or deleted."""
        while True:
            try:
                await self._renew()
                node = await self._client.find(NODES, self._spec.name) or {}
                conditions = (node.get("status") or {}).get("conditions") or ()
                if not any(item["type"] == "Ready" and item["status"] == "True" for item in conditions):
                    self._ready_since = timestamps.now()
                    await self.register()
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
                logger.debug("heartbeat of %s: %r", self._spec.name, error)
            await asyncio.sleep(renew_seconds)

    async def _renew(self) -> None:
        name, moment = self._spec.name, timestamps.now_micro()
        spec = {"holderIdentity": name, "leaseDurationSeconds": _LEASE_DURATION, "renewTime": moment}
        try:
            await self._client.patch(LEASES, name, {"spec": spec}, LEASE_NAMESPACE)
        except ApiError as error:
            if error.status != 404:
                raise
            # The control plane creates the namespace, perhaps a little later.
            await self._create(NAMESPACES, {"metadata": {"name": LEASE_NAMESPACE}})
            await self._create(LEASES, {"metadata": {"name": name, "namespace": LEASE_NAMESPACE}, "spec": spec})

    async def _create(self, resource: Resource, body: KubeObject) -> None:
        try:
            await self._client.create(resource, body)
        except ApiError as error:
            # Another node created it first.
            if error.status != 409:
                raise

    async def _post_status(self) -> None:
        moment, spec = timestamps.now(), self._spec
        since = {"lastHeartbeatTime": moment, "lastTransitionTime": self._ready_since}
        conditions = [dict(zip(("type", "status", "reason", "message"), item, strict=True)) for item in _HEALTHY]
        status = {
            "capacity": dict(spec.capacity),
            "allocatable": dict(spec.capacity),
            "conditions": [{**item, **since} for item in conditions],
            "addresses": [
                {"type": "InternalIP", "address": spec.address},
                {"type": "Hostname", "address": spec.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            # Since 1.36 a kube-apiserver forwards exec as a WebSocket to nodes with this feature, to others as SPDY;
            # and a kube-scheduler assigns pods with rules that restart all containers only to nodes with the other.
            "declaredFeatures": ["ExtendWebSocketsToKubelet", "RestartAllContainersOnContainerExits"],
            "nodeInfo": {
                **dict.fromkeys(("machineID", "systemUUID", "bootID", "kubeProxyVersion"), ""),
                "kernelVersion": os.uname().release,
                "osImage": platform.platform(terse=True),
                "containerRuntimeVersion": f"process://{__version__}",
                "kubeletVersion": f"v{__version__}-meshwright",
                "operatingSystem": "linux",
                "architecture": _architecture(),
            },
        }
        body = {"status": status}
        await self._client.patch(NODES, spec.name, body, subresource="status", content_type=STRATEGIC_PATCH)


def _architecture() -> str:
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
