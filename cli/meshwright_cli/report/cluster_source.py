"""Reads a job, its nodes and its events from a cluster, with the rights of the user's kubeconfig."""

from __future__ import annotations

from datetime import datetime

from meshwright.api.objects import KubeObject
from meshwright.planner.topology.site import DEFAULT_SITE, SiteFabric
from meshwright_cli.client.api_server import NODES
from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.errors import MeshwrightError
from meshwright_cli.client.objects import JobEvent
from meshwright_cli.fabric import cluster_fabric
from meshwright_cli.report.inputs import ReportInputs, inputs_of_job

MAX_EVENTS = 500


async def read_job(client: AsyncClient, name: str, now: datetime) -> ReportInputs:
    """Return the inputs of a report about a job. Nodes and events that cannot be read are left out, with a note.

    Raises:
        MeshwrightError: the job cannot be read.
    """
    job = await client.get(name)
    notes: list[str] = []
    nodes = await _nodes(client, notes)
    events = await _events(client, name, notes)
    site = await _fabric(client, notes)
    return inputs_of_job(job.raw, nodes, events, now, notes, site)


async def _nodes(client: AsyncClient, notes: list[str]) -> list[KubeObject] | None:
    try:
        items, _ = await client.server.collect(NODES)
    except MeshwrightError as error:
        notes.append(f"No estimates and no unused GPUs, because the nodes cannot be read: {error}")
        return None
    return items


async def _fabric(client: AsyncClient, notes: list[str]) -> SiteFabric:
    try:
        return await cluster_fabric(client)
    except MeshwrightError as error:
        notes.append(f"Estimates for the usual fabric, because that of the site cannot be read: {error}")
        return DEFAULT_SITE


async def _events(client: AsyncClient, name: str, notes: list[str]) -> list[JobEvent]:
    try:
        found = await client.events(name)
    except MeshwrightError as error:
        notes.append(f"No events, because they cannot be read: {error}")
        return []
    return list(found)[-MAX_EVENTS:]
