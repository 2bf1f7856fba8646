"""Pods that are missing from the cache: the API server is asked once, and not at every look."""

from __future__ import annotations

import pytest

from meshwright.api.labels import LABEL_JOB
from tests.operator.memory import copied
from tests.operator.support import PODS
from tests.operator.test_gang_races import small
from tests.operator.world import World


def asked(world: World) -> int:
    """Requests that read pods."""
    return sum(1 for verb, path in world.cluster.requests if verb in ("get", "list") and path.startswith(PODS))


async def lose_everything(world: World, workers: int) -> None:
    """A gang that trained loses all its pods and nodes at once, and waits."""
    world.submit(small("train", workers))
    await world.run(20)
    assert world.true("train", "Ready")
    for obj in world.nodes.values():
        obj["spec"] = {"unschedulable": True}
        world.operators[0].cache.put_node(obj)
    for pod in world.pods("train"):
        world.crash(pod.name)
    world.cluster.requests.clear()


@pytest.mark.parametrize("workers", [2, 12])
async def test_a_gang_that_waits_asks_for_its_missing_pods_once(workers: int) -> None:
    world = World(1, nodes=workers)
    await lose_everything(world, workers)
    await world.run(5)
    first = asked(world)
    assert 1 <= first <= 8, "a few one by one, many with one list"
    for _ in range(20):
        world.operators[0].queue.add(next(iter(world.operators[0].cache.jobs)))
        await world.run(3)
    assert world.condition("train", "Placed")["reason"] == "DoesNotFit"
    assert asked(world) == first, "64 at every look before, for a gang of 64"


async def test_a_new_gang_asks_for_no_pod() -> None:
    world = World(2, nodes=1)
    world.submit(small("train", 4))
    await world.run(30)
    assert asked(world) == 0


@pytest.mark.parametrize("workers", [2, 12])
async def test_pods_that_lost_their_label_get_it_back(workers: int) -> None:
    world = World(3, nodes=workers)
    operator = world.operators[0]
    world.submit(small("train", workers))
    await world.run(20)
    pods = {pod.uid for pod in world.pods("train")}
    for pod in world.pods("train"):
        obj = copied(world.cluster.objects[f"{PODS}/{pod.name}"])
        del obj["metadata"]["labels"][LABEL_JOB]
        # A watch with a selector sends an object that no longer matches as deleted.
        operator.cache.remove_deleted_pod(world.cluster.update(f"{PODS}/{pod.name}", obj))
    operator.queue.add(next(iter(operator.cache.jobs)))
    await world.run(10)
    assert {pod.uid for pod in world.pods("train")} == pods
    assert world.status("train")["mesh"]["generation"] == 1
