"""A job with a deletionTimestamp: its pods go, its GPUs are free for others, and its state says so."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright_operator.timestamps import format_time
from tests.operator.support import JOBS, node
from tests.operator.test_gang_races import small
from tests.operator.world import World

HOLD = "example.com/hold"


def delete_job(world: World, name: str, finalizers: list[str]) -> None:
    """What the API server does with an object that has finalizers."""
    path = f"{JOBS}/{name}"
    obj = world.cluster.objects[path]
    obj["metadata"] |= {"deletionTimestamp": format_time(world.now), "finalizers": finalizers}
    world.cluster.update(path, obj)


async def trains(name: str, **fields: Any) -> World:
    world = World(1, nodes=2, work=500.0)
    world.submit(small(name, 2, **fields))
    await world.run(20)
    assert world.true(name, "Ready")
    return world


async def test_the_pods_of_a_job_that_is_being_deleted_go_although_a_finalizer_holds_it() -> None:
    world = await trains("held")
    world.submit(small("next", 2))
    await world.run(5)
    assert not world.pods("next")
    delete_job(world, "held", [HOLD])
    await world.run(1)
    assert all(pod.deleting for pod in world.pods("held")), "gracefully: their ranks save a checkpoint"
    ready = world.condition("held", "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Terminating")
    assert "2 pods" in ready["message"]
    await world.run(30)
    assert not world.pods("held")
    ready = world.condition("held", "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Terminating")
    assert HOLD in ready["message"]
    status = world.status("held")
    assert status["readyRanks"] == "0/4"
    assert "tokensPerSecond" not in status
    assert world.true("next", "Ready"), "its GPUs are free"


async def test_afterwards_nothing_is_written_and_nothing_created() -> None:
    world = await trains("held")
    delete_job(world, "held", [HOLD])
    await world.run(30)
    writes = world.cluster.writes
    world.operators[0].relist()
    world.nodes["n9"] = node("n9", "r0", 2)
    world.operators[0].relist()
    await world.run(600)
    assert world.cluster.writes == writes
    assert not world.pods("held")


async def test_a_new_operator_finishes_the_deletion() -> None:
    world = await trains("held")
    world.cluster.watchers.clear()
    world.operators.clear()
    delete_job(world, "held", [HOLD])
    world.operators.append(world.operator())
    await world.run(30)
    assert not world.pods("held")
    assert world.condition("held", "Ready")["reason"] == "Terminating"


async def test_spare_nodes_of_a_job_that_is_being_deleted_are_free() -> None:
    world = World(1, nodes=3, work=500.0)
    world.submit(small("held", 2, recovery={"spareNodes": 1}))
    await world.run(20)
    assert world.status("held")["placement"]["spares"]
    delete_job(world, "held", [HOLD])
    world.submit(small("next", 3))
    await world.run(40)
    assert world.true("next", "Ready")


async def test_a_waiting_job_that_is_being_deleted_leaves_the_queue() -> None:
    world = await trains("held")
    world.submit(small("waits", 2, priority=5))
    await world.run(5)
    delete_job(world, "waits", [HOLD])
    await world.run(5)
    assert world.condition("waits", "Ready")["reason"] == "Terminating"
    world.submit(small("next", 2))
    delete_job(world, "held", [HOLD])
    await world.run(40)
    assert world.true("next", "Ready")
    assert not world.pods("waits")


async def test_a_job_without_a_valid_spec_is_deleted_too() -> None:
    world = await trains("held")
    obj = world.cluster.objects[f"{JOBS}/held"]
    obj["spec"] = {"nonsense": True}
    delete_job(world, "held", [HOLD])
    await world.run(30)
    assert not world.pods("held")
    assert world.condition("held", "Ready")["reason"] == "Terminating"


async def test_pods_that_are_to_be_orphaned_are_left_alone() -> None:
    """`kubectl delete --cascade=orphan`: the garbage collector removes their owner reference."""
    world = await trains("held")
    delete_job(world, "held", ["orphan"])
    await world.run(30)
    assert len(world.pods("held")) == 2
    assert not any(pod.deleting for pod in world.pods("held"))


@pytest.mark.parametrize("kind", ["Complete", "Failed"])
async def test_what_a_finished_job_came_to_is_kept(kind: str) -> None:
    world = World(1, nodes=2, work=5.0 if kind == "Complete" else 500.0)
    world.submit(small("held", 2, activeDeadlineSeconds=40))
    await world.run(60)
    assert world.true("held", kind)
    delete_job(world, "held", [HOLD])
    await world.run(10)
    assert world.true("held", kind)
    assert world.condition("held", "Ready")["reason"] == "Terminating"
