"""How fast and how large the embedded API server is, beside a real one when KUBEBUILDER_ASSETS has its binaries.

Rates are of eight clients in one process, so that the client's own cost is in both columns. Memory is that of the
server's process alone: at rest, with a large cluster's objects (nodes, pods, jobs), and after many further changes of
those pods, while a watcher reads along.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import click
import orjson
import yaml
from _report import table, write_json

from meshwright_local.apiserver.rest.server import ApiServer
from meshwright_local.kube.kubeconfig import Connection
from meshwright_local.providers.base import ProviderError
from meshwright_local.providers.envtest import EnvtestProvider

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = 8
MAPS, NODES = "/api/v1/namespaces/default/configmaps", "/api/v1/nodes"
PODS = "/api/v1/namespaces/default/pods"
JOBS = "/apis/meshwright.dev/v1alpha1/namespaces/default/paralleltrainingjobs"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
MERGE = "application/merge-patch+json"
SERVE = """
import asyncio, sys
from pathlib import Path
from meshwright_local.apiserver.rest.server import ApiServer
async def main():
    server = ApiServer(Path(sys.argv[1]))
    await server.start()
    print(server.url, server.token, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
Step = Callable[[int], Awaitable[object]]


class Client:
    """Requests to one server; every answer of 400 or more is an error."""

    def __init__(self, connection: Connection) -> None:
        self._url = connection.url
        self._context = connection.ssl_context() or False
        headers = {"Authorization": f"Bearer {connection.token}"}
        connector = aiohttp.TCPConnector(limit=CLIENTS + 1)
        self._session = aiohttp.ClientSession(headers=headers, connector=connector)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> bytes:
        """Sends a request and reads its answer."""
        data = None if body is None else orjson.dumps(body)
        async with self._session.request(
            method, self._url + path, data=data, headers={"Content-Type": kind}, ssl=self._context
        ) as response:
            content = await response.read()
            if response.status >= 400:
                raise RuntimeError(f"{method} {path}: {response.status} {content[:300]!r}")
            return content

    async def watch(self, path: str, seen: list[int]) -> None:
        """Counts events until cancelled; a watch that ends is begun again."""
        while True:
            timeout = aiohttp.ClientTimeout(total=None)
            url = f"{self._url}{path}?watch=true"
            async with self._session.get(url, ssl=self._context, timeout=timeout) as response:
                async for _ in response.content:
                    seen[0] += 1

    async def rate(self, count: int, step: Step) -> float:
        """How many steps a second eight clients do."""
        todo = iter(range(count))

        async def work() -> None:
            for index in todo:
                await step(index)

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(CLIENTS)))
        return count / (time.perf_counter() - start)


def config_map(index: int) -> dict[str, Any]:
    """A small object."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"m{index}"}, "data": {"k": "v" * 200}}


def node(index: int) -> dict[str, Any]:
    """A node with eight GPUs and the labels of its place."""
    name = f"node{index}"
    labels = {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": "z", "network/leaf": f"leaf{index // 16}"}
    amounts = {"cpu": "96", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": "8"}
    return {"metadata": {"name": name, "labels": labels}, "status": {"capacity": amounts, "allocatable": amounts}}


def pod(index: int) -> dict[str, Any]:
    """A worker of a training job."""
    environment = [{"name": f"MESHWRIGHT_{key}", "value": f"{key.lower()}-{index}"} for key in ("JOB", "RANK", "URL")]
    limits = {"nvidia.com/gpu": "8", "memory": "512Gi", "cpu": "64"}
    container = {"name": "worker", "image": "worker:1", "env": environment, "resources": {"limits": limits}}
    metadata = {"name": f"pod{index}", "labels": {"meshwright.dev/job": f"job{index // 20}", "app": "worker"}}
    return {"metadata": metadata, "spec": {"nodeName": f"node{index % 1000}", "containers": [container]}}


def running(index: int, change: int) -> dict[str, Any]:
    """A pod's status, another one with each change."""
    conditions = [{"type": kind, "status": "True", "message": str(change)} for kind in ("Initialized", "Ready")]
    state = {"name": "worker", "ready": True, "restartCount": change, "image": "worker:1", "imageID": "worker"}
    return {"status": {"phase": "Running", "podIP": f"10.1.{index >> 8 & 255}.{index & 255}", "conditions": conditions}
            | {"containerStatuses": [state]}}  # fmt: skip


async def rates(client: Client, count: int) -> dict[str, float]:
    """Requests a second, by what they do."""
    patch = {"data": {"k": "w"}}
    return {
        "create": await client.rate(count, lambda i: client.call("POST", MAPS, config_map(i))),
        "get": await client.rate(count, lambda i: client.call("GET", f"{MAPS}/m{i}")),
        "merge patch": await client.rate(count, lambda i: client.call("PATCH", f"{MAPS}/m{i}", patch, MERGE)),
        f"list of {count}": await client.rate(20, lambda i: client.call("GET", MAPS)),
        "delete": await client.rate(count, lambda i: client.call("DELETE", f"{MAPS}/m{i}")),
    }


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


async def memory(client: Client, pid: int, sizes: dict[str, int]) -> dict[str, float]:
    """The server's memory at rest, full, and after many changes."""
    found = {"at rest": resident_mib(pid)}
    crd = yaml.safe_load((ROOT / "crds" / "meshwright.dev_paralleltrainingjobs.yaml").read_text())
    documents = yaml.safe_load_all((ROOT / "examples" / "planner-chooses.yaml").read_text())
    job = next(d for d in documents if d["kind"] == "ParallelTrainingJob")
    await client.call("POST", CRDS, crd)
    await client.rate(sizes["nodes"], lambda i: client.call("POST", NODES, node(i)))
    await client.rate(sizes["pods"], lambda i: client.call("POST", PODS, pod(i)))
    named = ({**job, "metadata": {"name": f"job{i}"}} for i in range(sizes["jobs"]))
    await client.rate(sizes["jobs"], lambda i: client.call("POST", JOBS, next(named)))
    found["full"] = resident_mib(pid)
    seen = [0]
    watcher = asyncio.create_task(client.watch(PODS, seen))

    async def change(index: int) -> None:
        number = index % sizes["pods"]
        await client.call("PATCH", f"{PODS}/pod{number}/status", running(number, index), MERGE)

    for part in (1, 2, 3, 4):
        await client.rate(sizes["events"] // 4, change)
        found[f"after {part * sizes['events'] // 4} changes"] = resident_mib(pid)
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    found["events seen by one watcher"] = seen[0]
    return found


async def start_up(count: int) -> float:
    """Milliseconds until a server in this process serves; the best of some, since the first one reads its data."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        server = ApiServer(None)
        await server.start()
        found.append((time.perf_counter() - start) * 1000)
        await server.stop()
    return min(found)


async def embedded(count: int, sizes: dict[str, int]) -> dict[str, Any]:
    """All numbers of the embedded server, in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVE, directory, stdout=asyncio.subprocess.PIPE
        )
        if process.stdout is None:
            raise RuntimeError("the server has no output to read its address from")
        try:
            url, token = (await process.stdout.readline()).decode().split()
            ca = (Path(directory) / "pki" / "ca.crt").read_text()
            async with Client(Connection(url, token, ca)) as client:
                found = {"rates": await rates(client, count)}
                return {**found, "memory": await memory(client, process.pid, sizes)}
        finally:
            process.kill()
            await process.wait()


async def real(count: int) -> dict[str, float] | None:
    """The rates of a real API server; None without one."""
    with tempfile.TemporaryDirectory() as directory:
        provider = EnvtestProvider(Path(directory))
        try:
            control_plane = await provider.start()
        except ProviderError:
            return None
        try:
            async with Client(control_plane.connection) as client:
                return await rates(client, count)
        finally:
            await provider.stop()


@click.command()
@click.option("--json", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write the numbers there too.")
@click.option("--quick", is_flag=True, help="A tenth of everything.")
def main(target: Path | None, quick: bool) -> None:
    """Measure and print."""
    part = 10 if quick else 1
    count = 2000 // part
    sizes = {"nodes": 1000 // part, "pods": 10_000 // part, "jobs": 500 // part, "events": 200_000 // part}
    milliseconds = asyncio.run(start_up(3))
    ours, theirs = asyncio.run(embedded(count, sizes)), asyncio.run(real(count))
    rows = [
        (what, rate, theirs[what] if theirs else "-", rate / theirs[what] if theirs else "-")
        for what, rate in ours["rates"].items()
    ]
    table(f"Requests a second, {CLIENTS} clients", ("request", "embedded", "kube-apiserver", "ratio"), rows)
    title = f"Embedded server with {sizes['nodes']} nodes, {sizes['pods']} pods, {sizes['jobs']} jobs"
    full = ours["memory"]["full"]
    shown = [(what, f"{mib:.0f}", mib / full) for what, mib in ours["memory"].items() if "seen" not in what]
    table(title, ("resident memory", "MiB", "of full"), shown)
    table("Embedded server in process", ("start-up", "ms"), [("until it serves", milliseconds)])
    write_json(target, {"start_up_ms": milliseconds, "embedded": ours, "kube_apiserver": theirs, "sizes": sizes})


if __name__ == "__main__":
    main()
