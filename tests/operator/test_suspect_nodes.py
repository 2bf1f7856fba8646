"""Nodes on which workers fail again and again: which are avoided, for how long, and which are not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from meshwright.api.status import MeshStatus, ParallelTrainingJobStatus, SuspectNode
from meshwright.protocol.messages import AgentState, FailureKind
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.mesh_generation import document
from meshwright_operator.timestamps import format_time
from tests.operator.builders import NOW, agents, ago, failed, observed, pod, report, running_status
from tests.operator.test_gang_races import small
from tests.operator.world import World

ON: dict[str, Any] = {"recovery": {"suspectNodes": {"windowSeconds": 600, "avoidSeconds": 3600}}}


def fails(worker: int, entries: list[SuspectNode], **fields: Any) -> Decision:
    """The decision about a rank of this worker that raised, with what is known of the nodes."""
    reports = [failed(worker, FailureKind.ERROR, "CUDA error")]
    reports += [failed(other, FailureKind.PEER_LOST) for other in range(4) if other != worker]
    status = running_status(suspect_nodes=entries)
    return decide(observed(status=status, received=agents(reports, halted_seconds=3), **{**ON, **fields}))


def suspect(
    node: str, worker: int, failures: int = 1, seconds_ago: float = 60, until: float | None = None
) -> SuspectNode:
    """`until`: seconds from now until which it is avoided."""
    return SuspectNode(
        node=node,
        worker=worker,
        failures=failures,
        cause="RankFailure",
        last_failure=ago(seconds_ago),
        avoided_until=None if until is None else format_time(NOW + timedelta(seconds=until)),
    )


def node(status: ParallelTrainingJobStatus, name: str) -> SuspectNode:
    return next(entry for entry in status.suspect_nodes or () if entry.node == name)


def reasons(decision: Decision) -> list[str]:
    return [event.reason for event in decision.events]


def test_the_first_failure_restarts_in_place() -> None:
    decision = fails(2, [])
    assert not decision.delete
    assert not decision.blocked_nodes
    assert (node(decision.status, "n2").failures, node(decision.status, "n2").avoided_until) == (1, None)


def test_the_second_one_moves_the_workers_and_avoids_the_node() -> None:
    decision = fails(2, [suspect("n2", 2)])
    assert [pod.name for pod in decision.delete] == ["train-w2-0"]
    assert decision.blocked_nodes == {"n2": "it is suspect after 2 failures of this job, until 2026-01-02T04:04:05Z"}
    (event,) = [event for event in decision.events if event.reason == "NodeSuspect"]
    assert event.message == (
        "Node n2 is suspect after 2 failures (RankFailure). 1 worker moves to other nodes, and the job avoids it until "
        "2026-01-02T04:04:05Z"
    )
    assert decision.status.restart_count == 1


def test_every_worker_of_the_node_moves() -> None:
    pods = [pod(0), pod(1), pod(2, node="n1"), pod(3)]
    reports = [failed(1, FailureKind.ERROR), *(failed(other, FailureKind.PEER_LOST) for other in (0, 2, 3))]
    status = running_status(suspect_nodes=[suspect("n1", 2)])
    decision = decide(observed(pods, status, received=agents(reports, halted_seconds=3), **ON))
    assert {pod.name for pod in decision.delete} == {"train-w1-0", "train-w2-0"}


def test_a_worker_of_the_node_that_has_completed_the_run_stays() -> None:
    pods = [pod(0), pod(1), pod(2, node="n1"), pod(3)]
    reports = [failed(1, FailureKind.ERROR), *(failed(other, FailureKind.PEER_LOST) for other in (0, 3))]
    status = running_status(suspect_nodes=[suspect("n1", 1)])
    assert status.mesh is not None
    status.mesh.succeeded_workers = "2"
    decision = decide(observed(pods, status, received=agents(reports, halted_seconds=11), **ON))
    assert {pod.name for pod in decision.delete} == {"train-w1-0"}


def test_no_clock_and_no_edit_makes_a_node_avoided_for_longer_than_the_job_asks() -> None:
    entries = [suspect("n5", 2, failures=2, until=3600), suspect("n6", 2, failures=2, until=3700)]
    decision = decide(observed(status=running_status(suspect_nodes=entries), **ON))
    assert set(decision.blocked_nodes) == {"n5"}


@pytest.mark.parametrize(
    ("entries", "recovery"),
    [
        ([suspect("n2", 2, seconds_ago=601)], ON["recovery"]),
        ([suspect("n2", 2)], {}),
        ([suspect("n2", 2)], {"suspectNodes": {"failures": 3}}),
    ],
    ids=["outside the window", "off", "fewer than asked for"],
)
def test_a_node_is_not_suspect(entries: list[SuspectNode], recovery: dict[str, Any]) -> None:
    decision = fails(2, entries, recovery=recovery)
    assert not decision.delete
    assert not decision.blocked_nodes


def test_a_failure_that_follows_the_worker_is_not_the_nodes() -> None:
    decision = fails(2, [suspect("n7", 2, failures=2, until=3000), suspect("n2", 3)])
    assert not decision.delete
    assert not decision.blocked_nodes
    assert [entry.avoided_until for entry in decision.status.suspect_nodes or ()] == [None, None]
    assert "NodeCleared" in reasons(decision)


def test_after_its_expiry_one_failure_is_enough() -> None:
    decision = fails(2, [suspect("n2", 2, failures=2, seconds_ago=3700, until=-100)])
    assert [pod.name for pod in decision.delete] == ["train-w2-0"]
    assert "Node n2 is suspect again after 1 failure" in next(
        event.message for event in decision.events if event.reason == "NodeSuspect"
    )


def test_old_failures_are_forgotten() -> None:
    entries = [suspect("n1", 1, seconds_ago=7300), suspect("n2", 2, seconds_ago=7100)]
    decision = decide(observed(status=running_status(suspect_nodes=entries), **ON))
    assert [entry.node for entry in decision.status.suspect_nodes or ()] == ["n2"]


def test_a_mistake_of_the_job_says_nothing_about_its_node() -> None:
    reports = [failed(2, FailureKind.INVALID_INPUT, "no such file")]
    decision = decide(observed(received=agents(reports, halted_seconds=11), **ON))
    assert decision.status.suspect_nodes is None


def raise_on(world: World, name: str) -> None:
    """Ranks on this node fail, and their peers lose them."""
    for agent in world.agents.values():
        if agent.state is AgentState.RUNNING:
            agent.state = AgentState.FAILED
            agent.failure = FailureKind.ERROR if agent.pod.node == name else FailureKind.PEER_LOST


async def fail_twice(world: World) -> str:
    world.submit(small("job", 2, recovery=ON["recovery"]))
    await world.run(20)
    bad = str(world.status("job")["placement"]["workers"][1]["node"])
    for _ in range(2):
        assert world.true("job", "Ready")
        raise_on(world, bad)
        await world.run(40)
    return bad


async def test_the_worker_trains_on_another_node() -> None:
    world = World(5, nodes=3, work=10**6)
    bad = await fail_twice(world)
    assert world.true("job", "Ready")
    assert bad not in {entry["node"] for entry in world.status("job")["placement"]["workers"]}
    (entry,) = world.status("job")["suspectNodes"]
    assert (entry["node"], entry["failures"]) == (bad, 2)


async def test_a_restarted_operator_avoids_it_too() -> None:
    world = World(6, nodes=3, work=10**6)
    bad = await fail_twice(world)
    world.operators = [world.operator()]
    await world.run(10)
    victim = world.status("job")["placement"]["workers"][1]["pod"]
    world.crash(victim)
    await world.run(60)
    assert world.true("job", "Ready")
    assert bad not in {entry["node"] for entry in world.status("job")["placement"]["workers"]}


async def test_without_another_node_the_job_waits_two_minutes_and_uses_it() -> None:
    world = World(7, nodes=2, work=10**6)
    bad = await fail_twice(world)
    assert not world.true("job", "Ready")
    assert "suspect" in world.condition("job", "Placed")["message"]
    await world.run(150)
    assert world.true("job", "Ready")
    assert bad in {entry["node"] for entry in world.status("job")["placement"]["workers"]}


CHECK: dict[str, Any] = {"recovery": {"suspectNodes": {"checkNodes": True, "failures": 5}}}


@pytest.mark.parametrize(
    ("cause", "entries", "fields", "checked"),
    [
        ("RankFailure", [suspect("n2", 2)], CHECK, True),
        ("Hang", [suspect("n2", 1)], CHECK, True),
        ("RankFailure", [suspect("n9", 2)], CHECK, False),
        ("RankFailure", [], CHECK, False),
        ("Rescaled", [suspect("n2", 2)], CHECK, False),
        ("RankFailure", [suspect("n2", 2)], ON, False),
        ("RankFailure", [suspect("n2", 2)], {"recovery": {**CHECK["recovery"], "inMemory": True}}, False),
    ],
    ids=["rank failed", "hang", "other node", "no failure", "no failure now", "off", "in memory"],
)
def test_nodes_are_checked_before_a_start_on_one_that_failed(
    cause: str, entries: list[SuspectNode], fields: dict[str, Any], checked: bool
) -> None:
    mesh = MeshStatus(
        generation=1, master="10.0.0.0:2000", cause="Start", started_time=ago(60), pending_cause=cause, failures=1
    )
    status = running_status(mesh=mesh.model_copy(update={"pending_since": ago(1)}), suspect_nodes=entries)
    idle = [report(worker, AgentState.FAILED, failure=FailureKind.PEER_LOST) for worker in range(4)]
    now = observed(status=status, received=agents(idle), **fields)
    decision = decide(now)
    assert decision.mesh.generation == 2
    assert bool(decision.mesh.node_check) is checked
    published = document(now, decision.mesh)
    assert published is not None
    assert bool(published.node_check) is checked


def test_a_node_that_fails_its_check_is_suspect_at_once() -> None:
    fault = "rank 2: node check: 3 of 512 rows of a matrix product are wrong"
    reports = [failed(0, FailureKind.ERROR, "exit"), failed(2, FailureKind.NODE_FAULT, fault)]
    reports += [failed(other, FailureKind.PEER_LOST) for other in (1, 3)]
    status = running_status(suspect_nodes=[suspect("n7", 2)])
    decision = decide(observed(status=status, received=agents(reports, halted_seconds=3), **CHECK))
    assert [pod.name for pod in decision.delete] == ["train-w2-0"]
    assert list(decision.blocked_nodes) == ["n2"]
    (event,) = [event for event in decision.events if event.reason == "NodeSuspect"]
    assert event.message.startswith(f"Node n2 is suspect after 1 failure (Worker 2: {fault}). 1 worker moves")


async def test_a_job_leaves_the_node_that_its_check_finds() -> None:
    world = World(8, nodes=4, work=10**6)
    world.submit(small("job", 3, recovery=CHECK["recovery"]))
    await world.run(20)
    bad = str(world.status("job")["placement"]["workers"][1]["node"])
    raise_on(world, bad)
    await world.run(40)
    assert world.status("job")["mesh"]["nodeCheck"]
    for agent in world.agents.values():
        agent.state = AgentState.FAILED
        agent.failure = FailureKind.NODE_FAULT if agent.pod.node == bad else FailureKind.PEER_LOST
    await world.run(40)
    assert world.true("job", "Ready")
    assert bad not in {entry["node"] for entry in world.status("job")["placement"]["workers"]}
    assert "nodeCheck" not in world.status("job")["mesh"]
