"""Real agents and a coordinator that is forged, newer, busy, of another version or away for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest

from meshwright.protocol.messages import AgentState
from tests.agent.support import AgentProcess, Coordinator, until
from tests.agent.test_agent_commands import SLEEP, reported, start_generation

StartAgent = Callable[..., AgentProcess]


async def test_a_forged_mesh_starts_nothing_and_a_forged_end_ends_nothing(
    coordinator: Coordinator, start_agent: StartAgent
) -> None:
    agent = start_agent()
    hellos = await coordinator.gang(1)
    coordinator.forge = True
    await start_generation(coordinator, 1, "print('owned')", ranks_each=1)
    await until(lambda: "does not carry the coordinator's signature" in agent.log, 20, lambda: agent.log)
    coordinator.answer_all(410)
    await asyncio.sleep(1.5)
    assert agent.process.poll() is None
    assert agent.ranks_started() == []
    coordinator.answer_all(None)
    coordinator.forge = False
    assert await agent.exit_code() == 0
    assert "owned" in agent.log
    assert hellos[0].worker == 0


async def test_fields_of_a_newer_operator_are_left_out(coordinator: Coordinator, start_agent: StartAgent) -> None:
    coordinator.extra = {"newField": {"of": ["a", "newer", "version"]}}
    agent = start_agent()
    await start_generation(coordinator, 1, "print('done')", ranks_each=1)
    assert await agent.exit_code() == 0
    assert "cannot read" not in agent.log


async def test_an_agent_is_as_patient_as_it_is_asked_to_be(coordinator: Coordinator, start_agent: StartAgent) -> None:
    agent = start_agent()
    await coordinator.gang(1)
    coordinator.headers = {"Retry-After": "2"}
    coordinator.asked.clear()
    coordinator.answer_all(429)
    await until(lambda: "too many" in agent.log or "429" in agent.log, 10, lambda: agent.log)
    conversations = coordinator.asked.values()
    await until(lambda: [len(each) >= 3 for each in conversations] == [True] * 2, 30, lambda: str(coordinator.asked))
    for moments in conversations:
        assert all(later - earlier > 1.9 for earlier, later in pairwise(moments)), "each at most every two seconds"
    coordinator.headers = {}
    coordinator.answer_all(None)
    await start_generation(coordinator, 1, "print('done')", ranks_each=1)
    assert await agent.exit_code() == 0


@pytest.mark.parametrize("with_ranks", [False, True])
async def test_another_version_ends_a_pod_that_waits_and_no_ranks_that_run(
    coordinator: Coordinator, start_agent: StartAgent, *, with_ranks: bool
) -> None:
    agent = start_agent(MESHWRIGHT_REJECT_SECONDS="1.0")
    await coordinator.gang(1)
    if with_ranks:
        await start_generation(coordinator, 1, SLEEP, ranks_each=1)
        await reported(coordinator, AgentState.RUNNING, 1)
    coordinator.answer_all(426)
    if not with_ranks:
        assert await agent.exit_code(10) == 1
        assert "426" in agent.log
        return
    await until(
        lambda: "the coordinator rejected the poll; ranks keep running: 426" in agent.log, 10, lambda: agent.log
    )
    await asyncio.sleep(2.0)
    assert agent.process.poll() is None
    coordinator.answer_all(None)
    await start_generation(coordinator, 2, "print('done')", ranks_each=1)
    assert await agent.exit_code() == 0


async def test_an_agent_follows_a_coordinator_that_restarts(coordinator: Coordinator, start_agent: StartAgent) -> None:
    agent = start_agent()
    await coordinator.gang(1)
    await until(lambda: coordinator.reports, 30, lambda: agent.log)
    coordinator.session = "session-2"
    coordinator.counters.clear()
    coordinator.reports.clear()
    await until(lambda: coordinator.reports, 30, lambda: agent.log)
    assert coordinator.problems == []
    assert "ranks keep running" not in agent.log, "the request is sent again at once"
    await start_generation(coordinator, 1, "print('done')", ranks_each=1)
    assert await agent.exit_code() == 0


async def test_an_agent_reports_at_the_interval_of_the_coordinator(
    coordinator: Coordinator, start_agent: StartAgent
) -> None:
    coordinator.extra = {"reportSeconds": 300.0}
    agent = start_agent()
    await coordinator.gang(1)
    await until(lambda: coordinator.reports, 30, lambda: agent.log)
    before = len(coordinator.reports)
    await asyncio.sleep(3.0)  # six of the shortest intervals
    assert len(coordinator.reports) <= before + 1
    await start_generation(coordinator, 1, "print('done')", ranks_each=1)
    assert await agent.exit_code() == 0
    assert coordinator.states(0)[-1] is AgentState.COMPLETE, "a change is reported at once"
