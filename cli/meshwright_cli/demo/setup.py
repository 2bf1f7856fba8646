"""Starts the embedded cluster, the CRD and the operator of a demo, and waits until each is ready."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from meshwright.api.labels import CHECKPOINT_MOUNT
from meshwright.crd.definition import custom_resource_definition
from meshwright_cli import manifest
from meshwright_cli.child_processes import Program, Programs
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.kubeconfig import Connection
from meshwright_local.kube.resources import CRDS
from meshwright_local.nodeagent.network.ports import free_port
from meshwright_local.nodeagent.volumes import claim_directory

READY_SECONDS = 60.0
POLL_SECONDS = 0.1


class SetupError(Exception):
    """A component was not ready in time. The message names it, with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of the simulated cluster."""

    racks: int = 2
    nodes_per_rack: int = 2
    gpus_per_node: int = 2

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return self.racks * self.nodes_per_rack * self.gpus_per_node


async def start_cluster(programs: Programs, directory: Path, shape: Shape, provider: str = "embedded") -> Path:
    """Start the embedded cluster and return its kubeconfig file.

    Raises:
        SetupError: it did not become ready.
        ProgramEndedError: it ended.
    """
    home = directory / "cluster"
    home.mkdir()
    argv = [sys.executable, "-m", "meshwright_local.daemon", "--directory", str(home)]
    argv += ["--racks", str(shape.racks), "--nodes-per-rack", str(shape.nodes_per_rack)]
    argv += ["--gpus-per-node", str(shape.gpus_per_node), "--provider", provider]
    program = await programs.start("embedded cluster", argv, directory / "cluster.log")

    async def ready() -> bool:
        return (home / "ready").exists()

    await wait_until_ready(ready, program)
    return home / "kubeconfig"


async def install_crd(client: ApiClient) -> None:
    """Apply the CRD and wait until the API server serves it.

    Raises:
        SetupError: it was not established in time.
    """
    definition = custom_resource_definition()
    await manifest.apply(client, definition, "")
    try:
        async with asyncio.timeout(READY_SECONDS):
            while True:
                found = await client.get(CRDS, definition["metadata"]["name"])
                conditions = (found.get("status") or {}).get("conditions") or []
                if any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
                    return
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise SetupError(f"the API server has not established {definition['metadata']['name']}") from None


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of an operator on this machine. It must keep them when it restarts, because its workers know them."""

    coordinator: int = field(default_factory=free_port)
    metrics: int = field(default_factory=free_port)

    @property
    def metrics_url(self) -> str:
        """Address of /metrics, /healthz and /readyz."""
        return f"http://127.0.0.1:{self.metrics}"


async def start_operator(
    programs: Programs,
    directory: Path,
    kubeconfig: Path,
    ports: Ports,
    options: Sequence[str] = (),
    *,
    wait_for_lease: bool = True,
) -> Program:
    """Start the operator, with further flags, and wait until it watches and, if it need not stand by, leads.

    Raises:
        SetupError: it did not become ready.
        ProgramEndedError: it ended.
    """
    argv = [sys.executable, "-m", "meshwright_operator", "--kubeconfig", str(kubeconfig)]
    argv += ["--coordinator-listen", f"127.0.0.1:{ports.coordinator}", "--metrics-listen", f"127.0.0.1:{ports.metrics}"]
    argv += options
    program = await programs.start("operator", argv, directory / "operator.log")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:

        async def ready() -> bool:
            try:
                async with session.get(f"{ports.metrics_url}/metrics") as response:
                    if wait_for_lease and "ptj_leader 1.0" not in await response.text():
                        return False
                async with session.get(f"{ports.metrics_url}/readyz") as response:
                    return response.status == 200
            except (aiohttp.ClientError, TimeoutError):
                return False

        await wait_until_ready(ready, program)
    return program


async def wait_until_ready(ready: Callable[[], Awaitable[bool]], program: Program) -> None:
    """Wait until a program is ready.

    Raises:
        SetupError: it was not in time.
        ProgramEndedError: it ended.
    """
    try:
        async with asyncio.timeout(READY_SECONDS):
            while not await ready():
                program.check()
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise SetupError(
            f"the {program.name} was not ready after {READY_SECONDS:.0f} s; its last lines:\n{program.tail(20)}"
        ) from None


def connect(kubeconfig: Path) -> ApiClient:
    """A client for the cluster of a kubeconfig file."""
    return ApiClient(Connection.from_kubeconfig(kubeconfig), user_agent="meshwright-cli")


async def local_checkpoint_path(client: ApiClient, namespace: str, claim: str, path: str) -> Path:
    """The path on this machine of a checkpoint that a pod of an embedded node wrote to a claim.

    Pods with a file system of their own say where they see it; the others, whose paths are rewritten, say where it is.
    """
    directory = await claim_directory(client, namespace, claim)
    return directory / Path(path).relative_to(CHECKPOINT_MOUNT) if path.startswith(CHECKPOINT_MOUNT) else Path(path)
