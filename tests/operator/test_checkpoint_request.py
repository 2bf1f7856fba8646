"""The annotation that asks a job for a checkpoint: who is asked, and what status and events say."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from meshwright.api.labels import ANNOTATION_CHECKPOINT
from meshwright.api.status import CheckpointRequestStatus
from meshwright.protocol.messages import AgentState, CheckpointAnswer, CheckpointTier, Progress
from meshwright_operator.decide.decide_job import decide
from tests.operator.builders import agents, ago, observed, report, running_status
from tests.operator.test_elastic import edit
from tests.operator.test_gang_races import command, small
from tests.operator.world import JOBS, Operator, World

CHECKPOINT = {"claimName": "volume", "everySteps": 1000}


def ask(world: World, request: str) -> None:
    body = copy.deepcopy(world.cluster.objects[f"{JOBS}/job"])
    body["metadata"]["annotations"] = {ANNOTATION_CHECKPOINT: request}
    world.cluster.update(f"{JOBS}/job", body)


def answer(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.status("job").get("checkpointRequest", {})
    return found


def reasons(world: World) -> list[str]:
    own = ("CheckpointRequested", "CheckpointRequestSaved", "CheckpointNotSaved")
    return [reason for reason in world.operators[0].notes.reasons("job") if reason in own]


async def training(seed: int, body: dict[str, Any]) -> World:
    world = World(seed, nodes=4, work=10**6)
    world.submit(body)
    await world.run(40)
    assert world.true("job", "Ready")
    return world


async def test_each_value_is_one_checkpoint() -> None:
    world = await training(1, small("job", 2, checkpoint=CHECKPOINT))
    ask(world, "2026-11-26T00:00:00Z")
    await world.run(15)
    first = answer(world)
    assert (first["state"], first["request"]) == ("Saved", "2026-11-26T00:00:00Z")
    assert world.status("job")["checkpoint"]["step"] == first["step"]
    assert reasons(world) == ["CheckpointRequested", "CheckpointRequestSaved"]
    await world.run(60)
    assert answer(world) == first, "the same value is the same request"
    ask(world, "again")
    await world.run(15)
    second = answer(world)
    assert second["state"] == "Saved"
    assert second["step"] > first["step"]
    assert reasons(world) == ["CheckpointRequested", "CheckpointRequestSaved"] * 2
    assert world.status("job")["mesh"]["generation"] == 1, "training went on"


async def test_another_operator_does_not_ask_again() -> None:
    world = await training(2, small("job", 2, checkpoint=CHECKPOINT))
    ask(world, "one")
    await world.run(15)
    before = answer(world)
    world.operators[0] = Operator(world)
    await world.run(60)
    assert answer(world) == before
    ask(world, "two")
    world.operators[0] = Operator(world)
    await world.run(30)
    assert answer(world)["state"] == "Saved", "agents that have not reported yet may train"


@pytest.mark.parametrize(
    ("fields", "request_name", "why"),
    [
        ({}, "a", "no `spec.checkpoint`"),
        ({"checkpoint": CHECKPOINT, "suspend": True}, "a", "the job is suspended"),
        ({"checkpoint": CHECKPOINT}, "with spaces", "1 to 64 letters"),
        ({"checkpoint": CHECKPOINT}, "x" * 100, "1 to 64 letters"),
    ],
)
async def test_a_job_that_cannot_save_says_why(fields: dict[str, Any], request_name: str, why: str) -> None:
    world = World(3, nodes=4, work=10**6)
    world.submit(small("job", 2, **fields))
    await world.run(40)
    ask(world, request_name)
    await world.run(30)
    found = answer(world)
    assert found["state"] == "Failed"
    assert why in found["message"]
    assert found["message"].endswith("It has no checkpoint yet")
    assert reasons(world) == ["CheckpointNotSaved"]


async def test_a_command_saves_its_own_checkpoints() -> None:
    world = await training(4, command("job", 2, checkpoint={"claimName": "volume"}))
    ask(world, "a")
    await world.run(10)
    assert "runtime.command" in answer(world)["message"]


async def test_a_job_that_waits_for_nodes_is_not_running() -> None:
    world = World(5, nodes=1, work=10**6)
    world.submit(small("job", 3, checkpoint=CHECKPOINT))
    await world.run(20)
    ask(world, "a")
    await world.run(20)
    assert answer(world)["message"].startswith("No checkpoint was saved: the job is not Running")


async def test_a_finished_job_answers_too() -> None:
    world = World(6, nodes=4, work=20)
    world.submit(small("job", 2, checkpoint=CHECKPOINT))
    await world.run(90)
    assert world.true("job", "Complete")
    ask(world, "a")
    await world.run(20)
    assert "the job has finished" in answer(world)["message"]


async def test_agents_of_an_older_image_do_not_answer() -> None:
    world = await training(7, small("job", 2, checkpoint=CHECKPOINT))
    for agent in world.agents.values():
        agent.answers = False
    ask(world, "a")
    await world.run(30)
    assert answer(world)["state"] == "Requested"
    await world.run(60)
    assert answer(world)["state"] == "Failed"
    assert "images before 0.2" in answer(world)["message"]


async def test_ranks_that_stop_before_they_save_fail_the_request() -> None:
    world = await training(8, small("job", 2, checkpoint=CHECKPOINT))
    for agent in world.agents.values():
        agent.answers = False
    ask(world, "a")
    await world.run(5)
    world.crash("job-w1-0")
    await world.run(60)
    assert world.true("job", "Ready")
    assert answer(world)["state"] == "Failed"
    assert "stopped before they saved" in answer(world)["message"]
    edit(world, "job", suspend=True)
    await world.run(60)
    assert answer(world)["state"] == "Failed"


def test_a_request_that_cannot_be_saved_says_why_and_waits() -> None:
    """`meshwright checkpoint now` waits until the storage works again: it must not wait without a word."""
    asked = CheckpointRequestStatus(request="a", state="Requested", time=ago(30), generation=1, step=40)

    def told(*errors: str) -> CheckpointRequestStatus:
        tiers = [CheckpointTier(place=f"/tier-{number}", error=error) for number, error in enumerate(errors)]
        answers = {"checkpoint_tiers": tiers, "checkpoint_request": CheckpointAnswer(request="a", step=41)}
        sent = report(0, AgentState.RUNNING, progress=Progress(step=45, loss=1.0), **answers)
        status = running_status(checkpoint_request=asked)
        found = decide(observed(status=status, received=agents([sent]), checkpoint=CHECKPOINT)).status
        assert found.checkpoint_request is not None
        return found.checkpoint_request

    full = "No space left on device"
    assert told(full).message.startswith(f"No checkpoint can be saved: {full}. The ranks try again")
    assert told(full).state == "Requested"
    assert told(full, "").message == "The ranks save a checkpoint after their current step"
