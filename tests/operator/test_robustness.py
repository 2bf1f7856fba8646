"""What keeps an operator from doing harm when others misbehave: fence, patience, draining, folding, stale watches."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import web

from meshwright_operator import logging_config
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import ApiError, FencedError, KubeClient, _retry_after
from meshwright_operator.kube.fence import Fence
from meshwright_operator.kube.job_event import JobEvent
from meshwright_operator.kube.leader_election import RENEW_DEADLINE_FRACTION, LeaderElector, LeaseLostError
from meshwright_operator.kube.paths import core_path, jobs_path, lease_path, pods_path
from meshwright_operator.kube.recorder import COMBINED_PREFIX, MAX_DISTINCT_MESSAGES, EventRecorder
from meshwright_operator.kube.watch_liveness import WatchLiveness
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.operator_metrics import OperatorMetrics
from tests.operator.test_operator_parts import Server, with_cluster
from tests.patience import patient, until

ASKED = {"metadata": {"name": "train", "namespace": "default", "uid": "u"}}


def fenced(cluster: KubeClient, fence: Fence) -> KubeClient:
    cluster._fence = fence
    return cluster


async def test_a_write_passes_only_an_open_fence_and_ends_with_it() -> None:
    fence = Fence()
    server = Server((200, {}), (201, {}), (200, {}))

    async def use(cluster: KubeClient) -> None:
        fenced(cluster, fence)
        await cluster.get("/api/v1/x")
        with pytest.raises(FencedError, match="another operator may hold the lease"):
            await cluster.create("/api/v1/pods", {})
        fence.extend(time.monotonic() + 5)
        await cluster.create("/api/v1/pods", {})
        fence.close()
        with pytest.raises(FencedError):
            await cluster.delete("/api/v1/pods/a", "uid")
        await cluster.replace(lease_path("default", "l"), {})

    await with_cluster(server, use)
    assert [method for method, _, _ in server.requests] == ["GET", "POST", "PUT"], "the lease itself is not fenced"


async def test_a_write_that_hangs_is_given_up_at_the_deadline_of_the_lease() -> None:
    fence = Fence()

    async def use(cluster: KubeClient) -> None:
        fenced(cluster, fence).__dict__["_timeout"] = 3600.0
        fence.extend(time.monotonic() + 0.3)
        async with asyncio.timeout(patient(10)):
            with pytest.raises(ApiError):
                await cluster.create("/api/v1/pods", {})

    class Silent(Server):
        async def _handle(self, request):  # type: ignore[no-untyped-def]
            await asyncio.sleep(3600)

    await with_cluster(Silent(), use)


@pytest.mark.parametrize("renewed", [True, False])
async def test_renewals_move_the_fence_and_a_leader_that_cannot_renew_gives_up_first(*, renewed: bool) -> None:
    fence = Fence()
    seconds = patient(60)
    mine = {"metadata": {"name": "l"}, "spec": {"holderIdentity": "me", "leaseDurationSeconds": round(seconds)}}
    server = Server((404, {}), (201, mine))

    async def use(cluster: KubeClient) -> None:
        elector = LeaderElector(cluster, fence, "default", "l", "me", seconds)
        await elector.acquire()
        if renewed:
            assert 0 < fence.seconds_left() <= RENEW_DEADLINE_FRACTION * seconds
            return
        server.answers += [(500, {})] * 50
        # Only now, so that no slow answer costs the lease that is to be lost.
        elector._seconds, elector._fence = 1.0, Fence()
        elector._fence.extend(time.monotonic() + RENEW_DEADLINE_FRACTION)
        with pytest.raises(LeaseLostError, match="not renewed"):
            await elector.renew_until_lost()
        assert elector._fence.seconds_left() <= 0

    await with_cluster(server, use)


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_the_server_says_how_long_to_wait_and_every_call_waits(form: str) -> None:
    asked: list[float] = []

    class Busy(Server):
        async def _handle(self, request: web.Request) -> web.Response:
            now = datetime.now(UTC)
            asked.append(time.monotonic())
            date = format_datetime(now + timedelta(seconds=3), usegmt=True)
            self.headers = {"Retry-After": "2" if form == "seconds" else date}
            return await super()._handle(request)

    server = Busy((429, {}), (200, {}), (200, {}))

    async def use(cluster: KubeClient) -> None:
        first = asyncio.create_task(cluster.get("/api/v1/x"))
        await until(lambda: cluster._lane.backoff_until > 0)
        await cluster.get("/api/v1/y")
        await first

    await with_cluster(server, use)
    told, *later = asked
    assert len(later) == 2
    assert all(moment - told > 1.9 for moment in later), "one call was told to wait, and all of them do"


@pytest.mark.parametrize("body", [b"<html>Back soon</html>", b"", b"[]", b'"ok"', b'{"status": "ok"}'])
async def test_a_response_of_a_proxy_is_no_empty_list(body: bytes) -> None:
    """An empty list would remove every job and pod from the cache."""

    class Proxy(Server):
        async def _handle(self, request: web.Request) -> web.Response:
            return web.Response(status=200, body=body)

    async def use(cluster: KubeClient) -> None:
        with pytest.raises(ApiError) as error:
            _ = [page async for page in cluster.pages(pods_path("default"))]
        assert (error.value.code, error.value.reason) == (0, "InvalidResponse")

    await with_cluster(Proxy(), use)


async def test_an_answer_of_any_length_becomes_a_short_error() -> None:
    answer = {"reason": "R" * 10_000, "message": f'admission webhook "w" denied the request: {"no " * 100_000}'}
    server = Server((403, answer))

    async def use(cluster: KubeClient) -> ApiError:
        with pytest.raises(ApiError) as error:
            await cluster.create("/api/v1/pods", {})
        return error.value

    error = await with_cluster(server, use)
    assert (len(error.reason), len(error.message)) == (64, 600)
    assert error.message.startswith('admission webhook "w" denied')


@pytest.mark.parametrize("text", ["²", "9" * 400, "soon", "Mon, 99 Jan 2026 00:00:00 GMT"])
async def test_a_delay_that_is_no_number_of_seconds_harms_nobody(text: str) -> None:
    found = _retry_after(text, "")
    assert found is None or found > 0


async def test_a_drained_queue_ends_what_runs_and_begins_nothing() -> None:
    queue: WorkQueue[str] = WorkQueue()
    ended: list[str] = []
    entered = asyncio.Event()

    async def handler(key: str) -> None:
        entered.set()
        await asyncio.sleep(0.1)
        queue.add(f"{key}-again")
        queue.add_after(f"{key}-later", 0.01)
        ended.append(key)

    task = asyncio.create_task(queue.run_many(2, handler))
    queue.add("a")
    await entered.wait()
    assert await queue.drain(patient(5))
    await asyncio.sleep(0.05)
    assert ended == ["a"]
    assert len(queue) == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_draining_does_not_wait_for_ever() -> None:
    queue: WorkQueue[str] = WorkQueue()
    entered = asyncio.Event()

    async def handler(key: str) -> None:
        entered.set()
        await asyncio.sleep(3600)

    task = asyncio.create_task(queue.run(handler))
    queue.add("stuck")
    await entered.wait()
    assert not await queue.drain(0.1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_flood_of_similar_events_becomes_one() -> None:
    flood = 5
    server = Server(*[(201, {})] * (MAX_DISTINCT_MESSAGES + 1), *[(200, {})] * (flood - 1))
    metrics = OperatorMetrics()

    async def post(cluster: KubeClient) -> None:
        recorder = EventRecorder(cluster, "test", metrics)
        for number in range(MAX_DISTINCT_MESSAGES + flood):
            recorder.post(ASKED, JobEvent("PodLost", f"pod {number} is gone"))
        await recorder.flush(patient(10))

    await with_cluster(server, post)
    methods = [method for method, _, _ in server.requests]
    assert methods == ["POST"] * (MAX_DISTINCT_MESSAGES + 1) + ["PATCH"] * (flood - 1)
    last = server.requests[-1][2]
    assert last["count"] == flood
    assert last["message"] == f"{COMBINED_PREFIX}pod {MAX_DISTINCT_MESSAGES + flood - 1} is gone"
    assert 'ptj_events_total{result="posted"} 15.0' in metrics.exposition().decode()


async def test_an_event_that_cannot_be_posted_is_counted_and_harms_nothing() -> None:
    server = Server((403, {"message": "no"}), (201, {}))
    metrics = OperatorMetrics()

    async def post(cluster: KubeClient) -> None:
        recorder = EventRecorder(cluster, "test", metrics)
        recorder.post(ASKED, JobEvent("Placed", "one"))
        recorder.post(ASKED, JobEvent("Placed", "two"))
        await recorder.flush(patient(5))

    await with_cluster(server, post)
    page = metrics.exposition().decode()
    assert 'result="failed"} 1.0' in page
    assert 'result="posted"} 1.0' in page


def test_a_silent_watch_is_stale_and_a_bookmark_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    metrics = OperatorMetrics()
    liveness = WatchLiveness(metrics, stale_after=60.0)
    watches = [core_path(None, "nodes"), jobs_path(None), pods_path("red")]
    liveness.track(watches)
    assert liveness.stale() == []
    now += 61.0
    assert liveness.stale() == watches
    liveness.seen(jobs_path(None))
    assert liveness.stale() == [watches[0], watches[2]]
    assert 'last_contact_timestamp_seconds{resource="paralleltrainingjobs"}' in metrics.exposition().decode()


def test_a_stale_watch_of_one_namespace_shows_beside_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "time", lambda: 1000.0 + now)
    metrics = OperatorMetrics()
    liveness = WatchLiveness(metrics, stale_after=60.0)
    liveness.track([pods_path("red"), pods_path("blue"), jobs_path("red")])
    now = 500.0
    liveness.seen(pods_path("blue"))
    liveness.seen(jobs_path("red"))
    page = metrics.exposition().decode()
    assert 'last_contact_timestamp_seconds{resource="pods"} 1100.0' in page
    assert 'last_contact_timestamp_seconds{resource="paralleltrainingjobs"} 1500.0' in page


def test_every_line_of_a_reconcile_says_which_job_it_is_about() -> None:
    record = logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "a pod is gone", "reason": "PodLost"})
    with logging_config.log_context(job=str(JobKey("default", "train")), generation=3):
        line = logging_config.JsonFormatter().format(record)
        text = logging_config.TextFormatter().format(record)
    parsed = json.loads(line)
    assert {key: parsed[key] for key in ("level", "message", "job", "generation", "reason")} == {
        "level": "info",
        "message": "a pod is gone",
        "job": "default/train",
        "generation": 3,
        "reason": "PodLost",
    }
    assert "\n" not in line
    assert text.endswith("info    a pod is gone job=default/train generation=3 reason=PodLost")
    assert "job" not in json.loads(logging_config.JsonFormatter().format(record))


def test_a_traceback_stays_inside_of_its_json_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    line = logging_config.JsonFormatter().format(logging.makeLogRecord({"msg": "failed", "exc_info": info}))
    assert "\n" not in line
    assert "ValueError: broken" in json.loads(line)["traceback"]


async def test_the_queue_tells_how_long_jobs_waited_and_how_often_they_failed() -> None:
    metrics = OperatorMetrics()
    queue: WorkQueue[str] = WorkQueue(metrics)
    metrics.queue_depth(lambda: len(queue))
    queue.add("a")
    assert "ptj_workqueue_depth 1.0" in metrics.exposition().decode()

    async def fails(key: str) -> None:
        task.cancel()  # before it is tried again
        raise ValueError(key)

    task = asyncio.create_task(queue.run(fails))
    await asyncio.gather(task, return_exceptions=True)
    queue.close()
    page = metrics.exposition().decode()
    assert "ptj_workqueue_wait_seconds_count 1.0" in page
    assert "ptj_workqueue_retries_total 1.0" in page
    assert "ptj_workqueue_depth 0.0" in page
