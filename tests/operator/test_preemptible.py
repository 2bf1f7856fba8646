"""Preemptible jobs in virtual time: they stop for a job of higher priority, wait, and resume."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from meshwright.protocol.messages import AgentState
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.scheduling import waiting_jobs
from meshwright_operator.scheduling.policy import parse_policy
from meshwright_operator.timestamps import parse_time
from tests.operator.support import JOBS
from tests.operator.test_elastic import FOREVER, edit, elastic, events, pods, size
from tests.operator.test_settling import submitted
from tests.operator.world import World


def preemptible(name: str, replicas: int, priority: int = 0, **spec: Any) -> dict[str, Any]:
    body = submitted(name, replicas)
    body["spec"] |= {"preemptible": True, "priority": priority, "checkpoint": {"claimName": "shared"}, **spec}
    return body


def urgent(name: str, replicas: int, priority: int = 10) -> dict[str, Any]:
    body = submitted(name, replicas)
    body["spec"]["priority"] = priority
    return body


def remove(world: World, name: str) -> None:
    world.cluster.remove(f"{JOBS}/{name}")
    for pod in world.pods(name):
        world.crash(pod.name)


async def test_a_preemptible_job_stops_for_another_and_resumes() -> None:
    world = World(1, nodes=2, work=FOREVER)
    world.submit(preemptible("low", 2))
    await world.run(30)
    assert world.true("low", "Ready")
    world.submit(urgent("urgent", 1))
    await world.run(90)
    assert world.true("urgent", "Ready"), world.condition("urgent", "Placed")
    assert not pods(world, "low")
    assert world.condition("low", "Placed")["reason"] == "Preempted"
    assert world.condition("low", "Ready")["reason"] == "Preempted"
    (event,) = events(world, "low", "Preempted")
    assert "job low" in event.message
    assert "default/urgent" in event.message
    assert world.status("low")["goodput"]["cause"] == "Queued"
    await world.run(300)
    assert not pods(world, "low")
    assert len(events(world, "low", "Preempted")) == 1
    remove(world, "urgent")
    await world.run(60)
    assert world.true("low", "Ready"), world.condition("low", "Ready")
    assert world.status("low")["mesh"]["cause"] == "JobPreempted"
    assert world.status("low")["restarts"] == [{"cause": "JobPreempted", "count": 1}]


async def test_the_ranks_pause_before_the_pods_are_deleted() -> None:
    world = World(2, nodes=1, work=FOREVER)
    world.submit(preemptible("low", 1))
    await world.run(30)
    (pod,) = world.pods("low")
    agent = world.agents[pod.name]
    seen = set()
    world.submit(urgent("urgent", 1))
    for _ in range(60):
        await world.tick(1)
        if agent.pod.name in pods(world, "low"):
            seen.add(agent.state)
    assert seen >= {AgentState.RUNNING, AgentState.IDLE}
    assert not pods(world, "low") - {pod.name}


async def test_a_job_whose_ranks_do_not_answer_is_stopped_after_the_pause_limit() -> None:
    world = World(3, nodes=1, work=FOREVER)
    world.submit(preemptible("low", 1))
    await world.run(30)
    (pod,) = world.pods("low")
    world.agents[pod.name].hung = True
    world.submit(urgent("urgent", 1))
    await world.run(10)
    assert pod.name in pods(world, "low")
    await world.run(110)
    assert world.true("urgent", "Ready"), world.condition("urgent", "Placed")


async def test_a_job_without_checkpoints_is_stopped_with_its_grace_period() -> None:
    world = World(4, nodes=1, work=FOREVER)
    world.submit(preemptible("low", 1, checkpoint=None))
    await world.run(30)
    world.submit(urgent("urgent", 1))
    await world.run(60)
    assert world.true("urgent", "Ready"), world.condition("urgent", "Placed")


async def test_nobody_stops_for_a_job_of_the_same_priority_or_without_preemptible_or_in_vain() -> None:
    for number, (low, high) in enumerate(
        [
            (preemptible("low", 2, priority=10), urgent("urgent", 1)),
            (preemptible("low", 2, preemptible=False), urgent("urgent", 1)),
            (preemptible("low", 2), urgent("urgent", 4)),
        ]
    ):
        world = World(number, nodes=3 if number == 2 else 2, work=FOREVER)
        world.submit(low)
        await world.run(30)
        before = pods(world, "low")
        world.submit(high)
        await world.run(200)
        assert pods(world, "low") == before
        assert world.true("low", "Ready")
        assert not world.true("urgent", "Ready")


async def test_elastic_jobs_shrink_before_a_job_stops() -> None:
    world = World(6, nodes=4, work=FOREVER)
    world.submit(elastic("wide", 3))
    world.submit(preemptible("whole", 1))
    await world.run(60)
    world.submit(urgent("urgent", 2))
    await world.run(120)
    assert world.true("urgent", "Ready"), world.condition("urgent", "Placed")
    assert (size(world, "wide"), world.true("whole", "Ready")) == (1, True)


async def test_an_elastic_job_at_its_minimum_stops_if_it_is_preemptible() -> None:
    world = World(7, nodes=3, work=FOREVER)
    body = elastic("low", 3, minReplicas=2)
    body["spec"]["preemptible"] = True
    world.submit(body)
    await world.run(60)
    world.submit(urgent("urgent", 2))
    await world.run(120)
    assert world.true("urgent", "Ready"), world.condition("urgent", "Placed")
    assert not pods(world, "low")
    remove(world, "urgent")
    await world.run(60)
    assert size(world, "low") == 3
    assert world.true("low", "Ready")


async def test_spares_of_a_stopped_job_are_released() -> None:
    world = World(8, nodes=3, work=FOREVER)
    world.submit(preemptible("low", 2, recovery={"spareNodes": 1}))
    await world.run(30)
    assert len(world.status("low")["placement"]["spares"]) == 1
    world.submit(urgent("urgent", 3))
    await world.run(90)
    assert world.true("urgent", "Ready"), world.condition("urgent", "Placed")
    assert not world.status("low")["placement"].get("spares")


async def test_the_same_pods_train_on_if_the_waiting_job_goes_away_meanwhile() -> None:
    world = World(9, nodes=1, work=FOREVER)
    world.submit(preemptible("low", 1))
    await world.run(30)
    (pod,) = world.pods("low")
    world.agents[pod.name].hung = True  # its ranks save for long
    world.submit(urgent("urgent", 1))
    await world.run(8)
    assert world.status("low")["mesh"]["pendingCause"] == "JobPreempted"
    remove(world, "urgent")
    world.agents[pod.name].state = AgentState.IDLE
    await world.run(40)
    assert pods(world, "low") == {pod.name}
    assert world.true("low", "Ready"), world.condition("low", "Ready")


async def test_preemptible_is_edited_without_a_restart() -> None:
    world = World(10, nodes=2, work=FOREVER)
    world.submit(preemptible("low", 1, preemptible=False))
    await world.run(30)
    revision, applied = world.status("low")["plan"]["revision"], world.status("low")["appliedSpec"]
    edit(world, "low", preemptible=True)
    await world.run(30)
    assert world.status("low")["mesh"]["generation"] == 1
    assert world.status("low")["plan"]["revision"] == revision
    edit(world, "low", preemptible=False)
    await world.run(30)
    assert world.status("low")["appliedSpec"] == applied


async def test_two_jobs_never_alternate() -> None:
    """A job that was stopped waits, whatever else starts and ends."""
    world = World(11, nodes=1, work=FOREVER)
    world.submit(preemptible("low", 1))
    await world.run(30)
    world.submit(preemptible("high", 1, priority=5))
    await world.run(600)
    assert world.true("high", "Ready")
    assert not pods(world, "low")
    assert world.status("high")["mesh"]["generation"] == 1
    assert len(events(world, "low", "Preempted")) == 1
    started = parse_time(world.status("high")["startTime"])
    assert started is not None
    assert world.now - started > timedelta(seconds=400)


async def test_a_job_is_released_by_a_waiting_job_that_the_policy_no_longer_lets_start() -> None:
    world = World(12, nodes=2, work=FOREVER)
    world.submit(preemptible("low", 1))
    await world.run(30)
    (pod,) = world.pods("low")
    world.agents[pod.name].hung = True  # its ranks save for long
    world.submit(urgent("urgent", 2))
    await world.run(8)
    assert world.status("low")["mesh"]["pendingCause"] == "JobPreempted"
    world.operators[0].scheduler.set_policy(parse_policy("namespaces: [{match: default, maxGpusInUse: 3}]"))
    await world.tick(1)
    assert world.operators[0].scheduler.replica_limit(pod.owner) is None
    world.agents[pod.name].state = AgentState.IDLE
    await world.run(60)
    assert not pods(world, "urgent")
    assert world.true("low", "Ready"), world.condition("low", "Ready")


async def test_a_job_is_released_by_a_waiting_job_that_no_longer_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(13, nodes=1, work=FOREVER)
    world.submit(preemptible("low", 1))
    await world.run(30)
    (pod,) = world.pods("low")
    world.agents[pod.name].hung = True  # its ranks save for long
    world.submit(urgent("urgent", 1))
    await world.run(8)
    (operator,) = world.operators
    assert operator.scheduler.replica_limit(pod.owner) is not None
    operator.queue.due.pop(JobKey("default", "urgent"))
    monkeypatch.setattr(waiting_jobs, "SILENT_SECONDS", -1.0)
    for _ in range(3):  # also when it is tried again with its last request
        operator.scheduler._placer.nodes_changed()
        await operator.scheduler.idle()
        assert operator.scheduler.replica_limit(pod.owner) is None


async def test_a_stopped_job_looks_again_even_if_nothing_wakes_it() -> None:
    world = World(14, nodes=1, work=FOREVER)
    world.submit(preemptible("low", 1))
    await world.run(30)
    world.submit(urgent("urgent", 1))
    await world.run(90)
    assert world.true("urgent", "Ready")
    assert JobKey("default", "low") in world.operators[0].queue.due
