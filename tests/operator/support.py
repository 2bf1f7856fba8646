"""A hand on the API server, and the operator in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright_operator.controller.manager import run
from meshwright_operator.settings import Address, Settings
from tests import definition
from tests.operator.loop_watchdog import watch_this_thread
from tests.patience import patient

ROOT = Path(__file__).parent.parent.parent
JOBS = f"/apis/{labels.GROUP}/{labels.VERSION}/namespaces/default/{labels.PLURAL}"
PODS = "/api/v1/namespaces/default/pods"
MERGE = "application/merge-patch+json"


class Api:
    """A few requests to the API server, as an administrator."""

    def __init__(self, url: str, token: str | None, session: aiohttp.ClientSession, ca_pem: str = "") -> None:
        self.url = url
        self.ca_pem = ca_pem
        """The server's authority; empty if it is not known."""
        self.token = token
        self._session = session
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def call(
        self, method: str, path: str, body: object = None, *, kind: str = "application/json", ok: bool = True
    ) -> KubeObject:
        headers = {**self._headers, "Content-Type": kind}
        async with self._session.request(method, self.url + path, json=body, headers=headers, ssl=False) as response:
            # A path that the API server does not serve yet is answered with plain text.
            is_json = response.content_type == "application/json"
            answer: KubeObject = await response.json() if is_json else {"message": await response.text()}
            if ok:
                assert response.status < 300, (method, path, response.status, answer)
            return answer

    async def get(self, path: str) -> KubeObject:
        return await self.call("GET", path)

    async def items(self, path: str) -> list[KubeObject]:
        return list((await self.get(path))["items"])

    async def create(self, path: str, body: object) -> KubeObject:
        return await self.call("POST", path, body)

    async def patch(self, path: str, body: object) -> KubeObject:
        return await self.call("PATCH", path, body, kind=MERGE)

    async def delete(self, path: str, grace: int | None = None) -> None:
        await self.call("DELETE", path, {"gracePeriodSeconds": grace} if grace is not None else {}, ok=False)

    async def job(self, name: str) -> KubeObject:
        return await self.get(f"{JOBS}/{name}")

    async def status(self, name: str) -> KubeObject:
        status: KubeObject = (await self.job(name)).get("status") or {}
        return status

    async def pods(self, job: str) -> list[KubeObject]:
        return await self.items(f"{PODS}?labelSelector={labels.LABEL_JOB}={job}")

    async def events(self, job: str) -> list[KubeObject]:
        events = await self.items("/api/v1/namespaces/default/events")
        return [event for event in events if event["involvedObject"]["name"] == job]

    async def reasons(self, job: str) -> list[str]:
        return [event["reason"] for event in await self.events(job)]

    async def posted(self, job: str, *reasons: str) -> list[KubeObject]:
        """The job's events of these reasons, once each has one: events are posted after the status is written."""

        async def all_there() -> bool:
            return set(reasons) <= set(await self.reasons(job))

        await until(all_there, f"{job} has the events {', '.join(reasons)}")
        return [event for event in await self.events(job) if event["reason"] in reasons]


async def until(check: Callable[[], Awaitable[Any]], what: str, seconds: float = 30.0) -> Any:
    """Waits until `check` gives something true, and gives that.

    The pause between two checks grows to 0.1 s: checks took a fifth of the CPU time of a test that waits for long.
    """
    now = asyncio.get_running_loop().time
    started = now()
    while True:
        if found := await check():
            return found
        waited = now() - started
        if waited > patient(seconds):
            raise AssertionError(f"not in {seconds} s: {what}")
        await asyncio.sleep(min(0.03 + waited / 20, 0.1))


def condition(status: Mapping[str, Any], kind: str) -> KubeObject:
    found: KubeObject = next((c for c in status.get("conditions") or () if c["type"] == kind), {})
    return found


def node(name: str, rack: str, gpus: int = 2) -> KubeObject:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "network.topology.nvidia.com/leaf": rack},
        },
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus), "cpu": "64", "memory": "256Gi", "pods": "110"},
            "capacity": {"nvidia.com/gpu": str(gpus), "cpu": "64", "memory": "256Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }


def job(name: str, **spec: Any) -> KubeObject:
    """Two tensor-parallel ranks by two stages by two replicas: eight ranks in four pods."""
    whole: KubeObject = {
        "replicas": 2,
        "model": {
            "layers": 4,
            "hiddenSize": 64,
            "intermediateSize": 128,
            "heads": 4,
            "kvHeads": 2,
            "vocabSize": 320,
        },
        "data": {"source": "PythonStdlib"},
        "training": {"steps": 50, "globalBatchSize": 8, "sequenceLength": 64},
        "parallelism": {"tensor": 2, "pipeline": 2, "microBatches": 2},
        "workers": {"image": "meshwright/worker", "gpusPerWorker": 2},
        **spec,
    }
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "metadata": {"name": name},
        "spec": whole,
    }


async def install(api: Api) -> None:
    """The CRD and four nodes in two racks."""
    await api.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition.committed(), ok=False)
    for name, rack in (("n0", "r0"), ("n1", "r0"), ("n2", "r1"), ("n3", "r1")):
        await put_node(api, node(name, rack))

    async def served() -> bool:
        with contextlib.suppress(aiohttp.ContentTypeError):  # until then a real server answers in plain text
            return "items" in await api.call("GET", JOBS, ok=False)
        return False

    await until(served, "the CRD is served")


async def put_node(api: Api, body: KubeObject) -> None:
    """A node with its status, new or as before."""
    await api.call("POST", "/api/v1/nodes", body, ok=False)
    await api.patch(f"/api/v1/nodes/{body['metadata']['name']}/status", {"status": body["status"]})
    # A real API server taints every new node until a controller has seen it ready; there is none here.
    await api.patch(f"/api/v1/nodes/{body['metadata']['name']}", {"spec": {"taints": None}})


def write_kubeconfig(path: Path, url: str, token: str | None, ca_pem: str = "") -> Path:
    """A kubeconfig for a server with this authority. Without one, each client reads those of the system."""
    user = {"token": token} if token else {}
    cluster: KubeObject = {"server": url, "insecure-skip-tls-verify": url.startswith("https")}
    if ca_pem:
        authority = path.with_name(f"{path.name}.crt")
        authority.write_text(ca_pem)
        cluster = {"server": url, "certificate-authority": str(authority)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": user}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


class OperatorThread:
    """The operator, whole, in a thread of its own: kopf takes every task of its event loop for its own."""

    def __init__(self, kubeconfig: Path, directory: Path, coordinator_port: int, **settings: Any) -> None:
        self.settings = Settings(
            kubeconfig=kubeconfig,
            coordinator_listen=Address("127.0.0.1", coordinator_port),
            **{
                "key_file": directory / "coordinator.key",
                "tls": "disabled",
                "metrics_listen": Address("127.0.0.1", 0),
                "identity": "test",
                "lease_seconds": 60.0,  # one interpreter holds server and agents too
                "resync_seconds": 5.0,
                **settings,
            },
        )
        self.ready = threading.Event()
        self.failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._main, daemon=True)

    async def start(self, wait: bool = True) -> OperatorThread:
        self._thread.start()
        if wait:
            async with asyncio.timeout(patient(20)):
                while self.alive and not await asyncio.to_thread(self.ready.wait, 0.1):
                    pass
            assert self.ready.is_set(), self.failure
        return self

    @property
    def alive(self) -> bool:
        """Whether it has not exited."""
        return self._thread.is_alive()

    @property
    def tasks(self) -> set[str]:
        """The names of everything that runs in its event loop."""
        return {task.get_name() for task in asyncio.all_tasks(self._loop)}

    async def stop(self) -> None:
        self._stopping = True
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join, patient(15))
        assert not self._thread.is_alive(), self._what_runs()

    def _what_runs(self) -> str:
        """The stacks of its tasks and of its thread."""
        text = io.StringIO()
        for task in asyncio.all_tasks(self._loop):
            task.print_stack(file=text)
        frame = sys._current_frames().get(self._thread.ident or 0)
        traceback.print_stack(frame, file=text)
        return text.getvalue()

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:  # noqa: BLE001 - shown by the test that waits for it
            # The sockets of a process that dies are closed. Here, the frames of the error would hold them.
            self.failure = error.with_traceback(None)
            gc.collect()

    async def _run(self) -> None:
        watch_this_thread(self.ready)
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self._stopping:
            self._stop.set()
        await run(self.settings, self._stop, self.ready.set)
