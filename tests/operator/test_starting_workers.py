"""Workers that start beside an elastic job whose generation ends: with `onLoss: Shrink` they keep starting."""

from __future__ import annotations

import pytest

from meshwright.protocol.messages import AgentState, FailureKind
from tests.operator.test_drains import cordon, node_of
from tests.operator.test_elastic import FOREVER, edit, elastic, events, pods, set_ready, size
from tests.operator.world import World


async def with_a_starting_replacement(world: World, **fields: object) -> str:
    """A job of three replicas that has lost worker 0 and continues with two. The name of the pod that starts."""
    world.submit(elastic("job", 3, onLoss="Shrink", **fields))
    await world.run(20)
    world.unprepared = True
    set_ready(world, node_of(world, 0), ready=False)
    await world.run(25)
    assert size(world, "job") == 2
    assert world.true("job", "Ready")
    (starting,) = {name for name in pods(world, "job") if not name.endswith("-0")}
    return starting


def prepare(world: World) -> None:
    """The agents of new pods have imported the training runtime."""
    world.unprepared = False
    for agent in world.agents.values():
        agent.preparing = False


def crash(world: World, worker: int) -> None:
    world.crash(next(pod.name for pod in world.pods("job") if pod.worker == worker and not pod.terminal))


async def test_a_second_loss_leaves_the_replacement_that_starts() -> None:
    world = World(6, nodes=6, work=FOREVER)
    starting = await with_a_starting_replacement(world, pauseSeconds=3600)
    crash(world, 1)
    for _ in range(25):
        await world.tick()
        assert starting in pods(world, "job")
    assert (size(world, "job"), world.true("job", "Ready")) == (1, True), "the replica that is left trains"
    assert world.condition("job", "Rescaling")["message"] == "Starting 1 worker to grow from 1 replica to 2"
    prepare(world)
    await world.run(60)
    assert (size(world, "job"), world.true("job", "Ready")) == (3, True), "no growth after a loss waits for the pause"
    assert {starting, "job-w2-0"} < pods(world, "job")
    assert not world.true("job", "Rescaling")
    assert not events(world, "job", "GrowthEnded")


async def test_a_failed_rank_leaves_the_replacement_that_starts() -> None:
    world = World(6, nodes=6, work=FOREVER)
    starting = await with_a_starting_replacement(world)
    agent = next(agent for agent in world.agents.values() if agent.state is AgentState.RUNNING)
    agent.state, agent.failure = AgentState.FAILED, FailureKind.ERROR
    await world.run(25)
    assert (size(world, "job"), world.true("job", "Ready")) == (2, True)
    prepare(world)
    await world.run(25)
    assert (size(world, "job"), world.true("job", "Ready")) == (3, True)
    assert pods(world, "job") == {starting, "job-w1-0", "job-w2-0"}


async def test_a_loss_below_the_smallest_size_is_made_up_by_the_replacement_that_starts_already() -> None:
    world = World(6, nodes=6, work=FOREVER)
    starting = await with_a_starting_replacement(world, minReplicas=2)
    crash(world, 1)
    await world.run(25)
    prepare(world)
    await world.run(25)
    assert world.true("job", "Ready")
    assert {starting, "job-w2-0"} <= pods(world, "job")
    assert [note.message for note in events(world, "job", "WorkersReplaced")]


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_worker_that_starts_to_replace_one_on_a_draining_node_keeps_starting(lost: int) -> None:
    """Whether the one that it replaces is lost, or another: then it still replaces it."""
    world = World(6, nodes=6, work=FOREVER)
    world.submit(elastic("job", 3, onLoss="Shrink", pauseSeconds=3600))
    await world.run(20)
    world.unprepared = True
    cordon(world, node_of(world, 0), cordoned=True)
    await world.run(15)
    (starting,) = {name for name in pods(world, "job") if not name.endswith("-0")}
    set_ready(world, node_of(world, lost), ready=False)
    await world.run(25)
    assert (size(world, "job"), world.true("job", "Ready")) == (2, True)
    assert starting in pods(world, "job")
    prepare(world)
    await world.run(90)
    assert (size(world, "job"), world.true("job", "Ready")) == (3, True), world.status("job")
    assert starting in pods(world, "job")
    assert "job-w0-0" not in pods(world, "job")


async def test_an_edit_or_a_suspension_ends_what_starts() -> None:
    """The pods that start are of the revision before the edit."""
    world = World(6, nodes=6, work=FOREVER)
    starting = await with_a_starting_replacement(world)
    crash(world, 1)
    await world.run(2)
    edit(world, "job", suspend=True)
    await world.run(60)
    assert not pods(world, "job")
    edit(world, "job", suspend=False)
    prepare(world)
    await world.run(60)
    assert (size(world, "job"), world.true("job", "Ready")) == (3, True)
    assert starting not in pods(world, "job")


async def test_a_starting_replacement_that_is_lost_with_a_replica_is_replaced_too() -> None:
    world = World(6, nodes=6, work=FOREVER)
    starting = await with_a_starting_replacement(world, pauseSeconds=30)
    crash(world, 1)
    world.crash(starting)
    prepare(world)
    await world.run(200)
    assert (size(world, "job"), world.true("job", "Ready")) == (3, True)
