"""`meshwright local`: a cluster on this machine, up, down and looked at."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
import click
from rich.console import Console
from rich.table import Table

from meshwright.api import labels
from meshwright.local.client import ApiClient, ApiError
from meshwright.local.cluster import LEAF_LABEL
from meshwright.local.connection import Connection
from meshwright.local.daemon import READY_FILE, holder
from meshwright.local.resources import NODES, PODS, Object
from meshwright.local.scheduler.requests import allocatable, pod_requests
from meshwright.local.scheduler.snapshot import is_over

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


def default_directory() -> Path:
    """Where `meshwright local` keeps its cluster: the user's state directory."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "meshwright" / "cluster"


directory_option = click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=default_directory,
    show_default="~/.local/state/meshwright/cluster",
    help="Directory of the cluster.",
)


@click.group()
def local() -> None:
    """A Kubernetes cluster on this machine, with simulated GPU nodes and without containers."""


@local.command()
@directory_option
@click.option("--racks", default=2, show_default=True, type=click.IntRange(1))
@click.option("--nodes-per-rack", default=2, show_default=True, type=click.IntRange(1))
@click.option("--gpus-per-node", default=2, show_default=True, type=click.IntRange(0), help="Simulated GPUs.")
@click.option("--port", default=0, show_default=True, help="Port of the API server; 0 takes a free one.")
@click.option("--provider", type=click.Choice(["embedded", "assets"]), default="embedded", show_default=True)
def up(directory: Path, racks: int, nodes_per_rack: int, gpus_per_node: int, port: int, provider: str) -> None:
    """Start the cluster in the background and wait until it is ready."""
    directory = directory.resolve()
    if holder(directory) is not None:
        raise click.ClickException(f"a cluster runs in {directory} already: see `meshwright local status`")
    directory.mkdir(parents=True, exist_ok=True)
    # One that was killed leaves it behind.
    (directory / READY_FILE).unlink(missing_ok=True)
    log = directory / "daemon.log"
    options = {"racks": racks, "nodes-per-rack": nodes_per_rack, "gpus-per-node": gpus_per_node, "port": port}
    words = [f"--directory={directory}", f"--provider={provider}"]
    words += [f"--{name}={value}" for name, value in options.items()]
    with log.open("ab") as output:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "meshwright.local.daemon", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + _START_SECONDS
    while not (directory / READY_FILE).exists():
        if daemon.poll() is not None or time.monotonic() > deadline:
            daemon.kill()
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
            raise click.ClickException(f"the cluster did not start; the end of {log}:\n{tail}")
        time.sleep(0.05)
    click.echo(f"ready: {racks * nodes_per_rack} nodes, {racks * nodes_per_rack * gpus_per_node} simulated GPUs")
    click.echo(f"export KUBECONFIG={directory / 'kubeconfig'}")


@local.command()
@directory_option
def down(directory: Path) -> None:
    """Stop the cluster; its objects, volumes and logs stay in the directory."""
    directory = directory.resolve()
    pid = holder(directory)
    if pid is None:
        click.echo(f"no cluster runs in {directory}")
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while holder(directory) is not None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    click.echo("stopped")


@local.command()
@directory_option
def kubeconfig(directory: Path) -> None:
    """Print the path of the cluster's kubeconfig file."""
    click.echo(str(_running(directory.resolve())))


@local.command()
@directory_option
def status(directory: Path) -> None:
    """Show nodes, what they have and what runs on them."""
    connection = Connection.from_kubeconfig(_running(directory.resolve()))
    try:
        nodes, pods = asyncio.run(_fetch(connection))
    except (ApiError, aiohttp.ClientError, TimeoutError) as error:
        raise click.ClickException(f"{connection.url} does not answer: {error}") from error
    console = Console()
    console.print(f"{connection.url}, {len(nodes)} nodes")
    console.print(_table(nodes, pods))


def _running(directory: Path) -> Path:
    if holder(directory) is None:
        raise click.ClickException(f"no cluster runs in {directory}: start one with `meshwright local up`")
    return directory / "kubeconfig"


async def _fetch(connection: Connection) -> tuple[list[Object], list[Object]]:
    async with ApiClient(connection, timeout=5) as client:
        return (await client.list(NODES)).items, (await client.list(PODS)).items


def _table(nodes: list[Object], pods: list[Object]) -> Table:
    gpus: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if node and not is_over(pod):
            gpus[node] += pod_requests(pod)[labels.GPU_RESOURCE] // 1000
            count[node] += 1
    table = Table("Node", "Rack", "Ready", "GPUs used", "Pods")
    for node in nodes:
        name = node["metadata"]["name"]
        conditions = (node.get("status") or {}).get("conditions") or ()
        ready = next((item["status"] for item in conditions if item["type"] == "Ready"), "Unknown")
        total = allocatable(node)[labels.GPU_RESOURCE] // 1000
        rack = (node["metadata"].get("labels") or {}).get(LEAF_LABEL, "")
        table.add_row(name, rack, ready, f"{gpus[name]}/{total}", str(count[name]))
    return table
