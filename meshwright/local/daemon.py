"""A cluster as a process of its own: `python -m meshwright.local.daemon --directory DIR`.

Writes DIR/kubeconfig and, when every node is registered, DIR/ready (JSON: pid, url, kubeconfig); one with another pid
is what a killed predecessor left. Ends on SIGTERM or SIGINT. However it ends, also by SIGKILL, no process of a pod
survives it. DIR/daemon.lock is held while it runs: a directory has one daemon at most, and whoever wants to know
whether it runs asks for the lock and not for a pid.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
import sys
from pathlib import Path

import click

from meshwright.local.cluster import ClusterShape, LocalCluster
from meshwright.local.providers.assets import AssetsProvider
from meshwright.local.providers.base import Provider, ProviderError
from meshwright.local.providers.embedded import EmbeddedProvider

logger = logging.getLogger(__name__)

LOCK_FILE = "daemon.lock"
READY_FILE = "ready"


class AlreadyRunningError(Exception):
    """Another daemon has the directory."""


class DirectoryLock:
    """The lock of a cluster's directory. The kernel frees it when its holder dies."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise AlreadyRunningError(f"{directory}: a cluster runs here already (pid {holder(directory)})") from error
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, str(os.getpid()).encode())


def holder(directory: Path) -> int | None:
    """Pid of the daemon that runs in a directory, or None."""
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


async def serve(directory: Path, shape: ClusterShape, provider: Provider) -> int:
    """Run a cluster until a signal comes or a component fails; the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    ready = directory / READY_FILE
    cluster = LocalCluster(shape, directory, provider=provider)
    starting, stopping = asyncio.create_task(cluster.start()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return 0
        await starting
        _announce(ready, cluster)
        logger.info("ready: %s", cluster.url)
        failing = asyncio.ensure_future(cluster.failed())
        await asyncio.wait([failing, stopping], return_when=asyncio.FIRST_COMPLETED)
        return 0 if stop.is_set() else 1
    except ProviderError as error:
        logger.error("%s", error)
        return 1
    finally:
        ready.unlink(missing_ok=True)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await cluster.stop()


def _announce(path: Path, cluster: LocalCluster) -> None:
    content = {"pid": os.getpid(), "url": cluster.url, "kubeconfig": str(cluster.kubeconfig)}
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


@click.command()
@click.option("--directory", type=click.Path(file_okay=False, path_type=Path), required=True, help="Keeps everything.")
@click.option("--racks", default=2, show_default=True, type=click.IntRange(1))
@click.option("--nodes-per-rack", default=2, show_default=True, type=click.IntRange(1))
@click.option("--gpus-per-node", default=2, show_default=True, type=click.IntRange(0), help="Simulated GPUs.")
@click.option("--port", default=0, show_default=True, help="Port of the API server; 0 takes a free one.")
@click.option("--provider", type=click.Choice(["embedded", "assets"]), default="embedded", show_default=True)
@click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning"]), show_default=True)
def main(
    directory: Path, racks: int, nodes_per_rack: int, gpus_per_node: int, port: int, provider: str, log_level: str
) -> None:
    """Run an embedded cluster until SIGTERM."""
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    directory = directory.resolve()
    try:
        # Held until the process ends.
        lock = DirectoryLock(directory)
    except AlreadyRunningError as error:
        raise click.ClickException(str(error)) from error
    (directory / READY_FILE).unlink(missing_ok=True)
    shape = ClusterShape(racks=racks, nodes_per_rack=nodes_per_rack, gpus_per_node=gpus_per_node)
    plane: Provider = EmbeddedProvider(directory, in_memory=False, port=port)
    if provider == "assets":
        plane = AssetsProvider(directory)
    code = asyncio.run(serve(directory, shape, plane))
    del lock
    sys.exit(code)


if __name__ == "__main__":
    main()
