"""Edits of running jobs, among faults and other jobs, in virtual time: an impossible one never costs a gang its run."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from meshwright_operator.kube.pod_info import read_pod
from tests.operator.kstatus import CURRENT, FAILED, IN_PROGRESS, kstatus
from tests.operator.support import JOBS
from tests.operator.test_gang_races import small
from tests.operator.world import Operator, World
from tests.randomness import seeds
from tests.tiers import mostly_long

# What may be asked of a job of two workers on four nodes of two GPUs, and what kstatus then reads.
IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "contradiction": ({"parallelism": {"tensor": 3, "pipeline": 1}}, FAILED),
    "immutable": ({"training": {"steps": 50, "globalBatchSize": 24, "sequenceLength": 64, "seed": 3}}, FAILED),
    "garbage": ({"workers": "none"}, FAILED),
    "no such node": ({"workers": {"image": "i", "gpusPerWorker": 4}, "replicas": 2}, IN_PROGRESS),
    "no room": ({"replicas": 6}, IN_PROGRESS),
}
POSSIBLE: tuple[dict[str, Any], ...] = (
    {"workers": {"image": "another", "gpusPerWorker": 2}},
    {"replicas": 1},
    {"replicas": 3},
    {"training": {"steps": 60, "globalBatchSize": 24, "sequenceLength": 64}},
)


def edit(world: World, name: str, changes: dict[str, Any]) -> None:
    """A user's edit, as the API server would store it with no rule in the way."""
    path = f"{JOBS}/{name}"
    obj = copy.deepcopy(world.cluster.objects[path])
    obj["spec"] |= changes
    obj["metadata"]["generation"] += 1
    world.cluster.update(path, obj)


def state(world: World, name: str) -> str:
    return kstatus(world.cluster.objects[f"{JOBS}/{name}"])


def images(world: World, name: str) -> set[str]:
    pods = [obj for obj in world.cluster.of("pods") if (pod := read_pod(obj)) is not None and pod.job == name]
    return {obj["spec"]["containers"][0]["image"] for obj in pods}


async def running(seed: int, **world: Any) -> World:
    """A world of four nodes in which the job `edited` trains with two workers."""
    made = World(seed, nodes=4, **world)
    made.submit(small("edited", 2))
    await made.run(12)
    assert state(made, "edited") == CURRENT
    return made


@pytest.mark.parametrize("kind", IMPOSSIBLE)
@pytest.mark.parametrize("fault", mostly_long(["none", "pod lost", "operator killed", "both"], "both".__eq__))
async def test_an_impossible_edit_costs_nothing_but_the_fault(kind: str, fault: str) -> None:
    for seed in range(2):
        world = await running(seed, work=10_000.0)
        before = {pod.name for pod in world.pods("edited")}
        changes, expected = IMPOSSIBLE[kind]
        spec = copy.deepcopy(world.cluster.objects[f"{JOBS}/edited"]["spec"])
        edit(world, "edited", changes)
        await world.run(world.random.choice((0, 1, 5)))
        if fault in ("operator killed", "both"):
            world.operators[0].blind = True
            world.operators = [Operator(world)]
        if fault in ("pod lost", "both"):
            world.crash(world.random.choice(sorted(before)))
        await world.run(60)
        assert state(world, "edited") == expected
        status = world.status("edited")
        assert status["readyRanks"] == "4/4"
        assert status["mesh"]["generation"] == (2 if fault in ("pod lost", "both") else 1)
        after = {pod.name for pod in world.pods("edited")}
        assert len(after) == 2
        assert len(before - after) == (1 if fault in ("pod lost", "both") else 0)
        assert images(world, "edited") == {"meshwright/worker"}
        generation = status["mesh"]["generation"]
        edit(world, "edited", spec)
        await world.run(10)
        assert state(world, "edited") == CURRENT
        assert world.status("edited")["mesh"]["generation"] == generation, "nobody was restarted"


@pytest.mark.chaos
@pytest.mark.parametrize("seed", seeds(3))
async def test_any_series_of_edits_ends_with_the_last_one(seed: int) -> None:
    chance = random.Random(seed)
    world = await running(seed, work=10_000.0)
    world.submit(small("other", 2, priority=chance.choice((-5, 0))))
    original = copy.deepcopy(world.cluster.objects[f"{JOBS}/edited"]["spec"])
    for _ in range(chance.randint(1, 6)):
        changes = chance.choice([*POSSIBLE, *(changes for changes, _ in IMPOSSIBLE.values())])
        edit(world, "edited", {**original, **changes})
        for _ in range(chance.choice((0, 1, 3, 10, 40))):
            await world.tick()
            if chance.random() < 0.03 and world.agents:
                world.crash(chance.choice(sorted(world.agents)))
        if chance.random() < 0.3:
            world.operators[0].blind = True
            world.operators = [Operator(world)]
    last = {"workers": {"image": "last", "gpusPerWorker": 2}}
    edit(world, "edited", {**original, **last})
    await world.run(240)
    assert state(world, "edited") == state(world, "other") == CURRENT, (seed, world.status("edited"))
    assert images(world, "edited") == {"last"}
    assert world.status("edited")["readyRanks"] == world.status("other")["readyRanks"] == "4/4"
    world.work = 1.0
    await world.run(30)
    assert world.true("edited", "Complete")
    assert world.true("other", "Complete")


async def test_the_gangs_own_room_is_not_lost_to_a_job_that_waits() -> None:
    for seed in range(4):
        world = World(seed, nodes=2, work=10_000.0)
        world.submit(small("edited", 2))
        await world.run(12)
        world.submit(small("waits", 2))
        await world.run(world.random.choice((1, 20, 200)))
        edit(world, "edited", {"workers": {"image": "new", "gpusPerWorker": 2}})
        await world.run(60)
        assert state(world, "edited") == CURRENT, seed
        assert images(world, "edited") == {"new"}
        assert not world.pods("waits")


async def test_a_job_of_higher_priority_is_not_passed_by_an_edit() -> None:
    world = World(1, nodes=2, work=10_000.0)
    world.submit(small("edited", 2))
    await world.run(12)
    world.submit(small("urgent", 2, priority=5))
    await world.run(5)
    edit(world, "edited", {"workers": {"image": "new", "gpusPerWorker": 2}})
    await world.run(60)
    assert images(world, "edited") == {"meshwright/worker"}, "it would have lost its place by the restart"
    assert state(world, "edited") == IN_PROGRESS
    assert "urgent" in world.condition("edited", "Ready")["message"]
    assert world.status("edited")["readyRanks"] == "4/4"
