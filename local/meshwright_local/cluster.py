"""A whole cluster in one process and event loop: control plane, scheduler, controllers and simulated nodes."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from meshwright.api import labels
from meshwright_local.apiserver.admission import metadata
from meshwright_local.controllers.base import Controller
from meshwright_local.controllers.deployments import DeploymentController
from meshwright_local.controllers.disruption_budgets import DisruptionController
from meshwright_local.controllers.garbage_collector import GarbageCollector
from meshwright_local.controllers.namespaces import NamespaceController
from meshwright_local.controllers.node_lifecycle import NodeController, NodeTimes
from meshwright_local.controllers.replica_sets import ReplicaSetController
from meshwright_local.controllers.volume_claims import ClaimController
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.kubeconfig import Connection, write_kubeconfig
from meshwright_local.kube.reflector import Informers
from meshwright_local.kube.resources import NODES
from meshwright_local.nodeagent.agent import AgentSettings, NodeAgent
from meshwright_local.nodeagent.network.addresses import ClusterNetwork
from meshwright_local.nodeagent.node import NodeSpec
from meshwright_local.providers.base import ControlPlane, Provider
from meshwright_local.providers.embedded import EmbeddedProvider
from meshwright_local.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

LEAF_LABEL = "network.topology.nvidia.com/leaf"
ACCELERATOR_LABEL = "network.topology.nvidia.com/accelerator"
ZONE_LABEL = "topology.kubernetes.io/zone"

_MIN_NETWORK_NODES, _MAX_NETWORK_NODES = 16, 255


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The number of simulated nodes, the resources they advertise and their topology."""

    racks: int = 2
    nodes_per_rack: int = 2
    gpus_per_node: int = 2
    gpu_memory_mib: int = 2048
    cpus_per_node: int = 64
    """More than the machine has: all nodes share it, and pods that request whole cores must still fit."""
    memory_per_node: str = "256Gi"
    pods_per_node: int = 110

    def nodes(self) -> list[NodeSpec]:
        """Return every node, with the labels that GPU operators and topology discovery set on real nodes.

        Raises:
            ValueError: A count is not positive; racks and GPUs may be 0.
        """
        least = {"racks": 0, "nodes_per_rack": 1, "gpus_per_node": 0, "cpus_per_node": 1, "pods_per_node": 1}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ValueError(f"{name}: must be at least {number}, not {getattr(self, name)}")
        return [
            self.node(f"rack{rack}", f"rack{rack}-node{node}")
            for rack in range(self.racks)
            for node in range(self.nodes_per_rack)
        ]

    def node(self, rack: str, name: str) -> NodeSpec:
        """Return one node of a rack."""
        node_labels = {ZONE_LABEL: "local", LEAF_LABEL: rack}
        capacity = {
            "cpu": str(self.cpus_per_node),
            "memory": self.memory_per_node,
            "pods": str(self.pods_per_node),
        }
        if self.gpus_per_node:
            # GPUs of one node are one NVLink domain.
            node_labels[ACCELERATOR_LABEL] = f"{name}-nvlink"
            node_labels["nvidia.com/gpu.product"] = "Simulated-GPU"
            node_labels["nvidia.com/gpu.memory"] = str(self.gpu_memory_mib)
            node_labels["nvidia.com/gpu.count"] = str(self.gpus_per_node)
            capacity[labels.GPU_RESOURCE] = str(self.gpus_per_node)
        return NodeSpec(name, node_labels, capacity=capacity)


class LocalCluster:
    """An asynchronous context manager around a cluster.

    Args:
        shape: Its nodes at the start.
        directory: Directory of objects, volumes, logs and the kubeconfig file. None: a temporary directory, with
            objects only in memory; all of it is deleted at the end.
        provider: Source of the control plane; None: embedded.
        port: Port of the embedded API server; 0 selects a free port.
        times: Timeouts of nodes that stop sending heartbeats.
        restart_backoff_seconds: Seconds before the second restart of a failing container.
    """

    def __init__(
        self,
        shape: ClusterShape | None = None,
        directory: Path | None = None,
        *,
        provider: Provider | None = None,
        port: int = 0,
        times: NodeTimes | None = None,
        restart_backoff_seconds: float = 10.0,
    ) -> None:
        self.shape = shape or ClusterShape()
        self._failed = asyncio.Event()
        self._temporary = None if directory else Path(tempfile.mkdtemp(prefix="meshwright-"))
        self.directory = directory or self._temporary or Path()
        self._provider = provider or EmbeddedProvider(self.directory, in_memory=directory is None, port=port)
        self._times = times or NodeTimes()
        self._restart_backoff_seconds = restart_backoff_seconds
        self._control_plane: ControlPlane | None = None
        self._client: ApiClient | None = None
        self._informers: Informers | None = None
        self._network: ClusterNetwork | None = None
        self._max_nodes = 0
        self._network_parts: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._agents: dict[str, NodeAgent] = {}

    @property
    def connection(self) -> Connection:
        """The API server's address and the administrator's credentials."""
        if self._control_plane is None:
            raise RuntimeError("the cluster is not started")
        return self._control_plane.connection

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
        """Path of a kubeconfig file (mode 0600), which exists while the cluster runs."""
        return self.directory / "kubeconfig"

    @property
    def nodes(self) -> dict[str, NodeAgent]:
        """The agents of the simulated nodes, by node. For a failure: `partition`, `power_off`, then `recover`."""
        return self._agents

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
        """Start everything. Return when every node is registered.

        Raises:
            ProviderError: The control plane could not be started.
        """
        specs = self.shape.nodes()
        control_plane = self._control_plane = await self._provider.start()
        self._client = ApiClient(control_plane.connection)
        await self._client.wait_ready()
        await asyncio.to_thread(write_kubeconfig, self.kubeconfig, control_plane.connection)
        self._start_controllers(control_plane, self._client)
        if control_plane.kubelet is not None:
            self._network = ClusterNetwork()
            self._max_nodes = min(_MAX_NETWORK_NODES, max(_MIN_NETWORK_NODES, 2 * len(specs)))
            await asyncio.gather(*(self.add_node(spec) for spec in specs))

    async def stop(self) -> None:
        """Stop everything: the processes of pods first, the API server last."""
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
        """Return when a component has failed because of a bug: the cluster is then incomplete. The error is logged."""
        await self._failed.wait()

    async def add_node(self, spec: NodeSpec) -> None:
        """Add a node and start its agent. Return when it is registered.

        Raises:
            ValueError: The name is invalid or taken, or the network has no addresses for another node.
            RuntimeError: The cluster is not started, or cannot have simulated nodes.
        """
        if self._control_plane is None or self._control_plane.kubelet is None or self._network is None:
            raise RuntimeError("this cluster cannot have simulated nodes")
        wrong = metadata.problem("subdomain", spec.name)
        if wrong:
            raise ValueError(f"{spec.name!r} cannot be the name of a node: {wrong}")
        if spec.name in self._agents:
            raise ValueError(f"{spec.name}: a node of that name already exists")
        network_part = next(
            (index for index in range(self._max_nodes) if index not in self._network_parts.values()), None
        )
        if network_part is None:
            raise ValueError(f"{spec.name}: {self._max_nodes} nodes share the cluster's addresses; start it with more")
        self._network_parts[spec.name] = network_part
        settings = AgentSettings(
            self.directory / "nodes" / spec.name,
            self._control_plane.kubelet,
            self._times.renew,
            self._restart_backoff_seconds,
            images=self.directory / "images",
        )
        agent = NodeAgent(self.client, spec, self._network.part(network_part, self._max_nodes), settings)
        self._agents[spec.name] = agent
        await agent.start()

    async def remove_node(self, name: str) -> None:
        """Remove a node: its processes, then its object.

        Raises:
            KeyError: No such node.
        """
        await self._agents.pop(name).stop()
        del self._network_parts[name]
        await self.client.delete(NODES, name)

    def _start_controllers(self, control_plane: ControlPlane, client: ApiClient) -> None:
        informers = self._informers = Informers(client)
        controllers: list[Controller] = []
        if not control_plane.has_scheduler:
            controllers.append(Scheduler(informers))
        if not control_plane.has_controllers:
            controllers += [GarbageCollector(informers), NamespaceController(informers)]
            controllers += [DeploymentController(informers), ReplicaSetController(informers)]
            controllers.append(DisruptionController(informers))
            controllers.append(NodeController(informers, self._times))
        if control_plane.kubelet is not None:
            controllers.append(ClaimController(informers, self.directory / "volumes"))
        informers.start()
        self._tasks = [asyncio.create_task(controller.run()) for controller in controllers]
        for task in self._tasks:
            task.add_done_callback(self._component_ended)

    def _component_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception() or RuntimeError("a component exited unexpectedly")
            logger.critical("a component of the cluster failed", exc_info=error)
            self._failed.set()
