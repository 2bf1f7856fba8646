"""What an explanation needs of the cluster: nodes, pods of all namespaces, and the other jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.api.objects import KubeObject
from meshwright.planner.topology.site import DEFAULT_SITE, SiteFabric
from meshwright_cli.client.api_server import NODES, PODS
from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.objects import Job
from meshwright_cli.cluster_fabric import cluster_fabric
from meshwright_cli.jobs.visible import visible


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster as far as the user may see it."""

    nodes: Sequence[KubeObject] = ()
    pods: Sequence[KubeObject] = ()
    jobs: Sequence[Job] = ()
    hidden: Sequence[str] = field(default_factory=tuple)
    """What the user may not see, such as `list nodes`."""
    site: SiteFabric = field(default_factory=lambda: DEFAULT_SITE)
    """The fabric of the site."""


async def read_cluster(client: AsyncClient) -> ClusterView:
    """Read nodes, pods and jobs. What is forbidden is left out, and named."""
    hidden: list[str] = []
    nodes = await visible(client.server.collect(NODES), hidden, "list nodes")
    pods = await visible(client.server.collect(PODS), hidden, "list pods of all namespaces")
    jobs = await visible(client.list(all_namespaces=True), hidden, "list jobs of all namespaces")
    fabric = await cluster_fabric(client)
    return ClusterView(nodes[0] if nodes else (), pods[0] if pods else (), jobs or (), hidden, fabric)
