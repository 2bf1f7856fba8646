"""Where the operator puts a job, first and again: as the dry run says, and with as few workers moved as possible."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api.objects import KubeObject
from meshwright.layout import Layout
from meshwright_cli.plan.report import plan_report
from tests.operator.support import job, node
from tests.operator.world import World
from tests.randomness import runs

H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


def whole_node_job(name: str, replicas: int, **spec: Any) -> KubeObject:
    """Replicas of two stages, each stage a pod that takes a node of two GPUs."""
    return job(
        name,
        replicas=replicas,
        training={"steps": 10**6, "globalBatchSize": 60, "sequenceLength": 64},
        recovery={"maxRestarts": 100},
        **spec,
    )


def racks(world: World, per_rack: int) -> None:
    """Spreads the world's nodes over racks."""
    for number, name in enumerate(sorted(world.nodes)):
        world.nodes[name] = node(name, f"r{number // per_rack}", world.gpus)
    for operator in world.operators:
        operator.relist()


def nodes_of(world: World, name: str) -> dict[int, str]:
    return {entry["worker"]: entry["node"] for entry in world.status(name)["placement"]["workers"]}


def lose(world: World, name: str) -> None:
    """The node is gone, and what ran on it with it."""
    world.nodes.pop(name)
    for operator in world.operators:
        operator.cache.remove_node(name)
    for pod in world.pods():
        if pod.node == name:
            world.crash(pod.name)


def edit(world: World, name: str, **spec: Any) -> None:
    path = next(path for path, obj in world.cluster.objects.items() if obj["metadata"]["name"] == name)
    new = copy.deepcopy(world.cluster.objects[path])
    new["spec"] |= spec
    new["metadata"]["generation"] += 1
    world.cluster.update(path, new)


async def test_after_a_lost_node_only_its_worker_moves() -> None:
    world = World(1, nodes=9, work=10**6)
    racks(world, 3)
    world.submit(whole_node_job("train", 3))
    await world.run(20)
    assert world.true("train", "Ready")
    first, pods = nodes_of(world, "train"), {pod.worker: pod.name for pod in world.pods("train")}
    lose(world, first[2])
    await world.run(30)
    assert world.true("train", "Ready")
    after, now = nodes_of(world, "train"), {pod.worker: pod.name for pod in world.pods("train")}
    assert {worker for worker in first if after[worker] != first[worker]} == {2}
    assert {worker for worker in pods if now[worker] != pods[worker]} == {2}


async def test_a_crashed_pod_goes_back_to_its_node_though_another_is_lost() -> None:
    world = World(2, nodes=9, work=10**6)
    racks(world, 3)
    world.submit(whole_node_job("train", 3))
    await world.run(20)
    first = nodes_of(world, "train")
    lose(world, first[0])
    world.crash(next(pod.name for pod in world.pods("train") if pod.worker == 5))
    await world.run(30)
    assert world.true("train", "Ready")
    after = nodes_of(world, "train")
    assert {worker for worker in first if after[worker] != first[worker]} == {0}


async def test_a_resize_moves_no_replica_that_stays() -> None:
    world = World(3, nodes=12, work=10**6)
    racks(world, 4)
    world.submit(whole_node_job("train", 3))
    await world.run(20)
    first = nodes_of(world, "train")
    edit(world, "train", replicas=5)
    await world.run(40)
    assert world.true("train", "Ready")
    grown = nodes_of(world, "train")
    assert len(grown) == 10
    assert {worker: grown[worker] for worker in first} == first
    edit(world, "train", replicas=2)
    await world.run(40)
    assert world.true("train", "Ready")
    assert nodes_of(world, "train") == {worker: first[worker] for worker in range(4)}


async def test_a_job_that_was_suspended_comes_back_to_its_nodes() -> None:
    world = World(4, nodes=8, work=10**6)
    racks(world, 4)
    world.submit(whole_node_job("first", 1))
    await world.run(10)
    world.submit(whole_node_job("train", 2))
    await world.run(20)
    where = nodes_of(world, "train")
    edit(world, "train", suspend=True)
    await world.run(20)
    edit(world, "train", suspend=False)
    await world.run(20)
    assert world.true("train", "Ready")
    assert nodes_of(world, "train") == where


@pytest.mark.chaos
@given(
    st.integers(0, 2**16),
    st.integers(1, 4),
    st.lists(st.integers(0, 9), min_size=1, max_size=2, unique=True),
    st.booleans(),
)
@settings(max_examples=runs(8), deadline=None)
def test_whatever_is_lost_nobody_else_moves(seed: int, per_rack: int, hit: list[int], nodes_too: bool) -> None:
    asyncio.run(_lost_and_found(seed, per_rack, hit, nodes_too))


async def _lost_and_found(seed: int, per_rack: int, hit: list[int], nodes_too: bool) -> None:
    world = World(seed, nodes=12, work=10**6)
    racks(world, per_rack)
    world.submit(whole_node_job("train", 5))
    await world.run(20)
    first, pods = nodes_of(world, "train"), {pod.worker: pod.name for pod in world.pods("train")}
    for worker in hit:
        if nodes_too:
            lose(world, first[worker])
        else:
            world.crash(pods[worker])
    await world.run(30)
    assert world.true("train", "Ready")
    after, now = nodes_of(world, "train"), {pod.worker: pod.name for pod in world.pods("train")}
    assert {worker for worker in pods if now[worker] != pods[worker]} == set(hit)
    assert {worker for worker in first if after[worker] != first[worker]} == (set(hit) if nodes_too else set())


@pytest.mark.chaos
@given(st.integers(0, 2**16), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=runs(8), deadline=None)
def test_nodes_that_are_added_never_make_a_job_that_comes_back_cost_more(seed: int, per_rack: int, more: int) -> None:
    asyncio.run(_suspended_and_resumed(seed, per_rack, more))


async def _suspended_and_resumed(seed: int, per_rack: int, more: int) -> None:
    world = World(seed, nodes=6, work=10**6)
    racks(world, per_rack)
    world.submit(whole_node_job("train", 3))
    await world.run(20)
    first = world.status("train")["placement"]
    edit(world, "train", suspend=True)
    await world.run(10)
    for number in range(more):
        world.nodes[f"new{number}"] = node(f"new{number}", "r0", world.gpus)
    world.operators[0].relist()
    edit(world, "train", suspend=False)
    await world.run(20)
    assert world.true("train", "Ready")
    after = world.status("train")["placement"]
    assert float(after["cost"]) <= float(first["cost"])
    same = [e["node"] for e in after["workers"]] == [e["node"] for e in first["workers"]]
    assert same or float(after["cost"]) < float(first["cost"])


def fragmented(world: World, free: int, gpus: int) -> list[KubeObject]:
    """Nodes of H100 of which `free` GPUs are free, and the foreign pods that hold the rest."""
    pods = []
    for number, name in enumerate(sorted(world.nodes)):
        found = node(name, f"r{number // 4}", gpus)
        found["metadata"]["labels"] |= H100
        world.nodes[name] = found
        body = {
            "kind": "Pod",
            "metadata": {"name": f"other-{name}", "namespace": "default"},
            "spec": {
                "nodeName": name,
                "containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": str(gpus - free)}}}],
            },
            "status": {"phase": "Running"},
        }
        world.cluster.put(f"/api/v1/namespaces/default/pods/other-{name}", body)
        pods.append(body)
    for operator in world.operators:
        operator.relist()
    return pods


async def test_what_is_left_out_is_chosen_by_what_is_free_as_the_dry_run_does() -> None:
    world = World(5, nodes=16, gpus=8, work=10**6)
    pods = fragmented(world, free=1, gpus=8)
    wanted = job(
        "train",
        replicas=4,
        model={"preset": "llama-3-8b"},
        training={
            "steps": 10**6,
            "globalBatchSize": 64,
            "sequenceLength": 2048,
            "precision": "bf16",
            "activationCheckpointing": "None",
        },
        parallelism={"zeroStage": 2, "schedule": "1F1B"},
        workers={"image": "worker", "gpusPerWorker": 1},
    )
    told = plan_report(copy.deepcopy(wanted), list(world.nodes.values()), pods)
    assert told.placement is not None
    assert told.plan.layout == Layout(1, 2, 4)
    world.submit(wanted)
    await world.run(20)
    assert world.true("train", "Ready")
    status = world.status("train")
    dry = told.plan.to_status().model_dump(by_alias=True, exclude_none=True)
    assert {**status["plan"], "revision": ""} == {**dry, "revision": ""}
    assert "NVLink ends at each pod" in "".join(status["plan"]["reasons"])
    assert nodes_of(world, "train") == told.placement.nodes
    assert status["placement"]["cost"] == f"{told.placement.cost:g}"


async def test_a_plan_that_was_chosen_by_what_was_free_stays() -> None:
    world = World(6, nodes=16, gpus=8, work=10**6)
    fragmented(world, free=1, gpus=8)
    world.submit(
        job(
            "train",
            replicas=4,
            model={"preset": "llama-3-8b"},
            training={"steps": 10**6, "globalBatchSize": 64, "sequenceLength": 2048, "precision": "bf16"},
            parallelism={"zeroStage": 2},
            workers={"image": "worker", "gpusPerWorker": 1},
        )
    )
    await world.run(20)
    plan, where = world.status("train")["plan"], nodes_of(world, "train")
    for name in sorted(world.nodes):
        world.cluster.remove(f"/api/v1/namespaces/default/pods/other-{name}")
    lose(world, where[3])
    await world.run(40)
    assert world.true("train", "Ready")
    assert world.status("train")["plan"] == plan
    after = nodes_of(world, "train")
    assert {worker for worker in where if after[worker] != where[worker]} == {3}
