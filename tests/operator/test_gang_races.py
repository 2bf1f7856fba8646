"""Jobs that race for too few nodes, in virtual time: no partial start, no deadlock, a fair line, an honest wait."""

from __future__ import annotations

import random
from typing import Any

import pytest

from meshwright_operator.kube.client import ApiError
from tests.operator.support import job
from tests.operator.world import World
from tests.randomness import seeds

UNREACHABLE = ApiError(0, "Unreachable", "connection reset")


def small(name: str, workers: int, **fields: Any) -> dict[str, Any]:
    """A job of so many pods of two GPUs."""
    return job(
        name,
        replicas=workers,
        parallelism={"tensor": 2, "pipeline": 1, "microBatches": 1},
        training={"steps": 50, "globalBatchSize": 24, "sequenceLength": 64},
        **fields,
    )


COMMAND: dict[str, Any] = {
    "runtime": {"command": ["python", "train.py"]},
    "model": None,
    "data": None,
    "training": None,
    "parallelism": {"tensor": 2, "pipeline": 1},
}


def command(name: str, workers: int, **fields: Any) -> dict[str, Any]:
    """A job that runs the user's command in so many pods."""
    body = job(name, replicas=workers, **COMMAND, **fields)
    body["spec"] = {key: value for key, value in body["spec"].items() if value is not None}
    return body


@pytest.mark.chaos
@pytest.mark.parametrize("seed", seeds(5))
async def test_pairs_of_jobs_that_race_for_too_few_nodes_all_complete(seed: int) -> None:
    chance = random.Random(seed)
    nodes = chance.choice((2, 3, 4))
    world = World(seed, nodes, work=8.0)
    sizes = [chance.choice([n for n in (1, 2, 3, 4) if n <= nodes]) for _ in range(2)]
    if sum(sizes) <= nodes:
        sizes[0] = nodes
    world.cluster.refuse = lambda path, body: UNREACHABLE if chance.random() < 0.1 else None
    names = ("first", "second")
    for name, size in zip(names, sizes, strict=True):
        world.submit(small(name, size, priority=chance.choice((0, 0, 5))))
        await world.run(chance.choice((0, 0, 1, 4)))
    for _ in range(400):
        if all(world.true(name, "Complete") for name in names):
            break
        await world.tick()
        if chance.random() < 0.05 and world.agents:
            name = chance.choice(sorted(world.agents))
            if chance.random() < 0.5:
                world.crash(name)
            else:
                await world.evict(name)
    for name in names:
        assert world.true(name, "Complete"), (seed, sizes, nodes, name, world.status(name))
    world.cluster.refuse = lambda path, body: None
    await world.run(5)  # a pod that replaces one that was lost just before the end is deleted after it
    assert not [pod for pod in world.pods() if not pod.terminal]


async def test_small_jobs_do_not_keep_a_large_one_waiting_for_ever() -> None:
    world = World(1, nodes=4, work=60.0)
    for number in range(4):
        world.submit(small(f"early{number}", 1))
        await world.run(10)
    world.submit(small("large", 4))
    late: list[str] = []
    while not world.true("large", "Placed") and len(late) < 60:
        late.append(f"late{len(late)}")
        world.submit(small(late[-1], 1))
        await world.run(10)
    assert world.true("large", "Placed"), "it starved"
    assert any(world.true(name, "Complete") for name in late), (
        "while it does not fit, free nodes serve others for a while"
    )
    waited = [n for name, n in world.operators[0].notes.notes if name == "large" and n.reason == "PlacementFailed"]
    assert len(waited) == 1, "the wait is told once"
    assert world.seconds() < 40 + 120 + 60 + 60, "two minutes of being passed by, and the rest of those that run"


async def test_a_waiting_job_says_what_is_short_what_would_fit_and_who_would_have_to_end() -> None:
    world = World(2, nodes=4, work=1000.0)
    world.submit(small("holder", 3))
    await world.run(10)
    world.submit(small("asker", 4))
    await world.run(5)
    message = world.condition("asker", "Placed")["message"]
    assert "1 of 4 workers with" in message
    assert "set `spec.replicas: 1` to start now" in message
    assert "Fits when job default/holder (6 GPUs) ends" in message
    world.submit(small("behind", 2))
    await world.run(5)
    assert "1 job is ahead in the queue" in world.condition("behind", "Placed")["message"]


async def test_the_higher_priority_and_then_the_older_job_is_placed_first() -> None:
    world = World(3, nodes=2, work=20.0)
    world.submit(small("running", 2))
    await world.run(5)
    for name, priority in (("old", 0), ("young", 0), ("high", 7)):
        world.submit(small(name, 2, priority=priority))
        await world.run(2)
    await world.run(200)
    starts = [(uid, generation) for uid, generation, worker, _ in world.started if worker == 0]
    uids = {obj["metadata"]["uid"]: obj["metadata"]["name"] for obj in world.cluster.of("paralleltrainingjobs")}
    assert [uids[uid] for uid, _ in starts] == ["running", "high", "old", "young"]


async def test_a_job_that_can_never_fit_reserves_nothing() -> None:
    world = World(4, nodes=2, work=20.0)
    world.submit(small("giant", 3))
    await world.run(200)
    world.submit(small("normal", 2))
    await world.run(60)
    assert world.true("normal", "Complete")
    assert not world.true("giant", "Placed")
