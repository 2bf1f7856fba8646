"""Ranks of the built-in runtime complete a run together: what they have completed is not trained again."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest

from meshwright.api.status import MeshStatus
from meshwright.protocol.messages import AgentState, FailureKind
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.lifecycle import EXIT_SECONDS, finished
from tests.operator.builders import NODES, NOW, agents, ago, failed, observed, pod, report, running_status
from tests.operator.support import JOBS
from tests.operator.test_gang_races import small
from tests.operator.world import World


def reports(*running: int) -> Any:
    """All workers have completed, but those in `running`."""
    states = (AgentState.RUNNING if worker in running else AgentState.COMPLETE for worker in range(4))
    return agents([report(worker, state) for worker, state in enumerate(states)])


async def trains(world: World) -> None:
    world.submit(small("done", 3))
    await world.run(20)
    assert world.true("done", "Ready")


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("beforehand", [True, False], ids=["all agents had reported", "one report was missing"])
async def test_a_pod_that_is_lost_while_the_others_complete_costs_no_second_run(lost: int, beforehand: bool) -> None:
    world = World(1, nodes=4, work=500.0)
    await trains(world)
    others = [agent for name, agent in world.agents.items() if name != f"done-w{lost}-0"]
    for agent in others if beforehand else others[:1]:
        agent.trained = 500.0
    world.crash(f"done-w{lost}-0")
    await world.run(1)
    for agent in others:
        agent.trained = 500.0
    await world.run(60)
    assert world.true("done", "Complete")
    assert world.status("done")["mesh"]["generation"] == 1
    assert len(world.started) == 3, "each worker trained once"


@pytest.mark.parametrize("seconds", [1, 2, 5])
async def test_others_that_complete_after_the_loss_was_seen_complete_the_job(seconds: int) -> None:
    world = World(1, nodes=4, work=500.0)
    await trains(world)
    world.unprepared = world.mute = True  # the replacement takes a while to start
    world.crash("done-w1-0")
    await world.run(seconds)
    assert world.status("done")["mesh"]["pendingCause"] == "PodLost"
    for agent in world.agents.values():
        agent.trained = 500.0
    await world.run(60)
    assert world.true("done", "Complete")
    assert len(world.started) == 3, "each worker trained once"
    assert [one.name for one in world.pods() if not one.terminal] == []


def test_a_lost_worker_is_done_when_another_one_is() -> None:
    seen = observed([pod(0), pod(2), pod(3)], received=reports())
    decision = decide(seen)
    assert (decision.mesh.pending_cause, decision.mesh.completed_time) == ("", ago(0))
    on_a_dead_node = observed(
        [pod(0), pod(1, deleting=True), pod(2), pod(3)], received=reports(1), down={**NODES, "n1": True}
    )
    assert decide(on_a_dead_node).mesh.completed_time == ago(0)


def test_others_may_still_end_when_a_worker_is_lost() -> None:
    waits = decide(observed([pod(0), pod(2), pod(3)], received=reports(1, 3)))
    assert (waits.mesh.pending_cause, finished(waits.status)) == ("", False)
    late = NOW + timedelta(seconds=EXIT_SECONDS)
    assert finished(decide(observed([pod(0), pod(2), pod(3)], waits.status, received=agents([]), now=late)).status)


def test_a_rank_that_has_lost_its_peer_after_others_completed_restarts_nobody() -> None:
    complete = [report(worker, AgentState.COMPLETE) for worker in (0, 3)]
    received = agents([*complete, failed(2, FailureKind.PEER_LOST)], halted_seconds=60.0)
    decision = decide(observed([pod(0), pod(2), pod(3)], received=received))
    assert (decision.mesh.pending_cause, decision.mesh.completed_time) == ("", ago(0))
    own_error = agents([*complete, failed(2, FailureKind.ERROR)], halted_seconds=60.0)
    assert decide(observed([pod(0), pod(2), pod(3)], received=own_error)).mesh.pending_cause == "RankFailure"


@pytest.mark.parametrize(("cause", "ends"), [("PodLost", True), ("NodeLost", True), ("SpecChanged", False)])
def test_a_report_of_the_ended_generation_proves_its_end(cause: str, ends: bool) -> None:
    mesh = MeshStatus(
        generation=1, master="10.0.0.0:2000", cause="Start", started_time=ago(60), pending_cause=cause,
        pending_since=ago(1),
    )  # fmt: skip
    seen = observed([pod(0), pod(2), pod(3)], running_status(mesh=mesh), received=reports(1, 2, 3))
    assert finished(decide(seen).status) is ends


def test_a_pod_that_had_no_ranks_in_the_generation_proves_nothing() -> None:
    mesh = MeshStatus(
        generation=1, master="10.0.0.0:2000", cause="Start", started_time=ago(60), pending_cause="PodLost",
        pending_since=ago(30),
    )  # fmt: skip
    pods = [pod(0), pod(1, 1, phase="Succeeded"), pod(2), pod(3)]  # was created after the generation began
    seen = observed(pods, running_status(mesh=mesh), received=agents([]))
    assert not finished(decide(seen).status)


async def test_a_restarting_edit_of_a_run_that_has_completed_restarts_nobody() -> None:
    world = World(1, nodes=4, work=500.0)
    world.keeps_running.add("done-w1-0")
    await trains(world)
    for agent in world.agents.values():
        agent.trained = 500.0
    await world.run(3)
    edited = copy.deepcopy(world.cluster.objects[f"{JOBS}/done"])
    edited["spec"]["workers"]["image"] = "other:2"
    edited["metadata"]["generation"] = edited["metadata"].get("generation", 1) + 1
    world.cluster.update(f"{JOBS}/done", edited)
    await world.run(10)
    assert world.status("done")["mesh"].get("pendingCause", "") == ""
    await world.run(150)
    assert world.true("done", "Complete")
    assert len(world.started) == 3, "each worker trained once"
