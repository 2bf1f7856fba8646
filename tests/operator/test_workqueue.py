"""The queue: no change lost, no key twice at once, one bad key harms itself alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from meshwright_operator.kube.workqueue import WorkQueue
from tests.patience import until


async def drain(
    queue: WorkQueue[str],
    handler: Callable[[str], Awaitable[None]],
    enough: Callable[[], bool],
    seconds: float = 0.1,
    workers: int = 4,
) -> None:
    """Run the queue until `enough` holds, and some seconds more, in which nothing else should run."""
    task = asyncio.create_task(queue.run_many(workers, handler))
    await until(enough)
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    queue.close()


async def test_a_key_added_often_runs_once() -> None:
    queue: WorkQueue[str] = WorkQueue()
    runs: Counter[str] = Counter()

    async def handler(key: str) -> None:
        runs[key] += 1

    for _ in range(100):
        queue.add("a")
    queue.add("b")
    assert len(queue) == 2
    await drain(queue, handler, lambda: len(runs) == 2)
    assert runs == {"a": 1, "b": 1}


async def test_a_key_added_while_it_runs_runs_again_and_never_twice_at_once() -> None:
    queue: WorkQueue[str] = WorkQueue()
    running = most = runs = 0

    async def handler(key: str) -> None:
        nonlocal running, most, runs
        running, runs = running + 1, runs + 1
        most = max(most, running)
        if runs == 1:
            for _ in range(5):
                queue.add(key)
        await asyncio.sleep(0.02)
        running -= 1

    queue.add("a")
    await drain(queue, handler, lambda: runs == 2)
    assert (runs, most) == (2, 1)


async def test_the_earliest_delay_wins() -> None:
    queue: WorkQueue[str] = WorkQueue()
    order: list[str] = []

    async def handler(key: str) -> None:
        order.append(key)

    for seconds in (3600, 0.05, 1800):
        queue.add_after("a", seconds)
    queue.add_after("before", 0.04)
    queue.add_after("after", 0.06)
    await drain(queue, handler, lambda: "after" in order, workers=1)
    assert order == ["before", "a", "after"]


async def test_a_key_that_raises_is_tried_again_and_others_run() -> None:
    queue: WorkQueue[str] = WorkQueue()
    runs: Counter[str] = Counter()

    async def handler(key: str) -> None:
        runs[key] += 1
        if key == "bad" and runs[key] < 3:
            raise ValueError(key)

    queue.add("bad")
    queue.add("good")
    await drain(queue, handler, lambda: runs["bad"] == 3)
    assert runs == {"bad": 3, "good": 1}


async def test_forget_drops_what_was_delayed() -> None:
    queue: WorkQueue[str] = WorkQueue()
    runs: list[str] = []

    async def handler(key: str) -> None:
        runs.append(key)

    queue.add_after("a", 0.05)
    queue.forget("a")
    await drain(queue, handler, lambda: True)
    assert runs == []


async def test_draining_does_not_wait_for_keys_that_nobody_runs() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    async with asyncio.timeout(60):
        assert await queue.drain(3600)


async def test_a_handler_that_awaited_what_others_cancelled_fails_only_its_key() -> None:
    queue: WorkQueue[str] = WorkQueue()
    runs: Counter[str] = Counter()

    async def handler(key: str) -> None:
        runs[key] += 1
        if key == "bad" and runs[key] == 1:
            answer = asyncio.get_running_loop().create_future()
            answer.cancel()
            await answer

    queue.add("bad")
    queue.add("good")
    await drain(queue, handler, lambda: runs["bad"] == 2, workers=1)
    assert runs == {"bad": 2, "good": 1}


async def test_handlers_that_wait_for_nothing_let_others_run() -> None:
    """A resync of thousands of jobs in which nothing has changed must not stop heartbeats and the lease meanwhile."""
    queue: WorkQueue[int] = WorkQueue()
    handled = since = most = 0

    async def handle(key: int) -> None:
        nonlocal handled, since, most
        handled, since = handled + 1, since + 1
        most = max(most, since)

    async def beat() -> None:
        nonlocal since
        while True:
            since = 0
            await asyncio.sleep(0)

    for key in range(1000):
        queue.add(key)
    heart, workers = asyncio.create_task(beat()), asyncio.create_task(queue.run_many(3, handle))
    await until(lambda: handled == 1000)
    assert most <= 3
    for task in (workers, heart):
        task.cancel()
    await asyncio.gather(workers, heart, return_exceptions=True)
