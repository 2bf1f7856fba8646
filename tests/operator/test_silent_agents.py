"""No job is Ready whose agents have not reported for a minute, and no restart of the operator changes a job's state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.api.conditions import find
from meshwright.api.status import Condition
from meshwright.protocol.messages import AgentState, WorkerReport
from meshwright_operator.decide.agents import Agents, ReceivedReport
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.decision import Decision
from tests.operator.builders import NODES, ago, observed, pod, report, running_status
from tests.operator.test_gang_races import command, small
from tests.operator.world import World


def received(ages: dict[int, float], listening: float = 1000.0) -> Agents:
    reports: list[WorkerReport] = [report(worker, AgentState.RUNNING) for worker in ages]
    found = {r.worker: ReceivedReport(r, ages[r.worker], 0.0) for r in reports}
    return Agents(reports=found, newest_generation=1, listening_seconds=listening)


def ready(decision: Decision) -> Condition:
    condition = find(decision.status.conditions, "Ready")
    assert condition is not None
    return condition


def test_a_job_of_which_nothing_was_heard_for_a_minute_is_unknown() -> None:
    decision = decide(observed(received=received(dict.fromkeys(range(4), 61.0))))
    assert (ready(decision).status, ready(decision).reason) == ("Unknown", "AgentsSilent")
    assert "None of the 4 agents" in ready(decision).message
    assert decision.status.tokens_per_second is None
    assert decision.status.ready_ranks == "0/8"
    assert decision.mesh.generation == 1
    assert not decision.delete


def test_workers_on_nodes_that_kubernetes_does_not_reach_either_are_lost() -> None:
    """A job on one node would otherwise wait for the eviction, 300 s."""
    silent, down = received(dict.fromkeys(range(4), 61.0)), dict.fromkeys(NODES, True)
    decision = decide(observed(received=silent, down=down))
    assert decision.mesh.pending_cause == "NodeLost"
    assert len(decision.delete) == 4
    one = decide(observed(received=silent, down={**NODES, "n1": True}))
    assert [pod.name for pod in one.delete] == [pod(1).name]


def test_nothing_is_lost_while_kubernetes_reaches_no_node_or_agents_report() -> None:
    down = dict.fromkeys(NODES, True)
    silent = received(dict.fromkeys(range(4), 61.0))
    apart = decide(observed(received=silent, down=down, some_node_ready=False))
    assert (ready(apart).reason, list(apart.delete)) == ("AgentsSilent", [])
    soon = decide(observed(received=received(dict.fromkeys(range(4), 41.0)), down=down))
    assert (soon.mesh.generation, list(soon.delete)) == (1, [])
    fresh = decide(observed(received=received(dict.fromkeys(range(4), 1.0)), down=down))
    assert (ready(fresh).status, list(fresh.delete)) == ("True", [])


def test_agents_that_report_make_the_job_ready_and_the_next_check_is_in_time() -> None:
    decision = decide(observed(received=received({0: 1.0, 1: 20.0, 2: 3.0, 3: 4.0})))
    assert ready(decision).status == "True"
    assert decision.status.tokens_per_second == 1000
    assert decision.requeue_after == pytest.approx(40.0)


def test_a_job_whose_steps_advance_is_ready_and_names_how_many_agents_are_silent() -> None:
    decision = decide(observed(received=received({0: 1.0, 1: 100.0, 2: 3.0, 3: 4.0})))
    assert ready(decision).status == "True"
    assert "1 of 4 agents has not reported for 60 s" in ready(decision).message


def test_a_command_reports_no_steps_so_each_of_its_agents_counts() -> None:
    seen = observed(received=received({0: 1.0, 1: 100.0, 2: 3.0, 3: 4.0}))
    spec = seen.spec.model_copy(update={"runtime": seen.spec.runtime.model_copy(update={"command": ["x"]})})
    decision = decide(replace(seen, spec=spec))
    assert (ready(decision).status, ready(decision).reason) == ("Unknown", "AgentsSilent")
    assert "1 of 4 agents has not reported" in ready(decision).message


def test_the_agent_of_a_new_pod_has_time_for_its_first_report() -> None:
    status = running_status()
    assert status.mesh is not None
    status.mesh.started_time = ago(3)
    decision = decide(observed(status=status, received=received({})))
    assert ready(decision).reason == "Starting"
    assert decision.requeue_after == pytest.approx(57.0)


def test_a_restart_of_the_operator_changes_no_state() -> None:
    trains = decide(observed())
    assert ready(trains).status == "True"
    for listening in (0.5, 59.0):
        again = decide(observed(status=trains.status, received=received({}, listening)))
        assert again.status == trains.status
    silent = decide(observed(status=trains.status, received=received({}, 61.0)))
    assert ready(silent).reason == "AgentsSilent"
    again = decide(observed(status=silent.status, received=received({}, 1.0)))
    assert again.status == silent.status


@pytest.mark.parametrize("body", [small("quiet", 2), command("quiet", 2)], ids=["runtime", "command"])
async def test_silence_of_all_agents_in_a_whole_job(body: dict[str, object]) -> None:
    world = World(1, nodes=2, work=1e6)
    world.submit(body)
    await world.run(30)
    assert world.true("quiet", "Ready")
    for agent in world.agents.values():
        agent.silent = True
    await world.run(75)
    ready = world.condition("quiet", "Ready")
    assert (ready["status"], ready["reason"]) == ("Unknown", "AgentsSilent")
    assert "tokensPerSecond" not in world.status("quiet")
    writes = world.cluster.writes
    await world.run(300)
    assert world.cluster.writes == writes, "its state does not change, so nothing is written"
    record = dict(world.operators[0].jobs._records)
    assert all(r.oldest_report_age(r.since) is not None for r in record.values())
    for agent in world.agents.values():
        agent.silent = False
    await world.run(10)
    assert world.true("quiet", "Ready")
    assert world.status("quiet")["mesh"]["generation"] == 1


async def test_a_new_operator_writes_nothing_while_it_waits_for_reports() -> None:
    world = World(1, nodes=2, work=1e6)
    world.submit(small("quiet", 2))
    await world.run(30)
    before = world.status("quiet")
    world.cluster.watchers.clear()
    world.operators[:] = [world.operator()]
    for agent in world.agents.values():
        agent.silent = True
    await world.run(50)
    assert world.status("quiet")["conditions"] == before["conditions"]
