"""Spare nodes: reserved while their job runs, used when it loses a node, released when it finishes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.scheduling.policy import Bounds, Policy
from meshwright_operator.scheduling.reservations import reserved_for_others, reserved_spares, spares_allowed
from tests.operator.test_gang_races import small
from tests.operator.test_owned_objects import collect, delete_job
from tests.operator.world import JOBS, World


def lose(world: World, name: str) -> None:
    """The node takes nothing any more, and every operator hears of it."""
    gone = copy.deepcopy(world.nodes[name])
    gone["spec"] = {"unschedulable": True}
    world.nodes[name] = gone
    for operator in world.operators:
        operator.cache.put_node(gone)


def nodes_of(world: World, name: str) -> set[str]:
    return {entry["node"] for entry in world.status(name)["placement"]["workers"]}


async def test_other_jobs_keep_off_spares_until_the_job_is_over() -> None:
    world = World(6, nodes=4, work=90.0)
    world.submit(small("kept", 2, recovery={"spareNodes": 1}))
    await world.run(15)
    (spare,) = world.status("kept")["placement"]["spares"]
    assert spare not in nodes_of(world, "kept")
    world.submit(small("other", 2))
    await world.run(20)
    assert not world.true("other", "Placed")
    assert f"{spare} (spare node of job default/kept)" in world.condition("other", "Placed")["message"]
    await world.run(200)
    assert world.true("kept", "Complete")
    assert world.true("other", "Complete")


async def test_a_job_that_fills_the_cluster_leaves_its_spare_node() -> None:
    """It grows as nodes become free, all but one, and a lost node is replaced by that one, without a smaller size."""
    world = World(9, nodes=4, work=10**6)
    body = small("fills", 1, recovery={"spareNodes": 1})
    body["spec"]["elastic"] = {"pauseSeconds": 30, "maxReplicas": 4, "fill": True}
    body["spec"]["checkpoint"] = {"claimName": "shared"}
    world.submit(small("other", 1))
    await world.run(15)
    world.submit(body)
    await world.run(60)
    assert len(nodes_of(world, "fills")) == 2
    delete_job(world, "other")
    await collect(world, "other")
    await world.run(120)
    assert world.true("fills", "Ready")
    assert len(nodes_of(world, "fills")) == 3
    (spare,) = world.status("fills")["placement"]["spares"]
    victim = world.status("fills")["placement"]["workers"][1]
    lose(world, victim["node"])
    world.crash(victim["pod"])
    await world.run(60)
    assert world.true("fills", "Ready")
    assert len(nodes_of(world, "fills")) == 3
    assert spare in nodes_of(world, "fills")


async def test_a_lost_node_is_replaced_by_the_spare_although_others_wait() -> None:
    world = World(7, nodes=3, work=10**6)
    world.submit(small("kept", 2, recovery={"spareNodes": 1}))
    await world.run(15)
    (spare,) = world.status("kept")["placement"]["spares"]
    world.submit(small("eager", 1, priority=5))
    await world.run(15)
    assert not world.true("eager", "Placed")
    victim = world.status("kept")["placement"]["workers"][1]
    lose(world, victim["node"])
    world.crash(victim["pod"])
    await world.run(40)
    assert world.true("kept", "Ready")
    assert spare in nodes_of(world, "kept")
    assert victim["node"] not in nodes_of(world, "kept")
    assert world.status("kept")["placement"].get("spares", []) == [], "no further node is free"


async def test_a_restarted_operator_keeps_them_and_a_lowered_number_gives_them_back() -> None:
    world = World(8, nodes=4, work=10**6)
    world.submit(small("kept", 2, recovery={"spareNodes": 2}))
    await world.run(15)
    assert len(world.status("kept")["placement"]["spares"]) == 2
    world.operators[0] = type(world.operators[0])(world)
    world.operators[0].relist()
    world.submit(small("other", 1))
    await world.run(20)
    assert not world.true("other", "Placed")
    edited = copy.deepcopy(world.cluster.objects[f"{JOBS}/kept"])
    edited["spec"]["recovery"] = {"spareNodes": 1}
    world.submit(edited)
    await world.run(40)
    assert world.true("other", "Placed")
    assert world.status("kept")["mesh"]["generation"] == 1, "nothing restarts for it"


@pytest.mark.parametrize(
    "changes", [{"spec": 7}, {"spec": {"recovery": []}}, {"status": {"placement": {"spares": "n1"}}}, {"status": None}]
)
def test_malformed_jobs_keep_nothing(changes: dict[str, Any]) -> None:
    cache = Cache()
    good = {
        "metadata": {"name": "j", "namespace": "d", "uid": "u"},
        "spec": {"recovery": {"spareNodes": 1}},
        "status": {"placement": {"spares": ["n1"]}},
    }
    cache.jobs[JobKey("d", "j")] = {**good, **changes}
    assert reserved_spares(cache, Policy()) == []
    assert reserved_for_others(reserved_spares(cache, Policy()), "other") == {}


@pytest.mark.parametrize(
    ("requested", "workers", "limit", "allowed"),
    [(2, 3, None, 2), (64, 3, None, 3), (64, 3, 2, 2), (1, 3, 2, 1), (64, 3, 0, 0), (64, 0, None, 1)],
)
def test_a_job_gets_one_spare_node_for_each_worker_and_what_the_policy_allows(
    requested: int, workers: int, limit: int | None, allowed: int
) -> None:
    assert spares_allowed(requested, workers, Bounds(max_spare_nodes=limit)) == allowed
