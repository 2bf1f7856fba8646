"""A job whose required levels cannot be met waits, says why, and starts when they can."""

from __future__ import annotations

from typing import Any

from meshwright.api.objects import KubeObject
from meshwright.api.topology import FabricLevel
from tests.operator.support import node
from tests.operator.test_elastic import FOREVER, set_ready
from tests.operator.test_gang_races import small
from tests.operator.world import World

RACK = "network.topology.nvidia.com/leaf"
IN_ONE_RACK = {"data": {"required": FabricLevel.RACK.value}}


def put_in_rack(world: World, name: str, rack: str) -> None:
    world.nodes[name]["metadata"]["labels"][RACK] = rack


def two_racks(nodes: int = 6) -> World:
    """Nodes with two GPUs each: the first half in rack r0, the others in r1."""
    world = World(1, nodes=nodes, work=FOREVER)
    for index, name in enumerate(world.nodes):
        put_in_rack(world, name, f"r{index * 2 // nodes}")
    return world


def add_node(world: World, name: str, rack: str) -> None:
    """A node with two GPUs, of which a watch tells the operator."""
    found = node(name, rack, 2)
    found["metadata"]["uid"] = f"uid-of-{name}"
    world.cluster.stamp(found)
    world.nodes[name] = found
    put_in_rack(world, name, rack)
    world.operators[0].cache.put_node(found)
    world.operators[0].nodes_changed()


def racks(world: World, job: str) -> set[str]:
    """The racks of a job's pods that have not ended."""
    return {world.nodes[name]["metadata"]["labels"][RACK] for name in nodes(world, job)}


def nodes(world: World, job: str) -> set[str]:
    """The nodes of a job's pods that have not ended."""
    return {pod.node for pod in world.pods(job) if not pod.terminal and pod.node}


def filling(name: str, workers: int, **spec: Any) -> KubeObject:
    """A preemptible job of so many pods of two GPUs."""
    return small(name, workers, preemptible=True, checkpoint={"claimName": "shared"}, **spec)


def in_rack(rack: str, body: KubeObject) -> KubeObject:
    """The job, with workers that run on nodes of this rack only."""
    body["spec"]["workers"]["nodeSelector"] = {RACK: rack}
    return body


async def test_a_job_waits_until_its_level_can_be_met() -> None:
    world = two_racks()
    world.submit(small("other", 2))
    await world.run(4)
    assert racks(world, "other") == {"r0"}
    world.submit(small("far", 4, topology=IN_ONE_RACK))
    await world.run(4)
    placed = world.condition("far", "Placed")
    assert (placed["status"], placed["reason"]) == ("False", "DoesNotFit")
    assert (
        "`topology.data.required: rack` needs 4 workers with 2 GPUs each in one rack: the most that fit in one are 3"
        in (placed["message"])
    )
    add_node(world, "elsewhere", "r2")
    await world.run(60)
    assert world.condition("far", "Placed")["reason"] == "DoesNotFit"
    add_node(world, "n6", "r1")
    await world.run(30)
    assert world.true("far", "Ready"), world.condition("far", "Placed")
    assert nodes(world, "far") == {"n3", "n4", "n5", "n6"}
    assert world.status("far")["placement"]["topology"]["data"] == "rack"


async def test_a_job_is_placed_where_its_level_is_met() -> None:
    world = two_racks()
    world.submit(small("other", 2))
    await world.run(4)
    world.submit(small("near", 3, topology=IN_ONE_RACK))
    await world.run(6)
    assert world.true("near", "Ready")
    assert world.status("near")["placement"]["topology"]["data"] == "rack"
    assert nodes(world, "near") == {"n3", "n4", "n5"}


async def test_a_lost_worker_is_replaced_in_the_rack_of_the_others() -> None:
    world = two_racks(8)
    world.submit(small("job", 3, topology=IN_ONE_RACK))
    await world.run(30)
    assert len(racks(world, "job")) == 1
    before = nodes(world, "job")
    lost = min(before)
    set_ready(world, lost, False)
    await world.run(120)
    assert world.true("job", "Ready"), world.condition("job", "Placed")
    after = nodes(world, "job")
    assert len(racks(world, "job")) == 1
    assert before - {lost} < after
    assert world.status("job")["placement"]["topology"]["data"] == "rack"


async def test_all_workers_move_if_a_lost_one_cannot_be_replaced_in_their_rack() -> None:
    world = two_racks()
    world.submit(small("job", 3, topology=IN_ONE_RACK))
    await world.run(30)
    (first,) = racks(world, "job")
    set_ready(world, min(nodes(world, "job")), False)
    await world.run(300)
    assert world.true("job", "Ready"), world.condition("job", "Placed")
    assert racks(world, "job") == {"r0", "r1"} - {first}
    assert world.status("job")["placement"]["topology"]["data"] == "rack"


async def test_a_job_waits_after_a_loss_until_one_rack_has_room_again() -> None:
    world = two_racks()
    world.submit(small("job", 3, topology=IN_ONE_RACK))
    await world.run(30)
    lost = min(nodes(world, "job"))
    (rack,) = racks(world, "job")
    world.submit(small("other", 1))
    await world.run(30)
    assert world.true("other", "Ready")
    set_ready(world, lost, False)
    await world.run(300)
    assert not world.true("job", "Ready")
    assert world.condition("job", "Placed")["reason"] == "DoesNotFit"
    set_ready(world, lost, True)
    await world.run(120)
    assert world.true("job", "Ready"), world.condition("job", "Placed")
    assert racks(world, "job") == {rack}


async def test_jobs_stop_in_one_rack_for_a_job_that_must_be_in_one() -> None:
    """Four jobs fill two racks in turns, so the two that started last are in different racks and do not help."""
    world = two_racks(8)
    for number in range(4):
        world.submit(in_rack(f"r{number % 2}", filling(f"low{number}", 2)))
        await world.run(20)
    assert [racks(world, f"low{number}") for number in range(4)] == [{"r0"}, {"r1"}, {"r0"}, {"r1"}]
    world.submit(small("high", 4, priority=10, topology=IN_ONE_RACK))
    await world.run(200)
    assert world.true("high", "Ready"), world.condition("high", "Placed")
    (rack,) = racks(world, "high")
    others = {"r0": {"low1", "low3"}, "r1": {"low0", "low2"}}[rack]
    assert {name for name in ("low0", "low1", "low2", "low3") if nodes(world, name)} == others
    assert all(world.true(name, "Ready") for name in others)


async def test_elastic_jobs_give_up_replicas_in_one_rack_for_a_job_that_must_be_in_one() -> None:
    world = two_racks()
    for number in range(2):
        world.submit(in_rack(f"r{number}", small(f"low{number}", 3, elastic={"minReplicas": 1, "maxReplicas": 3})))
        await world.run(20)
    world.submit(small("high", 2, priority=10, topology=IN_ONE_RACK))
    await world.run(200)
    assert world.true("high", "Ready"), world.condition("high", "Placed")
    (rack,) = racks(world, "high")
    shrunk = f"low{rack[1]}"
    assert {f"low{number}": world.status(f"low{number}")["replicas"] for number in range(2)} == {
        "low0": 3,
        "low1": 3,
        shrunk: 1,
    }


async def test_nobody_stops_for_a_level_that_cannot_be_met() -> None:
    world = two_racks()
    for number in range(3):
        world.submit(filling(f"low{number}", 2))
        await world.run(20)
    world.submit(small("high", 4, priority=10, topology=IN_ONE_RACK))
    await world.run(200)
    assert world.condition("high", "Placed")["reason"] == "DoesNotFit"
    assert all(world.true(f"low{number}", "Ready") for number in range(3))
