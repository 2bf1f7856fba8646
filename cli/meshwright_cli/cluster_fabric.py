"""The fabric of the site from the operator's ConfigMap. Commands without a cluster import no client for it."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.api.objects import KubeObject
from meshwright.planner.topology.site import DEFAULT_SITE, FabricError, SiteFabric, parse_fabric
from meshwright_cli.client.api_server import Kind
from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.errors import ForbiddenError, NotFoundError

CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap")
SELECTOR = "app.kubernetes.io/name=meshwright"
KEY = "fabric.yaml"
"""Key of the document in the chart's ConfigMap."""


async def cluster_documents(client: AsyncClient) -> list[KubeObject]:
    """The ConfigMaps with a fabric of all operators that the user may see.

    Raises:
        ForbiddenError: the user may list ConfigMaps neither in the cluster nor in the namespace.
    """
    try:
        found = (await client.server.collect(CONFIG_MAPS, selector=SELECTOR))[0]
    except ForbiddenError:
        found = (await client.server.collect(CONFIG_MAPS, client.namespace, selector=SELECTOR))[0]
    except NotFoundError:
        return []
    return [one for one in found if KEY in (one.get("data") or {})]


async def cluster_fabric(client: AsyncClient) -> SiteFabric:
    """The fabric of the cluster's operator, as far as the user may see it. Nothing is stated in an invalid one."""
    try:
        return fabric_of(await cluster_documents(client))
    except ForbiddenError:
        return DEFAULT_SITE


def fabric_of(documents: Iterable[KubeObject]) -> SiteFabric:
    """The first valid fabric of these ConfigMaps."""
    for document in documents:
        try:
            return parse_fabric(document["data"][KEY])
        except FabricError:
            continue
    return DEFAULT_SITE
