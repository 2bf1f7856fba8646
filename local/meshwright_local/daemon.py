"""A cluster as a separate process: `python -m meshwright_local.daemon --directory DIR`.

Writes DIR/kubeconfig and, when every node is registered, DIR/ready (JSON: pid, url, kubeconfig). A DIR/ready with
another pid was left by a killed predecessor. Exits on SIGTERM or SIGINT. However it exits, also by SIGKILL, no process
of a pod survives it. It locks DIR/daemon.lock while it runs: a directory has at most one daemon, and the lock, not a
pid, shows whether it runs.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from meshwright_local.cluster import ClusterShape, LocalCluster
from meshwright_local.control_socket import ControlServer
from meshwright_local.kube.kubeconfig import write_private
from meshwright_local.providers.base import Provider, ProviderError
from meshwright_local.providers.embedded import EmbeddedProvider
from meshwright_local.providers.envtest import EnvtestProvider
from meshwright_local.providers.existing import KubeconfigProvider

logger = logging.getLogger(__name__)

LOCK_FILE = "daemon.lock"
READY_FILE = "ready"

_OPTIONS = (
    click.option("--racks", default=2, show_default=True, type=click.IntRange(1), help="Number of racks."),
    click.option("--nodes-per-rack", default=2, show_default=True, type=click.IntRange(1), help="Nodes of a rack."),
    click.option(
        "--gpus-per-node", default=2, show_default=True, type=click.IntRange(0), help="Simulated GPUs of a node."
    ),
    click.option("--port", default=0, show_default=True, help="Port of the embedded API server. 0: any free port."),
    click.option(
        "--provider",
        type=click.Choice(["embedded", "assets", "kubeconfig"]),
        default="embedded",
        show_default=True,
        help="Control plane: the embedded one, the binaries in KUBEBUILDER_ASSETS, or an existing cluster.",
    ),
    click.option(
        "--existing",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="KUBECONFIG",
        help="Kubeconfig file of the existing cluster, with --provider kubeconfig.  [default: $KUBECONFIG]",
    ),
    click.option(
        "--with-nodes", is_flag=True, help="Add simulated nodes to the existing cluster, with --provider kubeconfig."
    ),
)


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that describe a cluster to a command that starts one."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class AlreadyRunningError(Exception):
    """Another daemon uses the directory."""


def lock(directory: Path) -> int:
    """Lock a cluster's directory. The kernel releases the lock when this process ends.

    Raises:
        AlreadyRunningError: Another process has locked it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        pid = daemon_pid(directory)
        raise AlreadyRunningError(f"{directory}: a cluster is already running here (pid {pid})") from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def daemon_pid(directory: Path) -> int | None:
    """Return the pid of the daemon that runs in a directory, or None."""
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(descriptor, 32).decode()
        return int(text) if text.isdigit() else None
    finally:
        os.close(descriptor)
    return None


def provider_of(name: str, directory: Path, port: int, existing: Path | None, with_nodes: bool) -> Provider:
    """Return the provider that the options select.

    Raises:
        click.UsageError: The options contradict each other.
    """
    if name != "kubeconfig":
        if with_nodes:
            raise click.UsageError("--with-nodes: only with --provider kubeconfig; all others have simulated nodes")
        return (
            EnvtestProvider(directory) if name == "assets" else EmbeddedProvider(directory, in_memory=False, port=port)
        )
    if existing is None:
        raise click.UsageError("--provider kubeconfig: needs --existing FILE, or KUBECONFIG")
    return KubeconfigProvider(existing, directory=directory, with_nodes=with_nodes)


async def serve(directory: Path, shape: ClusterShape, provider: Provider) -> int:
    """Run a cluster until a signal arrives or a component fails. Return the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    cluster = LocalCluster(shape, directory, provider=provider)
    control = ControlServer(cluster)
    starting, stopping = asyncio.create_task(cluster.start()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return 0
        await starting
        await control.start()
        content = {"pid": os.getpid(), "url": cluster.url, "kubeconfig": str(cluster.kubeconfig)}
        write_private(directory / READY_FILE, json.dumps(content))
        logger.info("ready: %s", cluster.url)
        failing = asyncio.ensure_future(cluster.failed())
        await asyncio.wait([failing, stopping], return_when=asyncio.FIRST_COMPLETED)
        return 0 if stop.is_set() else 1
    except ProviderError as error:
        logger.error("%s", error)
        return 1
    finally:
        (directory / READY_FILE).unlink(missing_ok=True)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await control.stop()
        await cluster.stop()


@click.command()
@click.option(
    "--directory", type=click.Path(file_okay=False, path_type=Path), required=True, help="Directory of all files."
)
@cluster_options
@click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning"]), show_default=True)
def main(
    directory: Path, racks: int, nodes_per_rack: int, gpus_per_node: int, port: int, provider: str,
    existing: Path | None, with_nodes: bool, log_level: str,
) -> None:  # fmt: skip
    """Run a cluster until SIGTERM."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=log_level.upper(), format=form, stream=sys.stderr)
    directory = directory.resolve()
    control_plane = provider_of(provider, directory, port, existing, with_nodes)
    try:
        lock(directory)
    except AlreadyRunningError as error:
        raise click.ClickException(str(error)) from error
    (directory / READY_FILE).unlink(missing_ok=True)
    shape = ClusterShape(racks=racks, nodes_per_rack=nodes_per_rack, gpus_per_node=gpus_per_node)
    sys.exit(asyncio.run(serve(directory, shape, control_plane)))


if __name__ == "__main__":
    main()
