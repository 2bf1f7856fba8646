"""Reads a job, its nodes and its events from a cluster, with the rights of the user's kubeconfig."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from meshwright.api.labels import METRICS_PORT
from meshwright.api.objects import KubeObject
from meshwright.layout import Coordinates, Layout
from meshwright.planner.topology.site import DEFAULT_SITE, SiteFabric
from meshwright.schedules.measured import (
    STORED_DIRECTORY,
    MeasuredStep,
    measured_step,
    read_stored,
    read_timelines,
)
from meshwright_cli.client.api_server import NODES, PODS, Action
from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.checkpoints.read import read_on_claim
from meshwright_cli.client.errors import MeshwrightError, NotFoundError
from meshwright_cli.client.objects import Job, JobEvent, WorkerPod, newest_pods, ranks_by_worker
from meshwright_cli.cluster_fabric import cluster_fabric
from meshwright_cli.report.inputs import ReportInputs, inputs_of_job

MAX_EVENTS = 500
_READ_STORED = f"""
import glob, os, sys
for path in sorted(glob.glob(os.path.join(sys.argv[1], "{STORED_DIRECTORY}", "stage-*.json"))):
    with open(path) as file:
        print(file.read(1 << 18).strip())
"""
"""Runs in a pod. A file has at most `meshwright.schedules.measured.MAX_SLOTS` slots."""

Stored = dict[tuple[str, int], tuple[MeasuredStep | None, str]]
"""Uid and mesh generation of jobs without pods -> the timeline that they have stored, or why it cannot be read."""


async def read_job(client: AsyncClient, name: str, now: datetime, stored: Stored | None = None) -> ReportInputs:
    """Return the inputs of a report about a job. Nodes and events that cannot be read are left out, with a note.

    Args:
        client: the client.
        name: the job.
        now: the time of the report.
        stored: timelines of earlier calls, which are not read again. The call adds to it.

    Raises:
        MeshwrightError: the job cannot be read.
    """
    job = await client.get(name)
    notes: list[str] = []
    nodes = await _nodes(client, notes)
    events = await _events(client, name, notes)
    site = await _fabric(client, notes)
    measured = await _measured(client, job, notes, {} if stored is None else stored)
    return replace(inputs_of_job(job.raw, nodes, events, now, notes, site), measured=measured)


async def _measured(client: AsyncClient, job: Job, notes: list[str], stored: Stored) -> MeasuredStep | None:
    """The latest timeline of the job's first pipeline: from its pods, or stored on its claim. None without one."""
    plan = job.status.plan
    if plan is None or plan.pipeline < 2:
        return None
    layout = Layout(plan.tensor, plan.pipeline, plan.data, max(1, plan.context), max(1, plan.expert))
    wanted = {rank for rank in range(layout.world_size) if _in_first_pipeline(layout.coordinates(rank))}
    owners = {worker for worker, ranks in ranks_by_worker(job.status).items() if wanted & set(ranks)}
    try:
        found = newest_pods(await client.pods(job.name))
        if job.finished or (not found and job.status.checkpoint is not None):
            return await _stored(client, job, found, notes, stored)
        pods = [pod for pod in found if pod.worker in owners and pod.ready]
        documents = await asyncio.gather(*(_timeline(client, pod) for pod in pods))
    except MeshwrightError as error:
        notes.append(f"No measured timeline, because worker pods cannot be read: {error}")
        return None
    return measured_step(one for document in documents for one in read_timelines(document))


async def _stored(
    client: AsyncClient, job: Job, pods: Sequence[WorkerPod], notes: list[str], stored: Stored
) -> MeasuredStep | None:
    """The last timeline of a job that does not run. Reading it may take a pod, so it is done once."""
    if job.spec.checkpoint is None or job.spec.checkpoint.claim_name is None or not job.status.step:
        return None
    key = job.uid, job.status.mesh.generation if job.status.mesh is not None else 0
    if key not in stored:
        try:
            text = await read_on_claim(client, job, pods, _READ_STORED)
            stored[key] = measured_step(read_stored(text)), ""
        except MeshwrightError as error:
            claim = job.spec.checkpoint.claim_name
            stored[key] = None, f"No measured timeline, because claim {claim} cannot be read: {error}"
    found, why = stored[key]
    notes += [why] if why else []
    return found


async def _timeline(client: AsyncClient, pod: WorkerPod) -> object:
    path = PODS.path(client.namespace, f"{pod.name}:{METRICS_PORT}", "proxy/timeline")
    try:
        document: object = await client.server.request(
            "GET", path, Action("get", PODS, client.namespace, pod.name, "proxy")
        )
    except NotFoundError:
        return None  # a worker image from before timelines
    return document


def _in_first_pipeline(at: Coordinates) -> bool:
    return at.tensor == at.context == at.data == 0


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
