"""A whole cluster in one process and event loop: control plane, scheduler, controllers and simulated nodes."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from meshwright.api import labels
from meshwright.local.client import ApiClient
from meshwright.local.connection import Connection, write_kubeconfig
from meshwright.local.controllers.claims import ClaimController
from meshwright.local.controllers.garbage import GarbageCollector
from meshwright.local.controllers.namespaces import NamespaceController
from meshwright.local.controllers.nodes import NodeController, NodeTimes
from meshwright.local.informers import Informers
from meshwright.local.nodeagent.addresses import ClusterNetwork
from meshwright.local.nodeagent.agent import AgentSettings, NodeAgent
from meshwright.local.nodeagent.node import NodeSpec
from meshwright.local.providers.base import ControlPlane, Provider
from meshwright.local.providers.embedded import EmbeddedProvider
from meshwright.local.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

LEAF_LABEL = "network.topology.nvidia.com/leaf"
ACCELERATOR_LABEL = "network.topology.nvidia.com/accelerator"
ZONE_LABEL = "topology.kubernetes.io/zone"


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """How many simulated nodes there are, what they claim to have and how they are wired."""

    racks: int = 2
    nodes_per_rack: int = 2
    gpus_per_node: int = 2
    gpu_memory_mib: int = 2048
    cpus_per_node: int = 64
    """More than the machine has: nodes share it, and pods that ask for whole cores must still fit."""
    memory_per_node: str = "256Gi"
    pods_per_node: int = 110

    def nodes(self) -> list[NodeSpec]:
        """Every node, with the labels that GPU operators and topology discovery put on real ones.

        Raises:
            ValueError: A count that is not positive; GPUs may be 0.
        """
        for name in ("racks", "nodes_per_rack", "cpus_per_node", "pods_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.gpus_per_node < 0:
            raise ValueError(f"gpus_per_node: must be at least 0, not {self.gpus_per_node}")
        return [
            self._node(f"rack{rack}", f"rack{rack}-node{node}")
            for rack in range(self.racks)
            for node in range(self.nodes_per_rack)
        ]

    def _node(self, rack: str, name: str) -> NodeSpec:
        wiring = {ZONE_LABEL: "local", LEAF_LABEL: rack}
        capacity = {
            "cpu": str(self.cpus_per_node),
            "memory": self.memory_per_node,
            "pods": str(self.pods_per_node),
        }
        if self.gpus_per_node:
            # GPUs of one node are one NVLink domain.
            wiring[ACCELERATOR_LABEL] = f"{name}-nvlink"
            wiring["nvidia.com/gpu.product"] = "Simulated-GPU"
            wiring["nvidia.com/gpu.memory"] = str(self.gpu_memory_mib)
            wiring["nvidia.com/gpu.count"] = str(self.gpus_per_node)
            capacity[labels.GPU_RESOURCE] = str(self.gpus_per_node)
        return NodeSpec(name, wiring, capacity=capacity)


class LocalCluster:
    """An asynchronous context manager around a cluster.

    Args:
        shape: Its nodes.
        directory: Where everything is kept: objects, volumes, logs, kubeconfig. None: a temporary one, objects only in
            memory, and all of it is deleted at the end.
        provider: Where the control plane comes from; None: embedded.
        port: Port of the embedded API server; 0 takes a free one.
        times: Patience with silent nodes.
        restart_pause: Seconds before the second restart of a failing container.
    """

    def __init__(
        self,
        shape: ClusterShape | None = None,
        directory: Path | None = None,
        *,
        provider: Provider | None = None,
        port: int = 0,
        times: NodeTimes | None = None,
        restart_pause: float = 10.0,
    ) -> None:
        self.shape = shape or ClusterShape()
        self._failed = asyncio.Event()
        self._temporary = None if directory else Path(tempfile.mkdtemp(prefix="meshwright-"))
        self.directory = directory or self._temporary or Path()
        self._provider = provider or EmbeddedProvider(self.directory, in_memory=directory is None, port=port)
        self._times = times or NodeTimes()
        self._restart_pause = restart_pause
        self._plane: ControlPlane | None = None
        self._client: ApiClient | None = None
        self._informers: Informers | None = None
        self._network: ClusterNetwork | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._agents: dict[str, NodeAgent] = {}

    @property
    def connection(self) -> Connection:
        """Address and administrator's credentials."""
        if self._plane is None:
            raise RuntimeError("the cluster is not started")
        return self._plane.connection

    @property
    def client(self) -> ApiClient:
        """The client that the cluster's own components use."""
        if self._client is None:
            raise RuntimeError("the cluster is not started")
        return self._client

    @property
    def url(self) -> str:
        """Address of the API server."""
        return self.connection.url

    @property
    def token(self) -> str | None:
        """The administrator's token."""
        return self.connection.token

    @property
    def kubeconfig(self) -> Path:
        """A kubeconfig file, mode 0600, while the cluster runs."""
        return self.directory / "kubeconfig"

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes whose agents run."""
        return list(self._agents)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything; returns when every node is registered.

        Raises:
            ProviderError: The control plane could not be started.
        """
        specs = self.shape.nodes()
        self._plane = await self._provider.start()
        self._client = ApiClient(self._plane.connection)
        await self._client.wait_ready()
        self._start_controllers(self._plane, self._client)
        if self._plane.kubelet is not None:
            self._network = ClusterNetwork()
            await asyncio.gather(*(self.start_node(spec.name) for spec in specs))
        await asyncio.to_thread(write_kubeconfig, self.kubeconfig, self._plane.connection)

    async def stop(self) -> None:
        """End everything: pods' processes first, the API server last."""
        await asyncio.gather(*(agent.stop() for agent in self._agents.values()), return_exceptions=True)
        self._agents.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._informers is not None:
            await self._informers.stop()
        if self._client is not None:
            await self._client.close()
        await self._provider.stop()
        if self._network is not None:
            self._network.close()
        if self._temporary is not None:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)

    async def failed(self) -> None:
        """Return when a component ended by a defect: the cluster is no longer whole, and the log says why."""
        await self._failed.wait()

    async def start_node(self, name: str) -> None:
        """Start the agent of a node of the shape, again after `fail_node`.

        Raises:
            KeyError: The shape has no such node.
            RuntimeError: The cluster is not started, or has nodes of its own.
        """
        if self._plane is None or self._plane.kubelet is None or self._network is None:
            raise RuntimeError("the cluster takes no nodes")
        specs = self.shape.nodes()
        index = {spec.name: index for index, spec in enumerate(specs)}[name]
        settings = AgentSettings(
            self.directory / "nodes" / name, self._plane.kubelet, self._times.renew, self._restart_pause
        )
        agent = NodeAgent(self.client, specs[index], self._network.part(index, len(specs)), settings)
        self._agents[name] = agent
        await agent.start()

    async def fail_node(self, name: str) -> None:
        """A node loses power: its processes are killed and nobody is told.

        Raises:
            KeyError: No such node runs.
        """
        await self._agents.pop(name).stop()

    def _start_controllers(self, plane: ControlPlane, client: ApiClient) -> None:
        informers = self._informers = Informers(client)
        components: list[Coroutine[Any, Any, None]] = []
        if not plane.has_scheduler:
            components.append(Scheduler(informers).run())
        if not plane.has_controllers:
            components.append(GarbageCollector(informers).run())
            components.append(NamespaceController(informers).run())
            components.append(NodeController(informers, self._times).run())
        if plane.kubelet is not None:
            components.append(ClaimController(informers, self.directory / "volumes").run())
        informers.start()
        self._tasks = [asyncio.create_task(component) for component in components]
        for task in self._tasks:
            task.add_done_callback(self._component_ended)

    def _component_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception() or RuntimeError("a component ended by itself")
        logger.critical("a component of the cluster failed", exc_info=error)
        self._failed.set()
