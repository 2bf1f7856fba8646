"""Fewer reconciles run at once while the API server is slow because of them, and no key is lost or runs twice."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from kubernetes.aio.client import Configuration

from meshwright_operator.controller.http_server import serve_application
from meshwright_operator.kube import reconcile_limit
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import lease_path, pods_path
from meshwright_operator.kube.reconcile_limit import ReconcileLimit
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.settings import Address
from tests.operator.test_operator_parts import Server
from tests.patience import patient


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def observed(limit: ReconcileLimit, clock: Clock, seconds: float, during: float, resource: str = "pods") -> int:
    """What is allowed after creations took so long for a time, at 100 a second."""
    for _ in range(int(100 * during)):
        clock.now += 0.01
        limit.observe(resource, seconds)
    return limit.allowed


def test_a_saturated_server_gets_fewer_reconciles_and_more_again_when_it_is_fast() -> None:
    clock = Clock()
    limit = ReconcileLimit(8, clock)
    assert observed(limit, clock, 0.006, 2) == 8
    assert observed(limit, clock, 0.05, 5) == 2
    assert observed(limit, clock, 0.006, 5) == 8


def test_a_resource_with_a_webhook_is_not_compared_with_others() -> None:
    clock = Clock()
    limit = ReconcileLimit(8, clock)
    for _ in range(200):
        observed(limit, clock, 0.006, 0.01, "events")
        observed(limit, clock, 0.3, 0.03, "pods")
    assert limit.allowed == 8
    for _ in range(200):
        observed(limit, clock, 0.06, 0.01, "events")
        observed(limit, clock, 1.5, 0.03, "pods")
    assert limit.allowed == 2


def test_writes_that_always_take_long_are_no_sign_of_load() -> None:
    clock = Clock()
    limit = ReconcileLimit(8, clock)
    assert observed(limit, clock, 0.25, 300) == 8
    assert observed(limit, clock, 0.005, 1) == 8
    observed(limit, clock, 0.25, 10)
    assert observed(limit, clock, 0.25, 120) == 8, "a webhook was added: after a while its time is the best one"


def test_a_fast_server_is_not_called_slow_for_a_few_milliseconds() -> None:
    clock = Clock()
    limit = ReconcileLimit(8, clock)
    observed(limit, clock, 0.001, 2)
    assert observed(limit, clock, 0.015, 5) == 8


def test_a_single_worker_keeps_its_place() -> None:
    clock = Clock()
    limit = ReconcileLimit(1, clock)
    observed(limit, clock, 0.005, 2)
    assert observed(limit, clock, 5.0, 5) == 1


async def test_no_more_run_than_are_allowed_and_every_key_runs_once_at_a_time() -> None:
    limit = ReconcileLimit(8)
    limit.allowed = 2
    queue: WorkQueue[int] = WorkQueue(limit=limit)
    running, most, runs = set[int](), 0, Counter[int]()

    async def handler(key: int) -> None:
        nonlocal most
        assert key not in running
        running.add(key)
        most, runs[key] = max(most, len(running)), runs[key] + 1
        for other in range(12):
            if runs[other] == 0:
                queue.add(other)
        await asyncio.sleep(0.01)
        running.discard(key)

    for key in range(12):
        queue.add(key)
    task = asyncio.create_task(queue.run_many(8, handler))
    await asyncio.sleep(0.02)
    assert await queue.drain(patient(5)), "keys that wait for a place are finished too"
    task.cancel()
    assert most == 2
    assert runs == dict.fromkeys(range(12), 1)


async def test_a_long_reconcile_leaves_its_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = ReconcileLimit(8)
    limit.allowed = 2
    monkeypatch.setattr(reconcile_limit, "LONG_SECONDS", 0.05)
    queue: WorkQueue[str] = WorkQueue(limit=limit)
    small = asyncio.Event()
    done: list[str] = []

    async def handler(key: str) -> None:
        if key.startswith("large"):
            await small.wait()
        else:
            small.set()
        done.append(key)

    for key in ("large0", "large1", "small"):
        queue.add(key)
    task = asyncio.create_task(queue.run_many(8, handler))
    async with asyncio.timeout(patient(5)):
        await small.wait()
    assert await queue.drain(patient(5))
    task.cancel()
    assert done[0] == "small"


async def test_a_worker_that_is_cancelled_while_it_waits_passes_its_turn_on() -> None:
    limit = ReconcileLimit(1)
    order: list[str] = []
    leave = asyncio.Event()

    async def use(name: str) -> None:
        async with limit.place():
            order.append(name)
            await leave.wait()

    tasks = [asyncio.create_task(use(name)) for name in ("first", "second", "third")]
    await asyncio.sleep(0)
    leave.set()
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks, timeout=patient(5))
    assert order in (["first", "third"], ["first", "second", "third"])
    assert all(task.done() for task in tasks)


async def test_the_client_reports_how_long_creations_take_and_nothing_else() -> None:
    server = Server((201, {}), (409, {"reason": "AlreadyExists"}), (200, {}), (200, {}), (201, {}))
    created: list[str] = []
    async with serve_application(server.application(), Address("127.0.0.1", 0)) as port:
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{port}"
        cluster = KubeClient(
            configuration,
            OperatorMetrics(),
            timeout=patient(5),
            on_create=lambda resource, seconds: created.append(resource),
        )
        await cluster.create(pods_path("team"), {})
        with pytest.raises(ApiError):
            await cluster.create(pods_path("team"), {})
        await cluster.get(pods_path("team", "one"))
        await cluster.merge_patch(pods_path("team", "one"), {})
        await cluster.create(lease_path("team"), {})
        await cluster.close()
    assert created == ["pods"]
