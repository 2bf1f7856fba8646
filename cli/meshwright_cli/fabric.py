"""The fabric of the site: from the file of `--fabric`, or from the operator's ConfigMap."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from meshwright.administrator import document_in_values
from meshwright.api.objects import KubeObject
from meshwright.planner.topology.site import DEFAULT_SITE, FABRIC_DOCUMENT, FabricError, SiteFabric, parse_fabric
from meshwright_cli.client.api_server import Kind
from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.errors import ForbiddenError, NotFoundError

CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap")
SELECTOR = "app.kubernetes.io/name=meshwright"
KEY = "fabric.yaml"
"""Key of the document in the chart's ConfigMap."""

F = TypeVar("F", bound=Callable[..., Any])


def fabric_option(command: F) -> F:
    """Add the option `--fabric`."""
    text = (
        "Fabric of the site: the document of the chart's value `fabric`, or values with it. Default: known labels, "
        "usual bandwidths."
    )
    return click.option("--fabric", type=click.Path(path_type=Path), help=text)(command)


def read_fabric(path: Path | None) -> SiteFabric:
    """The fabric in a file. Without one, nothing is stated.

    Raises:
        click.ClickException: the file cannot be read, or its document is invalid.
    """
    if path is None:
        return DEFAULT_SITE
    try:
        return parse_fabric_file(path.read_text())
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
    except (FabricError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{path}: {error}") from error


def parse_fabric_file(text: str) -> SiteFabric:
    """The fabric of a document, or of values of the chart.

    Raises:
        FabricError: the document is invalid.
    """
    try:
        return parse_fabric(document_in_values(text, "fabric", FABRIC_DOCUMENT))
    except ValueError as error:
        raise FabricError(str(error)) from None


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
