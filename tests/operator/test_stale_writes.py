"""Writes that the API server refuses because the cache is behind: few requests, and the cache is repaired."""

from __future__ import annotations

import copy

from meshwright.api.objects import KubeObject
from meshwright_operator.kube.client import ApiError
from meshwright_operator.kube.pod_info import read_pod
from tests.operator.support import JOBS, PODS
from tests.operator.test_gang_races import small
from tests.operator.world import World


def count(world: World, verb: str, part: str) -> int:
    return sum(1 for did, path in world.cluster.requests if did == verb and part in path)


def touch(world: World, path: str) -> None:
    """Somebody else changes the object a little, and no watch reports it."""
    obj = world.cluster.objects[path]
    world.cluster.update(path, copy.deepcopy(obj))


async def gang_before_its_gates(world: World, workers: int) -> None:
    """A gang whose pods exist, of which the operator has seen nothing since it created them."""
    operator = world.operators[0]
    created = 0

    def refuse(path: str, body: KubeObject) -> ApiError | None:
        nonlocal created
        created += path == PODS
        if created == workers and path == PODS:
            operator.blind = True
        return None

    world.cluster.refuse = refuse
    world.submit(small("train", workers))


async def test_gates_of_pods_that_changed_unseen_come_off_after_one_look() -> None:
    world = World(1, nodes=2)
    await gang_before_its_gates(world, 2)
    patch = world.cluster.merge_patch
    refused = 0

    async def patched(path: str, body: KubeObject) -> KubeObject:
        nonlocal refused
        if "/pods/" in path and body.get("spec") and refused < 2:
            refused += 1
            touch(world, path)
        return await patch(path, body)

    world.cluster.merge_patch = patched  # type: ignore[method-assign]
    await world.run(3)
    assert refused == 2
    assert all(not pod.gated for pod in world.pods("train"))
    assert count(world, "patch", "/pods/") <= 4, "two refused, two repeated"
    assert count(world, "get", "/pods/") <= 2


async def test_gates_that_the_server_always_refuses_are_tried_again_with_backoff() -> None:
    world = World(2, nodes=2)
    patch = world.cluster.merge_patch
    writes = 0

    async def patched(path: str, body: KubeObject) -> KubeObject:
        nonlocal writes
        if "/pods/" in path and body.get("spec"):
            writes += 1
            raise ApiError(409, "Conflict", "the object has been modified")
        return await patch(path, body)

    world.cluster.merge_patch = patched  # type: ignore[method-assign]
    world.submit(small("train", 2))
    await world.run(60)
    assert 4 <= writes <= 40, "1,307 in three seconds before"
    world.cluster.merge_patch = patch  # type: ignore[method-assign]
    await world.run(60)
    assert world.true("train", "Ready")


async def test_pods_that_went_unseen_before_their_gates_came_off_are_replaced() -> None:
    world = World(3, nodes=2)
    operator = world.operators[0]
    await gang_before_its_gates(world, 2)
    patch = world.cluster.merge_patch

    async def patched(path: str, body: KubeObject) -> KubeObject:
        if "/pods/" in path and body.get("spec") and path in world.cluster.objects and path.endswith("-w1-0"):
            world.crash("train-w1-0")
        return await patch(path, body)

    world.cluster.merge_patch = patched  # type: ignore[method-assign]
    await world.run(10)
    assert count(world, "patch", "/pods/") <= 6
    operator.blind = False
    operator.relist()
    await world.run(40)
    assert world.true("train", "Ready")


async def test_a_status_that_the_server_always_refuses_is_tried_again_with_backoff() -> None:
    world = World(4, nodes=2)
    patch = world.cluster.merge_patch

    async def patched(path: str, body: KubeObject) -> KubeObject:
        if path.endswith("/status"):
            world.cluster.requests.append(("patch", path))
            raise ApiError(409, "Conflict", "the object has been modified")
        return await patch(path, body)

    world.cluster.merge_patch = patched  # type: ignore[method-assign]
    world.submit(small("train", 2))
    await world.run(60)
    assert 3 <= count(world, "patch", f"{JOBS}/train/status") <= 30


async def test_a_pod_that_is_gone_is_deleted_once() -> None:
    world = World(5, nodes=2)
    operator = world.operators[0]
    world.submit(small("train", 2))
    await world.run(15)
    assert world.true("train", "Ready")
    operator.blind = True
    world.crash("train-w1-0")
    world.cluster.requests.clear()
    job = copy.deepcopy(world.cluster.objects[f"{JOBS}/train"])
    job["spec"]["suspend"] = True
    job["metadata"]["generation"] += 1
    operator.cache.put_job(world.cluster.update(f"{JOBS}/train", job))
    key = next(iter(operator.cache.jobs))
    for _ in range(10):
        operator.queue.add(key)
        await world.run(1)
    assert count(world, "delete", "/pods/train-w1-0") == 1
    assert read_pod({}) is None
