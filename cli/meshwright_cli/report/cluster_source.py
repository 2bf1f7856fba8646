"""Reads a job, its nodes and its events from a cluster, with the rights of the user's kubeconfig."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime

from meshwright.api.labels import METRICS_PORT
from meshwright.api.objects import KubeObject
from meshwright.layout import Coordinates, Layout
from meshwright.schedules.measured import MeasuredStep, measured_step, read_timelines
from meshwright_cli.client.api_server import NODES, PODS, Action
from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.errors import MeshwrightError, NotFoundError
from meshwright_cli.client.objects import Job, JobEvent, WorkerPod, newest_pods, ranks_by_worker
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
    measured = await _measured(client, job, notes)
    return replace(inputs_of_job(job.raw, nodes, events, now, notes), measured=measured)


async def _measured(client: AsyncClient, job: Job, notes: list[str]) -> MeasuredStep | None:
    """The timeline that the pods of the job's first pipeline serve. None if it has none, or no pod runs."""
    plan = job.status.plan
    if plan is None or plan.pipeline < 2 or job.finished:
        return None
    layout = Layout(plan.tensor, plan.pipeline, plan.data, max(1, plan.context), max(1, plan.expert))
    wanted = {rank for rank in range(layout.world_size) if _in_first_pipeline(layout.coordinates(rank))}
    owners = {worker for worker, ranks in ranks_by_worker(job.status).items() if wanted & set(ranks)}
    try:
        pods = [pod for pod in newest_pods(await client.pods(job.name)) if pod.worker in owners and pod.ready]
        documents = await asyncio.gather(*(_timeline(client, pod) for pod in pods))
    except MeshwrightError as error:
        notes.append(f"No measured timeline, because worker pods cannot be read: {error}")
        return None
    return measured_step(one for document in documents for one in read_timelines(document))


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


async def _events(client: AsyncClient, name: str, notes: list[str]) -> list[JobEvent]:
    try:
        found = await client.events(name)
    except MeshwrightError as error:
        notes.append(f"No events, because they cannot be read: {error}")
        return []
    return list(found)[-MAX_EVENTS:]
