"""The coordinator pauses a generation: agents learn of it at once, and each open poll ends only once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from meshwright.protocol.messages import AgentState, ReportReply
from meshwright_operator.coordinator import agent_registry
from tests.operator.builders import pod, report
from tests.operator.test_coordinator import WORKERS, Stage, mesh_document, stage
from tests.patience import patient, until

__all__ = ["stage"]  # a fixture


@pytest.fixture(autouse=True)
def long_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll ends for a reason, and never because its time is up."""
    monkeypatch.setattr(agent_registry, "random", SimpleNamespace(uniform=lambda *_: 1e4))


async def pause_in_reply(stage: Stage, worker: int = 0, *, generation: int = 1, incarnation: int = 0) -> int | None:
    message = report(worker, AgentState.RUNNING, generation=generation, incarnation=incarnation)
    status, reply = await stage.post("report", message.wire())
    assert status == 200
    return ReportReply.model_validate(reply).pause


async def publish(stage: Stage, *, pause: bool, generation: int = 1) -> None:
    await stage.registry.publish(mesh_document(generation), WORKERS, generation=generation, pause=pause)


async def test_replies_to_agents_of_the_generation_have_the_pause(stage: Stage) -> None:
    await publish(stage, pause=False, generation=2)
    assert await pause_in_reply(stage, generation=2) is None
    await publish(stage, pause=True, generation=2)
    assert await pause_in_reply(stage, generation=2) == 2, "the same report again"
    assert await pause_in_reply(stage, generation=2) == 2, "until the next generation"
    assert await pause_in_reply(stage, 1, generation=1) is None, "its ranks are of another generation"
    await publish(stage, pause=False, generation=2)
    assert await pause_in_reply(stage, generation=2) is None
    await publish(stage, pause=True, generation=2)
    await publish(stage, pause=False, generation=3)
    assert await pause_in_reply(stage, generation=3) is None


async def test_the_pause_outlives_the_document(stage: Stage) -> None:
    """While the next generation is being formed, there is no document."""
    await publish(stage, pause=False)
    await stage.registry.publish(None, WORKERS, generation=1, pause=True)
    assert await pause_in_reply(stage) == 1


async def ends(stage: Stage, worker: int, incarnation: int = 0) -> None:
    """A poll is answered with 204."""
    async with asyncio.timeout(patient(5)):
        assert (await stage.poll(worker, wait=60, generation=1, incarnation=incarnation))[0] == 204


async def stays_open(stage: Stage, worker: int, generation: int = 1) -> None:
    """A poll is not answered."""
    poll = asyncio.create_task(stage.poll(worker, wait=60, generation=generation))
    await until(lambda: stage.registry.polls(worker) == 1)
    await asyncio.sleep(0.1)
    assert not poll.done()
    poll.cancel()
    await until(lambda: stage.registry.polls(worker) == 0)


async def test_an_open_poll_ends_once_for_a_pause(stage: Stage) -> None:
    await publish(stage, pause=False)
    polls = [asyncio.create_task(stage.poll(worker, wait=60, generation=1)) for worker in (0, 1)]
    await until(lambda: stage.registry.polls(0) == stage.registry.polls(1) == 1)
    await publish(stage, pause=True)
    async with asyncio.timeout(patient(5)):
        assert [status for status, _ in await asyncio.gather(*polls)] == [204, 204]
    assert set(stage.registry.agents().waiting_agents) == {0, 1}, "their ports are still reserved"
    # An agent that ignores it polls again. If that poll ended at once too, it would poll in a loop.
    await stays_open(stage, 0)
    await publish(stage, pause=True)
    await stays_open(stage, 0)


async def test_a_poll_that_opens_during_a_pause_ends_once(stage: Stage) -> None:
    """Such as that of an agent that was between two polls when the pause was published."""
    await publish(stage, pause=True)
    await ends(stage, 0)
    await stays_open(stage, 0)
    assert await pause_in_reply(stage, 1) == 1
    await stays_open(stage, 1)  # it has received the pause in the reply to its report


async def test_a_poll_of_another_generation_does_not_end_for_a_pause(stage: Stage) -> None:
    await stage.registry.publish(None, WORKERS, generation=2, pause=True)
    for generation in (0, 1, 3):
        await stays_open(stage, 0, generation)


async def test_another_pause_or_incarnation_ends_a_poll_again(stage: Stage) -> None:
    await publish(stage, pause=True)
    await ends(stage, 3)
    await publish(stage, pause=False)
    await stays_open(stage, 3)
    await publish(stage, pause=True)
    await ends(stage, 3)
    stage.cache.put_pod(pod(3, 1, owner="u1"))
    await stage.registry.publish(mesh_document(), {**WORKERS, 3: 1}, generation=1, pause=True)
    await ends(stage, 3, incarnation=1)


async def test_a_new_document_comes_before_a_pause(stage: Stage) -> None:
    await publish(stage, pause=True)
    status, body = await stage.poll(0, generation=0)
    assert (status, body["generation"]) == (200, 1)


async def test_a_report_that_an_agent_has_paused_is_urgent(stage: Stage) -> None:
    await publish(stage, pause=True)
    running = report(0, AgentState.RUNNING)
    for message, urgent in ((running, True), (running, False), (running.model_copy(update={"paused": True}), True)):
        stage.told.clear()
        await stage.post("report", message.wire())
        assert [told for _, told in stage.told] == [urgent]
