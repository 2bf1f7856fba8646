"""`meshwright local`: starts, stops and shows a cluster on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from meshwright.api.labels import GPU_RESOURCE
from meshwright.api.objects import KubeObject
from meshwright.figures import counted
from meshwright_local.cluster import LEAF_LABEL
from meshwright_local.commands import faults
from meshwright_local.commands.faults import directory_option, running_directory
from meshwright_local.daemon import READY_FILE, cluster_options, daemon_pid, provider_of
from meshwright_local.kube.client import REQUEST_ERRORS, ApiClient
from meshwright_local.kube.kubeconfig import Connection
from meshwright_local.kube.resources import NODES, PODS, has_ended
from meshwright_local.scheduler.resource_requests import allocatable, pod_requests

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


@click.group()
def local() -> None:
    """Run a Kubernetes cluster on this machine, with simulated GPU nodes and without containers."""


local.add_command(faults.node)
local.add_command(faults.chaos)


@local.command()
@directory_option
@cluster_options
def up(directory: Path, provider: str, with_nodes: bool, existing: Path | None, **numbers: Any) -> None:
    """Start the cluster in the background and wait for it."""
    directory = directory.resolve()
    provider_of(provider, directory, 0, existing, with_nodes)
    if daemon_pid(directory) is not None:
        raise click.ClickException(f"a cluster is already running in {directory}: see `meshwright local status`")
    directory.mkdir(parents=True, exist_ok=True)
    # A daemon that was killed leaves the file behind.
    (directory / READY_FILE).unlink(missing_ok=True)
    arguments = [f"--directory={directory}", f"--provider={provider}", *(["--with-nodes"] if with_nodes else [])]
    arguments += [f"--existing={existing.resolve()}"] if existing else []
    arguments += [f"--{name.replace('_', '-')}={value}" for name, value in numbers.items()]
    _start(directory, arguments)
    connection = Connection.from_kubeconfig(directory / "kubeconfig")
    nodes, _ = _list_nodes_and_pods(connection)
    gpus = sum(allocatable(item)[GPU_RESOURCE] for item in nodes) // 1000
    click.echo(
        f"ready: {counted(len(nodes), 'node')}, {counted(gpus, 'GPU' if provider == 'kubeconfig' else 'simulated GPU')}"
    )
    click.echo(f"export KUBECONFIG={directory / 'kubeconfig'}")


def _start(directory: Path, arguments: list[str]) -> None:
    """Start the daemon and wait until it is ready."""
    log = directory / "daemon.log"
    with log.open("ab") as output:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "meshwright_local.daemon", *arguments],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + _START_SECONDS
    while not (directory / READY_FILE).exists():
        if daemon.poll() is not None or time.monotonic() > deadline:
            daemon.kill()
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
            raise click.ClickException(f"the cluster did not start; the last lines of {log}:\n{tail}")
        time.sleep(0.05)


@local.command()
@directory_option
def down(directory: Path) -> None:
    """Stop the cluster. Its objects, volumes and logs stay in the directory."""
    directory = directory.resolve()
    pid = daemon_pid(directory)
    if pid is None:
        click.echo(f"no cluster is running in {directory}")
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while daemon_pid(directory) is not None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    click.echo("stopped")


@local.command()
@directory_option
def kubeconfig(directory: Path) -> None:
    """Print the path of the cluster's kubeconfig file.

    Prints the path also if no cluster is running, and exits with 1: after `export KUBECONFIG="$(meshwright local
    kubeconfig)"`, kubectl must not fall back to another cluster.
    """
    path = directory.resolve() / "kubeconfig"
    click.echo(str(path))
    try:
        running_directory(directory)
    except click.ClickException:
        path.unlink(missing_ok=True)  # of a cluster that was killed: its port may belong to another one now
        raise


@local.command()
@directory_option
def status(directory: Path) -> None:
    """Show the nodes with their GPUs and pods."""
    connection = Connection.from_kubeconfig(running_directory(directory) / "kubeconfig")
    nodes, pods = _list_nodes_and_pods(connection)
    console = Console()
    console.print(f"{connection.url}, {counted(len(nodes), 'node')}")
    console.print(_table(nodes, pods))


def _list_nodes_and_pods(connection: Connection) -> tuple[list[KubeObject], list[KubeObject]]:
    async def fetch() -> tuple[list[KubeObject], list[KubeObject]]:
        async with ApiClient(connection, timeout=5) as client:
            return (await client.list(NODES)).items, (await client.list(PODS)).items

    try:
        return asyncio.run(fetch())
    except REQUEST_ERRORS as error:
        raise click.ClickException(f"{connection.url} does not respond: {error}") from error


def _table(nodes: list[KubeObject], pods: list[KubeObject]) -> Table:
    gpus: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if node and not has_ended(pod):
            gpus[node] += pod_requests(pod)[GPU_RESOURCE] // 1000
            count[node] += 1
    table = Table("Node", "Rack", "Ready", "GPUs used", "Pods")
    for node in nodes:
        name = node["metadata"]["name"]
        conditions = (node.get("status") or {}).get("conditions") or ()
        ready = next((item["status"] for item in conditions if item["type"] == "Ready"), "Unknown")
        total = allocatable(node)[GPU_RESOURCE] // 1000
        rack = (node["metadata"].get("labels") or {}).get(LEAF_LABEL, "")
        table.add_row(name, rack, ready, f"{gpus[name]}/{total}", str(count[name]))
    return table
