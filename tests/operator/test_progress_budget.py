"""The budget that writes of progress share: its rate, its order, and what never waits for it. All in virtual time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from meshwright.api.objects import KubeObject
from meshwright.api.parsing import parse_status
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_operator.controller.status_patch import PROGRESS_SECONDS, StatusWriter, is_news, is_urgent
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.progress_budget import (
    ASK_AGAIN_SECONDS,
    PROGRESS_WRITES_PER_SECOND,
    SILENT_SECONDS,
    ProgressBudget,
)
from meshwright_operator.settings import parse
from tests.operator.builders import NOW
from tests.operator.memory import MemoryCluster
from tests.operator.support import JOBS, job
from tests.operator.world import VirtualQueue, World


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_few_jobs_never_wait() -> None:
    clock = Clock()
    budget = ProgressBudget(clock=clock)
    for _ in range(20):
        assert [budget.ask(f"job-{n}", clock.now - 10) for n in range(int(PROGRESS_WRITES_PER_SECOND))] == [0.0] * 20
        clock.now += PROGRESS_SECONDS
    assert len(budget) == 0


def test_the_oldest_progress_is_written_first_whoever_asks_first() -> None:
    clock = Clock()
    budget = ProgressBudget(1.0, clock)
    assert budget.ask("first", 0.0) == 0.0
    waits = {uid: budget.ask(uid, written) for uid, written in (("newest", 30.0), ("oldest", 10.0), ("middle", 20.0))}
    assert waits == {"newest": 1.0, "oldest": 1.0, "middle": 2.0}
    assert budget.ask("newest", 30.0) == 3.0, "two are before it by now"
    for expected in ("oldest", "middle", "newest"):
        clock.now += 1.0
        granted = [uid for uid in ("newest", "middle", "oldest") if uid in waits and budget.ask(uid, 0.0) == 0.0]
        assert granted == [expected]
        del waits[expected]


def test_of_jobs_that_were_never_written_the_first_to_ask_is_first() -> None:
    clock, never = Clock(), float("-inf")
    budget = ProgressBudget(1.0, clock)
    assert [budget.ask(uid, never) for uid in ("b", "a", "c")] == [0.0, 1.0, 2.0]
    clock.now += 1.0
    assert [budget.ask(uid, never) for uid in ("c", "a")] == [1.0, 0.0]


def test_a_job_asks_again_soon_and_one_that_no_longer_asks_keeps_nobody_waiting() -> None:
    clock = Clock()
    budget = ProgressBudget(1.0, clock)
    for number in range(30):
        budget.ask(f"gone-{number}", 0.0)
    assert budget.ask("alive", 50.0) == ASK_AGAIN_SECONDS
    clock.now += SILENT_SECONDS + 0.1
    assert budget.ask("alive", 50.0) == 0.0
    assert len(budget) == 0


def test_a_pause_saves_no_more_than_a_second() -> None:
    clock = Clock()
    budget = ProgressBudget(5.0, clock)
    clock.now += 3600.0
    assert sum(budget.ask(str(number), 0.0) == 0.0 for number in range(100)) == 5


def test_a_job_that_withdraws_makes_room() -> None:
    clock = Clock()
    budget = ProgressBudget(1.0, clock)
    assert [budget.ask(uid, 0.0) for uid in ("a", "b", "c")] == [0.0, 1.0, 2.0]
    budget.withdraw("b")
    budget.withdraw("never asked")
    assert budget.ask("c", 0.0) == 1.0
    assert len(budget) == 1


class Fleet:
    """Jobs that train, and a writer of their status with a budget of two writes per second."""

    RATE = 2.0

    def __init__(self, number: int) -> None:
        self.world = World(1, nodes=1)
        self.cluster, self.queue = MemoryCluster(lambda: NOW), VirtualQueue(self.world)
        self.budget = ProgressBudget(self.RATE, self.world.seconds)
        self.writer = StatusWriter(self.cluster, Cache(), self.queue, self.world.seconds, self.budget)
        self.names = [f"job-{n}" for n in range(number)]
        self.writes: dict[str, list[float]] = {name: [] for name in self.names}
        for name in self.names:
            self.cluster.put(f"{JOBS}/{name}", {**job(name), "status": dict(ParallelTrainingJobStatus(step=0).wire())})

    async def reconcile(self, name: str, *, events: bool = False, **changes: Any) -> bool:
        """Write a newer step and `changes`."""
        stored = self.cluster.objects[f"{JOBS}/{name}"]
        status = parse_status({**stored, "status": {**stored["status"], **changes}})
        status.step = 1 + round(10 * self.world.seconds())
        wrote = await self.writer.write(JobKey("default", name), stored, status, events)
        if wrote:
            self.writes[name].append(self.world.seconds())
        return wrote

    async def run(self, seconds: float) -> None:
        """Each job is reconciled when it is due, and every ten seconds."""
        end = self.world.seconds() + seconds
        for name in self.names:
            self.queue.add_after(JobKey("default", name), PROGRESS_SECONDS)
        while True:
            key = min(self.queue.due, key=lambda key: self.queue.due[key])
            if (self.queue.due[key] - NOW).total_seconds() > end:
                return
            self.world.now = self.queue.due.pop(key)
            await self.reconcile(key.name)
            self.queue.add_after(key, PROGRESS_SECONDS)


async def test_many_jobs_share_the_rate_and_each_gets_the_same() -> None:
    fleet = Fleet(60)
    await fleet.run(130)
    moments = sorted(moment for written in fleet.writes.values() for moment in written)
    for first in moments:
        within = sum(first <= moment < first + 10 for moment in moments)
        assert within <= 10 * fleet.RATE + fleet.RATE
    assert len(moments) >= 0.95 * fleet.RATE * 120, "no token is wasted"
    assert {len(written) for written in fleet.writes.values()} <= {4, 5}
    ages = [b - a for written in fleet.writes.values() for a, b in zip(written, written[1:], strict=False)]
    assert max(ages) <= 60 / fleet.RATE + 2, "every job's turn comes round"


CHECKPOINT: KubeObject = {"step": 7, "time": "2026-01-01T00:00:00Z", "path": "/checkpoints"}


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint": CHECKPOINT},
        {"checkpointTiers": [{"place": "/fast", "step": 7}]},
        {"checkpointTiers": [{"place": "/fast", "error": "No space left on device"}]},
        {"goodput": {"cause": "Detecting", "since": "2026-01-01T00:00:00Z"}},
        {"goodput": {"gpus": 8, "since": "2026-01-01T00:00:00Z"}},
        {"restartCount": 3},
        {"readyRanks": "8/8"},
        {"conditions": [{"type": "Ready", "status": "False", "reason": "Restarting", "message": "A pod is lost",
                         "lastTransitionTime": "2026-01-01T00:00:00Z"}]},
    ],
    ids=["checkpoint", "tier", "failed save", "cause", "GPUs", "restart", "all ranks train", "condition"],
)  # fmt: skip
async def test_what_says_something_new_does_not_wait_for_the_budget(changes: KubeObject) -> None:
    fleet = Fleet(20)
    for name in fleet.names:
        await fleet.reconcile(name)
    assert len(fleet.budget) == 18, "two were written"
    fleet.world.now += timedelta(seconds=0.1)
    last = fleet.names[-1]
    assert not await fleet.reconcile(last)
    assert await fleet.reconcile(last, **changes)
    assert len(fleet.budget) == 17, "its progress was written with it"
    fleet.world.now += timedelta(seconds=1.0)
    assert [await fleet.reconcile(name) for name in fleet.names[2:5]] == [True, True, False], "it took nobody's token"


async def test_a_step_that_goes_back_does_not_wait_for_ten_seconds() -> None:
    """After a restart from a checkpoint: until then the steps that are repeated seem to be done."""
    fleet = Fleet(1)
    (name,) = fleet.names
    fleet.world.now += timedelta(seconds=20)
    assert await fleet.reconcile(name)
    stored = fleet.cluster.objects[f"{JOBS}/{name}"]
    fleet.world.now += timedelta(seconds=2)
    later, earlier = (parse_status({**stored, "status": {**stored["status"], "step": step}}) for step in (205, 150))
    assert not await fleet.writer.write(JobKey("default", name), stored, later, False)
    assert await fleet.writer.write(JobKey("default", name), stored, earlier, False)
    stored = fleet.cluster.objects[f"{JOBS}/{name}"]
    for step in (149, 148, 147, 146):  # a command may report anything
        lower = parse_status({**stored, "status": {**stored["status"], "step": step}})
        await fleet.writer.write(JobKey("default", name), stored, lower, False)
        stored = fleet.cluster.objects[f"{JOBS}/{name}"]
    assert stored["status"]["step"] > 146, "the budget holds"


async def test_events_and_a_job_without_changes_need_no_token() -> None:
    fleet = Fleet(10)
    for name in fleet.names:
        await fleet.reconcile(name)
    assert await fleet.reconcile(fleet.names[9], events=True)
    waiting = fleet.names[8]
    stored = fleet.cluster.objects[f"{JOBS}/{waiting}"]
    assert not await fleet.writer.write(JobKey("default", waiting), stored, parse_status(stored), False)
    fleet.writer.forget(fleet.cluster.objects[f"{JOBS}/{fleet.names[7]}"]["metadata"]["uid"])
    assert len(fleet.budget) == 5


def test_numbers_alone_are_no_news() -> None:
    old = {"step": 1, "loss": "2.0", "checkpoint": CHECKPOINT, "goodput": {"cause": "Training", "gpus": 8}}
    numbers = {"step": 9, "loss": "1.0", "goodput": {"cause": "Training", "gpus": 8, "booked": []}}
    assert not is_news(old, {**old, **numbers})
    assert not is_urgent(old, {**old, **numbers})
    assert is_news(old, {**old, "checkpoint": {**CHECKPOINT, "step": 8}})
    assert not is_news({"checkpoint": "damaged", "checkpointTiers": "damaged", "goodput": 3}, {})


async def test_metrics_are_current_while_the_status_waits() -> None:
    World.progress_writes_per_second, kept = 1e-9, World.progress_writes_per_second
    try:
        world = World(3, nodes=4, work=1000.0)
    finally:
        World.progress_writes_per_second = kept
    world.submit(job("train", training={"steps": 10**6, "globalBatchSize": 8, "sequenceLength": 64}))
    await world.run(60)
    assert world.true("train", "Ready")
    written = world.status("train").get("step", 0)
    await world.run(60)
    operator = world.operators[0]
    operator.metrics.registry.register(operator.jobs)
    page = operator.metrics.exposition().decode()
    (line,) = [line for line in page.splitlines() if line.startswith("ptj_job_step{")]
    assert world.status("train").get("step", 0) == written, "the budget has no token left"
    assert float(line.rpartition(" ")[2]) > written + 30


def test_the_rate_is_a_setting() -> None:
    needed = ["--coordinator-url", "https://operator.example"]
    assert parse(needed, {}).progress_writes_per_second == PROGRESS_WRITES_PER_SECOND
    assert parse([*needed, "--progress-writes-per-second", "50"], {}).progress_writes_per_second == 50
    with pytest.raises(SystemExit):
        parse([*needed, "--progress-writes-per-second", "0"], {})
