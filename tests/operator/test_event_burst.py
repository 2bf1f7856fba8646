"""Many events at once, and an API server that takes long for them: no job waits, and the newest event is posted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from meshwright_operator.controller.pod_events import PodEvents
from meshwright_operator.decide.observed import Observed
from meshwright_operator.kube import recorder as recorder_module
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import EVENTS_IN_FLIGHT, ApiError, KubeClient, Page
from meshwright_operator.kube.event_backlog import MOST_WAITING, EventBacklog, QueuedEvent
from meshwright_operator.kube.job_event import JobEvent
from meshwright_operator.kube.recorder import COMBINED_PREFIX, POSTED_AT_ONCE, EventRecorder
from meshwright_operator.operator_metrics import OperatorMetrics
from tests.operator.agents import Kubelet
from tests.operator.builders import NOW
from tests.operator.conftest import Settled, StartOperator
from tests.operator.proxy import Proxy
from tests.operator.support import JOBS, Api, job, until, write_kubeconfig
from tests.operator.test_missing_inputs import waiting_pod
from tests.patience import patient

FAILING, EVENTS_OF_EACH = 100, 30


def queued(uid: str, number: int) -> QueuedEvent:
    return QueuedEvent("default", uid, uid, JobEvent("PodLost", f"{uid} {number}"), NOW)


def messages(backlog: EventBacklog) -> list[str]:
    """What waits, in the order in which it would be posted."""
    found = []
    while (event := backlog.take()) is not None:
        found.append(event.event.message)
        backlog.done(event)
    return found


def test_events_of_a_job_stay_in_order_and_those_of_others_go_past() -> None:
    backlog = EventBacklog()
    for uid, number in (("a", 1), ("a", 2), ("b", 1), ("a", 3)):
        assert backlog.put(queued(uid, number)) is None
    first = backlog.take()
    assert first is not None
    assert first.event.message == "a 1"
    second = backlog.take()
    assert second is not None
    assert second.event.message == "b 1", "one of a is being posted"
    assert backlog.take() is None
    backlog.done(first)
    backlog.done(second)
    assert messages(backlog) == ["a 2", "a 3"]


def test_a_full_backlog_drops_the_oldest_event_of_the_same_job() -> None:
    backlog = EventBacklog(3)
    for uid, number in (("quiet", 1), ("loud", 1), ("loud", 2)):
        backlog.put(queued(uid, number))
    dropped = backlog.put(queued("loud", 3))
    assert dropped is not None
    assert dropped.event.message == "loud 1"
    dropped = backlog.put(queued("new", 1))
    assert dropped is not None
    assert dropped.event.message == "quiet 1", "the oldest of all, because none is its own"
    assert messages(backlog) == ["loud 2", "loud 3", "new 1"]


class Slow:
    """An API server that answers calls about events only when it may, and others at once."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.waiting = 0
        self.most_waiting = 0
        self.posted: list[str] = []
        self.refuses_events = False

    async def handle(self, request: web.Request) -> web.Response:
        if "/events" not in request.path:
            return web.json_response({"metadata": {"name": "made"}}, status=201 if request.method == "POST" else 200)
        if self.refuses_events:
            return web.json_response({"message": "no"}, status=429, headers={"Retry-After": "50"})
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        await self.may_answer.wait()
        self.waiting -= 1
        self.posted.append((await request.json())["message"])
        return web.json_response({}, status=201)

    async def serve(self, use: Callable[[KubeClient], Awaitable[None]], **options: Any) -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host = f"http://127.0.0.1:{runner.addresses[0][1]}"
        client = KubeClient(Configuration(host=host), OperatorMetrics(), timeout=patient(60), **options)
        try:
            await use(client)
        finally:
            await client.close()
            await runner.cleanup()


async def test_a_burst_over_a_slow_api_keeps_no_call_waiting_and_loses_no_newest_event() -> None:
    server, metrics, created = Slow(), OperatorMetrics(), Counter[str]()

    async def burst(client: KubeClient) -> None:
        recorder = EventRecorder(client, "test", metrics)
        running = asyncio.create_task(recorder.run())
        jobs = [{"metadata": {"name": f"job-{n}", "namespace": "default", "uid": f"uid-{n}"}} for n in range(FAILING)]
        for number in range(EVENTS_OF_EACH):
            for body in jobs:
                recorder.post(body, JobEvent("PodLost", f"{body['metadata']['name']} event {number}"))

        async def busy() -> bool:
            return server.waiting == POSTED_AT_ONCE

        await until(busy, "as many calls as may be made at once")
        assert len(recorder._backlog) <= MOST_WAITING
        async with asyncio.timeout(patient(20)):
            await asyncio.gather(*(client.get("/api/v1/x") for _ in range(40)))
            await client.create("/api/v1/namespaces/default/pods", {})
        assert not server.posted, "no event call has ended, and none of the others waited for one"
        server.may_answer.set()
        await recorder.flush(patient(60))
        posted = {text.removeprefix(COMBINED_PREFIX) for text in server.posted}
        newest = {f"job-{n} event {EVENTS_OF_EACH - 1}" for n in range(FAILING)}
        assert newest <= posted, "also those that were being posted when the flush began"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    await server.serve(burst, on_create=lambda resource, seconds: created.update([resource]))
    assert server.most_waiting <= EVENTS_IN_FLIGHT
    assert created == {"pods": 1}, "the time of events says nothing about how many reconciles may run"
    dropped = FAILING * EVENTS_OF_EACH - MOST_WAITING
    page = metrics.exposition().decode()
    assert f'ptj_events_total{{result="dropped"}} {float(dropped)}' in page


async def test_a_server_that_limits_events_delays_no_other_call() -> None:
    server = Slow()
    server.refuses_events = True

    async def use(client: KubeClient) -> None:
        recorder = EventRecorder(client, "test", OperatorMetrics())
        running = asyncio.create_task(recorder.run())
        recorder.post({"metadata": {"name": "a", "uid": "u"}}, JobEvent("Placed", "placed"))

        async def backing_off() -> bool:
            return client._event_lane.backoff_until > 0

        await until(backing_off, "the server has said how long to wait")
        assert client._lane.backoff_until == 0.0
        async with asyncio.timeout(patient(20)):
            await client.get("/api/v1/x")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    await server.serve(use)


class Flaky(KubeClient):
    """An API server that answers calls with these errors, one after the other, and then well."""

    def __init__(self, *errors: ApiError) -> None:
        self.errors = list(errors)
        self.calls: list[str] = []

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(str(body["metadata"]["name"]))
        if self.errors:
            raise self.errors.pop(0)
        return body


@pytest.mark.parametrize(
    ("codes", "calls", "result"),
    [((0, 503, 429), 4, "posted"), ((0, 409), 2, "posted"), ((403,), 1, "failed"), ((500,) * 9, 6, "failed")],
    ids=["restart", "answer lost", "forbidden", "broken"],
)
async def test_an_event_survives_a_restart_of_the_server(
    codes: tuple[int, ...], calls: int, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(recorder_module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    client, metrics = Flaky(*(ApiError(code, "No", "no") for code in codes)), OperatorMetrics()
    recorder = EventRecorder(client, "test", metrics)
    running = asyncio.create_task(recorder.run())
    recorder.post({"metadata": {"name": "a", "uid": "u"}}, JobEvent("Placed", "placed"))
    counted = f'ptj_events_total{{result="{result}"}} 1.0'

    async def over() -> bool:
        return counted in metrics.exposition().decode()

    await until(over, result)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(client.calls) == calls
    assert len(set(client.calls)) == 1, "a retry has the same name, so that it is not posted twice"
    assert pauses == list(recorder_module.RETRY_SECONDS[: calls - 1])


class SlowPages(KubeClient):
    """An API server that lists events only when it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.asked = 0

    async def pages(self, path: str, **query: str) -> AsyncIterator[Page]:
        self.asked += 1
        await self.may_answer.wait()
        yield Page([{"reason": "FailedMount", "message": "no such volume"}], "")


def problem(explained: Observed) -> str:
    """What is wrong with the pod of the first worker."""
    pod = explained.workers[0].pod
    assert pod is not None
    return pod.problem


async def test_no_reconcile_waits_for_the_events_of_a_pod() -> None:
    client, woken, key = SlowPages(), asyncio.Queue[JobKey](), JobKey("default", "job")
    events = PodEvents(client, woken.put_nowait)
    for seconds in (20, 40):
        explained, _ = await events.explain(key, waiting_pod(seconds))
        assert not problem(explained)
    assert client.asked == 1, "the first reading goes on"
    client.may_answer.set()
    async with asyncio.timeout(patient(10)):
        assert await woken.get() == key
    explained, _ = await events.explain(key, waiting_pod(21))
    assert problem(explained) == "FailedMount: no such volume"
    assert woken.empty()


class NoEventsProxy(Proxy):
    """Keeps calls about events waiting until they may pass."""

    def __init__(self, target: str, session: aiohttp.ClientSession) -> None:
        super().__init__(target, session)
        self.may_pass = asyncio.Event()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if "/events" in request.path:
            await self.may_pass.wait()
        return await super()._forward(request)


async def test_jobs_start_and_recover_while_no_event_can_be_posted(
    api: Api, kubelet: Kubelet, session: aiohttp.ClientSession, start_operator: StartOperator, settled: Settled,
    operators_token: str, tmp_path: Path,
) -> None:  # fmt: skip
    proxy = NoEventsProxy(api.url, session)
    async with proxy.serving():
        await start_operator(kubeconfig=write_kubeconfig(tmp_path / "behind", proxy.url, operators_token))
        await api.create(JOBS, job("train"))
        await settled("train")
        await kubelet.crash(kubelet.of("train")[0].pod)

        async def restarted() -> bool:
            return int((await api.status("train")).get("restartCount", 0)) == 1

        await until(restarted, "the crash is counted")
        await settled("train")
        assert await api.reasons("train") == []
        proxy.may_pass.set()
        await api.posted("train", "Placed", "Recovered")
