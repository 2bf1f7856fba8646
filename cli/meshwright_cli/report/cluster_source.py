"""Reads a job, its nodes and its events from a cluster, with the rights of the user's kubeconfig."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import aiohttp
import click
import yaml

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright_cli.demo.snapshot import event_view
from meshwright_cli.report.inputs import Event, ReportInputs, inputs_of_job
from meshwright_local.kube.client import ApiClient, ApiError
from meshwright_local.kube.kubeconfig import Connection, KubeconfigError
from meshwright_local.kube.resources import EVENTS, JOBS, NODES

MAX_EVENTS = 500


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    """A job of the kubeconfig's cluster."""

    name: str
    namespace: str | None = None
    """None for that of the context."""
    context: str | None = None
    """None for the current one."""


def kubeconfig_path() -> Path:
    """Return the first file of `$KUBECONFIG`, or `~/.kube/config`."""
    stated = next((part for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part), "")
    return Path(stated).expanduser() if stated else Path.home() / ".kube" / "config"


def connect(target: ClusterTarget) -> tuple[ApiClient, str]:
    """Return a client for the target's cluster, and the namespace.

    Raises:
        click.ClickException: the kubeconfig cannot be used; the message names the file.
    """
    path = kubeconfig_path()
    try:
        connection = Connection.from_kubeconfig(path, target.context)
    except KubeconfigError as error:
        raise click.ClickException(f"{error}. Set KUBECONFIG, or give the path of a manifest instead") from error
    return ApiClient(connection, user_agent="meshwright-report"), target.namespace or _namespace(path, target.context)


async def read_job(target: ClusterTarget, now: datetime) -> ReportInputs:
    """Return the inputs of a report about a job.

    Raises:
        click.ClickException: the job cannot be read; the message names it and the reason.
    """
    client, namespace = connect(target)
    async with client:
        return await read_job_with(client, namespace, target.name, now)


async def read_job_with(client: ApiClient, namespace: str, name: str, now: datetime) -> ReportInputs:
    """Return the inputs of a report about a job, with an open client.

    Raises:
        click.ClickException: the job cannot be read; the message names it and the reason.
    """
    try:
        job = await client.get(JOBS, name, namespace)
    except ApiError as error:
        if error.status == 404:
            raise click.ClickException(f"no job `{name}` in namespace `{namespace}`: set -n or --context") from error
        raise click.ClickException(f"job `{name}` in namespace `{namespace}`: {error}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise click.ClickException(f"{client.connection.url}: cannot be reached: {error}") from error
    notes: list[str] = []
    nodes = await _nodes(client, notes)
    events = await _events(client, namespace, job, notes)
    return inputs_of_job(job, nodes, events, now, notes)


async def _nodes(client: ApiClient, notes: list[str]) -> list[KubeObject] | None:
    try:
        return (await client.list(NODES)).items
    except (ApiError, aiohttp.ClientError, TimeoutError) as error:
        notes.append(f"No estimates and no unused GPUs, because the nodes cannot be read: {_reason(error)}.")
        return None


async def _events(client: ApiClient, namespace: str, job: KubeObject, notes: list[str]) -> list[Event]:
    about = f"involvedObject.name={job['metadata']['name']},involvedObject.kind={labels.KIND}"
    try:
        items = (await client.list(EVENTS, namespace, field_selector=about)).items
    except (ApiError, aiohttp.ClientError, TimeoutError) as error:
        notes.append(f"No events, because they cannot be read: {_reason(error)}.")
        return []
    uid = job["metadata"].get("uid")
    views = [event_view(item) for item in items if (item.get("involvedObject") or {}).get("uid") == uid]
    views.sort(key=lambda view: view.time)
    return [Event(view.time, view.reason, view.note, view.warning) for view in views[-MAX_EVENTS:]]


def _reason(error: Exception) -> str:
    return error.message or error.reason if isinstance(error, ApiError) else str(error) or type(error).__name__


def _namespace(path: Path, context: str | None) -> str:
    """The namespace of a context of the kubeconfig. `Connection` has read the file before."""
    config = yaml.safe_load(path.read_text())
    wanted = context or config.get("current-context")
    found = next((entry for entry in config.get("contexts") or () if entry.get("name") == wanted), {})
    return str((found.get("context") or {}).get("namespace") or "default")
