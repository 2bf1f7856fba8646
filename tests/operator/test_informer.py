"""Watches with a scripted server: no event is missed, nothing is listed twice, no request is wasted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from kubernetes.aio.client import Configuration

from meshwright.api import labels
from meshwright_operator.controller.http_server import serve_application
from meshwright_operator.kube import informer, watches
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import KubeClient
from meshwright_operator.kube.informer import Informer, split_lines
from meshwright_operator.kube.paths import core_path, pods_path
from meshwright_operator.kube.pod_info import Pod, read_pod
from meshwright_operator.kube.resync import Resync
from meshwright_operator.kube.watch_liveness import WatchLiveness
from meshwright_operator.kube.watches import EventHandlers, watched_collections
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.settings import Address
from tests.patience import patient

KEY = JobKey("default", "train")


def pod(worker: int, version: int, phase: str = "Pending") -> dict[str, Any]:
    metadata = {
        "name": f"train-w{worker}-0",
        "namespace": "default",
        "uid": f"uid-{worker}",
        "resourceVersion": str(version),
        "labels": {labels.LABEL_JOB: "train"},
        "ownerReferences": [{"uid": "job", "controller": True}],
    }
    return {"metadata": metadata, "spec": {}, "status": {"phase": phase}}


def event(kind: str, obj: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def job(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "default", "uid": name, "resourceVersion": str(version)}}


def node(name: str, version: int, ready: str = "True") -> dict[str, Any]:
    metadata = {"name": name, "uid": name, "resourceVersion": str(version)}
    return {"metadata": metadata, "status": {"conditions": [{"type": "Ready", "status": ready}]}}


class Server:
    """One collection: listings and watches, each answered as the next entry of its script says."""

    def __init__(self, path: str = pods_path(None)) -> None:
        self.path = path
        self.lists: list[tuple[str, list[dict[str, Any]]]] = []
        self.watches: list[list[bytes] | int] = []
        """The pieces of a body, which then ends; or a code that refuses. After the last one watches stay silent."""
        self.asked: list[str] = []

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get(self.path, self._answer)
        return application

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            version, items = self.lists.pop(0)
            self.asked.append("list")
            return web.json_response({"metadata": {"resourceVersion": version}, "items": items})
        selector = labels.LABEL_JOB if self.path == pods_path(None) else None
        assert request.query.get("labelSelector") == selector
        self.asked.append(request.query["resourceVersion"])
        script = self.watches.pop(0) if self.watches else None
        if isinstance(script, int):
            return web.json_response({"code": script, "reason": "Expired"}, status=script)
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in script or ():
            await response.write(piece)
            await asyncio.sleep(0.01)
        if script is None:
            await asyncio.sleep(30)
        return response


class Parts:
    """A watch of pods, and all it works on."""

    def __init__(self, cluster: KubeClient, idle: float) -> None:
        self.cache, self.queue = Cache(), WorkQueue[JobKey]()
        metrics = OperatorMetrics()
        self.liveness = WatchLiveness(metrics, 60.0)
        self.liveness.track([pods_path(None)])
        self.resync = Resync(cluster, self.cache, self.queue, metrics, (), 60.0)
        handlers = EventHandlers(self.cache, self.queue, metrics)
        watched = {one.path: one for one in watched_collections(handlers, self.resync, ())}
        self.informers = {path: Informer(cluster, one, self.liveness, idle) for path, one in watched.items()}
        self.follower = self.informers[pods_path(None)]

    def phases(self) -> dict[int, str]:
        return {found.worker: found.phase for found in self.cache.pods(KEY, "job")}

    async def until(self, phases: dict[int, str]) -> None:
        task = asyncio.create_task(self.follower.run())
        try:
            async with asyncio.timeout(patient(5)):
                while self.phases() != phases:
                    assert not task.done(), task.exception()
                    await asyncio.sleep(0.01)
        finally:
            task.cancel()
            self.queue.close()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest_asyncio.fixture
async def cluster(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeClient]:
    monkeypatch.setattr(informer, "FIRST_PAUSE_SECONDS", 0.01)
    async with client_of(server) as found:
        yield found


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[KubeClient]:
    async with serve_application(server.application(), Address("127.0.0.1", 0)) as port:
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{port}"
        found = KubeClient(configuration, OperatorMetrics(), timeout=patient(5))
        yield found
        await found.close()


async def test_it_goes_on_where_the_listing_ended_and_where_a_watch_ended(server: Server, cluster: KubeClient) -> None:
    parts = Parts(cluster, idle=5.0)
    server.lists = [("7", [pod(0, 5)])]
    bookmark = event("BOOKMARK", {"metadata": {"resourceVersion": "20"}})
    added = event("ADDED", pod(1, 9))
    server.watches = [[added[:40], added[40:] + bookmark], [event("DELETED", pod(0, 21, "Failed"))], 503]
    await parts.resync.pods(None)
    await parts.until({1: "Pending"})
    assert server.asked[:3] == ["list", "7", "20"], "nothing is listed twice"


async def test_one_that_is_too_far_behind_lists_anew_and_sees_what_vanished(
    server: Server, cluster: KubeClient
) -> None:
    parts = Parts(cluster, idle=5.0)
    parts.cache.put_job({"metadata": {"name": "train", "namespace": "default", "uid": "job", "resourceVersion": "1"}})
    server.lists = [("7", [pod(0, 5), pod(1, 6)]), ("30", [pod(1, 25, "Running")]), ("40", [pod(1, 39, "Failed")])]
    server.watches = [[event("ERROR", {"code": 410, "reason": "Expired", "message": "too old"})], 410]
    await parts.until({1: "Failed"})
    assert server.asked[:5] == ["list", "7", "list", "30", "list"]
    assert len(parts.queue) == 1, "the job is looked at"


async def test_what_makes_no_sense_costs_a_connection_at_most(server: Server, cluster: KubeClient) -> None:
    parts = Parts(cluster, idle=5.0)
    server.lists = [("7", [])]
    odd = pod(3, 8)
    odd["metadata"] |= {"labels": 7, "name": ["train-w3-0"], "uid": {}}
    server.watches = [
        [event("ADDED", odd), event("ADDED", pod(0, 9)), b"no json\n"],
        [b'{"type": "ADDED", "object": {"metadata": {}}}\n'],
        [b'{"type": "ERROR"}\n'],
        [b'{"type": "ERROR", "object": {"code": "many"}}\n'],
        [b'["ADDED"]\n'],
        [event("ADDED", pod(1, 10))],
    ]
    await parts.until({0: "Pending", 1: "Pending"})
    assert server.asked[:7] == ["list", "7", "9", "9", "9", "9", "9"]


async def test_a_silent_one_is_connected_again(server: Server, cluster: KubeClient) -> None:
    parts = Parts(cluster, idle=0.2)
    server.lists = [("7", [])]
    await follow(parts, pods_path(None), lambda: server.asked.count("7") >= 2)
    assert server.asked[0] == "list"


async def test_lines_are_whole_however_they_arrive() -> None:
    class Content:
        async def iter_any(self) -> AsyncIterator[bytes]:
            for piece in (b"a", b"b\nc\n\nd", b"", b"e", b"f\n", b"g"):
                yield piece

    heard: list[None] = []
    found = [line async for line in split_lines(Content(), lambda: heard.append(None))]  # type: ignore[arg-type]
    assert found == [b"ab", b"c", b"", b"def"]
    assert len(heard) == 6


async def test_an_event_that_repeats_what_is_known_is_not_read_again(
    server: Server, cluster: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(cluster, idle=5.0)
    server.lists = [("7", [pod(0, 5), pod(1, 6)])]
    server.watches = [
        [event("ADDED", pod(0, 5)), event("ADDED", pod(1, 6)), event("MODIFIED", pod(0, 8, "Running"))],
        [event("DELETED", pod(1, 6)), event("MODIFIED", pod(0, 9, "Failed"))],
    ]
    await parts.resync.pods(None)
    read: list[str] = []

    def reading(obj: dict[str, Any]) -> Pod | None:
        read.append(obj["metadata"]["resourceVersion"])
        return read_pod(obj)

    monkeypatch.setattr(watches, "read_pod", reading)
    await parts.until({0: "Failed"})
    assert read == ["8", "6", "9"], "a deletion always counts"


async def follow(parts: Parts, path: str, until: Callable[[], bool]) -> None:
    task = asyncio.create_task(parts.informers[path].run())
    try:
        async with asyncio.timeout(patient(5)):
            while not until():
                assert not task.done(), task.exception()
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        parts.queue.close()


async def test_a_node_that_changed_while_its_watch_was_down_queues_every_job(
    server: Server, cluster: KubeClient
) -> None:
    server.path = core_path(None, "nodes")
    async with client_of(server) as nodes_server:
        parts = Parts(nodes_server, idle=5.0)
        parts.cache.put_job(job("train", 1))
        server.lists = [("7", [node("n0", 3), node("n1", 4)]), ("30", [node("n0", 25, "False")])]
        server.watches = [410]
        await parts.resync.nodes()
        parts.queue.pause()
        assert set(parts.cache.nodes) == {"n0", "n1"}
        parts.queue.resume()
        await follow(parts, core_path(None, "nodes"), lambda: set(parts.cache.nodes) == {"n0"})
    assert server.asked[:3] == ["list", "7", "list"]
    assert len(parts.queue) == 1
