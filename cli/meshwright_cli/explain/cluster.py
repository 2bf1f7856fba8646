"""What an explanation needs of the cluster: nodes, pods of all namespaces, and the other jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.api.objects import KubeObject
from meshwright.planner.topology.site import DEFAULT_SITE, SiteFabric
from meshwright_cli.client.api_server import NODES, PODS
from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.errors import ForbiddenError
from meshwright_cli.client.objects import Job
from meshwright_cli.cluster_fabric import cluster_fabric


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
    nodes: Sequence[KubeObject] = ()
    pods: Sequence[KubeObject] = ()
    jobs: Sequence[Job] = ()
    try:
        nodes = (await client.server.collect(NODES))[0]
    except ForbiddenError:
        hidden.append("list nodes")
    try:
        pods = (await client.server.collect(PODS))[0]
    except ForbiddenError:
        hidden.append("list pods of all namespaces")
    try:
        jobs = await client.list(all_namespaces=True)
    except ForbiddenError:
        hidden.append("list jobs of all namespaces")
    return ClusterView(nodes, pods, jobs, hidden, await cluster_fabric(client))
