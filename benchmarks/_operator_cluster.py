"""The cluster that the operator is measured on: nodes, namespaces, jobs and pods over the API, the operator by hand."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright_cli.child_processes import Program, Programs
from meshwright_cli.demo import setup
from meshwright_local.kube.client import ApiClient, ApiError
from meshwright_local.kube.resources import JOBS, NAMESPACES, NODES, PODS

GPUS = 8
PARALLEL = 32
"""Requests at the same time, in the raw measurement as in the operator."""


def node(number: int) -> KubeObject:
    capacity = {labels.GPU_RESOURCE: str(GPUS), "cpu": "64", "memory": "512Gi", "pods": "110"}
    name = f"bench-{number:04d}"
    wiring = {
        "kubernetes.io/hostname": name,
        "network.topology.nvidia.com/accelerator": name,
        "network.topology.nvidia.com/leaf": f"rack-{number // 16}",
        "nvidia.com/gpu.memory": "81920",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": wiring},
        "status": {
            "capacity": capacity,
            "allocatable": capacity,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }


def job(name: str, namespace: str, workers: int) -> KubeObject:
    """A job of so many workers with one GPU each."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": workers,
            "model": {"layers": 4, "hiddenSize": 256, "intermediateSize": 512, "heads": 4, "vocabSize": 320},
            "data": {"source": "PythonStdlib"},
            "training": {"steps": 1000, "globalBatchSize": workers, "sequenceLength": 64},
            "parallelism": {"tensor": 1, "pipeline": 1, "microBatches": 1},
            "workers": {"image": "meshwright-worker:0.1.0", "gpusPerWorker": 1},
        },
    }


async def at_once(calls: list[Awaitable[Any]], parallel: int = PARALLEL) -> None:
    """Awaits all, at most so many at the same time."""
    slots = asyncio.Semaphore(parallel)

    async def one(call: Awaitable[Any]) -> None:
        async with slots:
            await call

    await asyncio.gather(*(one(call) for call in calls))


METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class Bench:
    """A hand on the cluster."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client

    async def prepare(self, nodes: int) -> None:
        """The CRD and this many nodes."""
        await setup.install_crd(self.client)
        have = {item["metadata"]["name"] for item in (await self.client.list(NODES)).items}
        missing = [node(number) for number in range(nodes) if node(number)["metadata"]["name"] not in have]
        await at_once([self._put_node(body) for body in missing])

    async def nodes_accept_pods(self) -> bool:
        """Whether no node has taints: a new one has, until a controller has seen that it is ready."""
        return not any(item["spec"].get("taints") for item in (await self.client.list(NODES)).items)

    async def _put_node(self, body: KubeObject) -> None:
        await self.client.create(NODES, body)
        path = NODES.path(None, body["metadata"]["name"], "status")
        await self.client.request(
            "PATCH", path, body={"status": body["status"]}, content_type="application/merge-patch+json"
        )

    async def namespace(self, name: str) -> None:
        await self.client.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    async def count(self, namespace: str, **params: str) -> int:
        """How many pods there are, without reading them."""
        answer = await self.client.request("GET", PODS.path(namespace), params={"limit": "1", **params})
        return len(answer["items"]) + int(answer["metadata"].get("remainingItemCount") or 0)

    @asynccontextmanager
    async def pods_made(self, namespace: str, number: int) -> AsyncIterator[asyncio.Task[float]]:
        """Watches an empty namespace during the block. The result of the task is when it had this many pods.

        A watch of metadata costs the server little, and is exact. Polling takes calls from the server that is measured.
        """
        version = (await self.client.list(PODS, namespace)).resource_version
        watching = asyncio.Event()
        task = asyncio.create_task(self._pods_made(namespace, number, version, watching))
        await watching.wait()
        try:
            yield task
        finally:
            task.cancel()

    async def _pods_made(self, namespace: str, number: int, version: str, watching: asyncio.Event) -> float:
        url = self.client.connection.url + PODS.path(namespace)
        params = {"watch": "true", "resourceVersion": version}
        timeout = aiohttp.ClientTimeout(total=None)
        async with self.client.session.get(url, params=params, headers={"Accept": METADATA}, timeout=timeout) as answer:
            answer.raise_for_status()
            watching.set()
            rest, made = b"", 0
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                made += sum(orjson.loads(line)["type"] == "ADDED" for line in lines)
                if made >= number:
                    return time.monotonic()
        raise RuntimeError(f"the watch ended after {made} of {number} pods")

    async def unbound(self, namespace: str) -> int:
        """At least one when a pod has no node yet, else zero."""
        answer = await self.client.request(
            "GET", PODS.path(namespace), params={"limit": "1", "fieldSelector": "spec.nodeName="}
        )
        return len(answer["items"])

    async def clear(self, namespace: str) -> None:
        """Deletes jobs and pods and waits until they are gone. Thousands take the server longer than a request may."""

        async def empty() -> bool:
            for resource in (JOBS, PODS):
                with contextlib.suppress(TimeoutError):
                    await self.client.request("DELETE", resource.path(namespace), body={"gracePeriodSeconds": 0})
            return await self.count(namespace) == 0

        await until(empty, 600, 0.5)


async def until(check: Callable[[], Awaitable[bool]], seconds: float, pause: float = 0.02) -> float:
    """Waits until `check` holds; the monotonic time at which it did. A request that times out says nothing yet."""
    deadline = time.monotonic() + seconds
    while time.monotonic() <= deadline:
        with contextlib.suppress(TimeoutError):
            if await check():
                return time.monotonic()
        await asyncio.sleep(pause)
    raise TimeoutError(f"not in {seconds:.0f} s: {check.__qualname__}")


class Operator:
    """The operator as a process, and what its metrics say."""

    def __init__(self, program: Program, url: str, session: aiohttp.ClientSession) -> None:
        self.program = program
        self.url = url
        self._session = session

    async def metrics(self) -> str:
        """The metrics page; empty while there is none."""
        try:
            async with self._session.get(f"{self.url}/metrics") as response:
                return await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return ""

    async def quiet(self, since: float, jobs: int, seconds: float, still: float = 3.0) -> float:
        """Waits until it has reconciled so many times and then nothing for `still` seconds; when the last one was."""
        last, seen, deadline = time.monotonic(), 0.0, since + seconds
        while time.monotonic() < deadline:
            page = await self.metrics()
            runs = sum(series(page, "ptj_reconcile_duration_seconds_count"))
            if runs != seen or not page or sum(series(page, "ptj_workqueue_depth")) > 0:
                last, seen = time.monotonic(), runs
            elif runs >= jobs and time.monotonic() - last > still:
                return last
            await asyncio.sleep(0.05)
        raise TimeoutError(f"the operator did not settle in {seconds:.0f} s")

    def peak_mib(self) -> float:
        """The most memory it ever held."""
        text = Path(f"/proc/{self.program.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) / 1024


@asynccontextmanager
async def operator(directory: Path, kubeconfig: Path, *options: str) -> AsyncIterator[Operator]:
    """The operator until the block ends; it gives its lease back, so that the next one need not wait for it."""
    ports = setup.Ports()
    argv = [sys.executable, "-m", "meshwright_operator", "--kubeconfig", str(kubeconfig)]
    argv += ["--coordinator-listen", f"127.0.0.1:{ports.coordinator}", "--metrics-listen", f"127.0.0.1:{ports.metrics}"]
    argv += ["--lease-seconds", "60", "--log-level", "warning", *options]
    timeout = aiohttp.ClientTimeout(total=5)
    async with Programs() as programs, aiohttp.ClientSession(timeout=timeout) as session:
        program = await programs.start("operator", argv, directory / "operator.log")
        yield Operator(program, ports.metrics_url, session)


def series(page: str, name: str, *pairs: str) -> list[float]:
    """The values of a metric's series that carry these labels."""
    found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE)
    return [float(value) for given, value in found if all(pair in given for pair in pairs)]


def quantile(page: str, name: str, share: float, base: str = "") -> float:
    """A quantile of a histogram over all its labels, as Prometheus's histogram_quantile; since the page `base`."""
    totals: dict[float, float] = {}
    for sign, text in ((1, page), (-1, base)):
        for given, value in re.findall(rf"^{name}_bucket\{{(.*)\}} (\S+)$", text, re.MULTILINE):
            bound = re.search(r'le="([^"]+)"', given)
            assert bound is not None
            key = float(bound[1])
            totals[key] = totals.get(key, 0.0) + sign * float(value)
    bounds = sorted(totals)
    wanted, low, below = share * totals[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if totals[bound] >= wanted:
            if bound == float("inf"):
                return low
            inside = totals[bound] - below
            return low + (bound - low) * ((wanted - below) / inside if inside else 1.0)
        low, below = bound, totals[bound]
    return low


async def delete_quietly(client: ApiClient, path: str) -> None:
    try:
        await client.request("DELETE", path)
    except ApiError as error:
        if error.status != 404:
            raise
