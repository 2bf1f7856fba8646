"""Two jobs are placed while neither has its pods yet: what one was given is not the other's."""

from __future__ import annotations

import ast
import asyncio
import gc
from pathlib import Path
from typing import Any

import meshwright_operator
from meshwright.planner.cluster.pod_resources import Resources
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import ApiError
from meshwright_operator.kube.pod_requests import PodRequest, request_json_for, request_json_of
from tests.operator.test_gang_races import small
from tests.operator.world import World

FIRST, SECOND = JobKey("default", "first"), JobKey("default", "second")


async def two_jobs_at_once(world: World, fails: bool) -> None:
    """Both are placed before the first one's status, and so its pods, are written."""
    operator, merge_patch = world.operators[0], world.cluster.merge_patch
    waits, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/first/status"):
            waits.set()
            await goes_on.wait()
            if fails:
                raise ApiError(0, "Unreachable", "connection reset")
        return await merge_patch(path, body)

    world.cluster.merge_patch = slow  # type: ignore[method-assign]
    first = asyncio.create_task(operator.reconciler(FIRST))
    await waits.wait()
    await operator.reconciler(SECOND)
    assert "first" in world.condition("second", "Placed")["message"], "whoever would have to end is named"
    goes_on.set()
    assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], ApiError) is fails
    world.cluster.merge_patch = merge_patch  # type: ignore[method-assign]


async def test_room_is_promised_until_the_pods_are_made() -> None:
    world = World(1, nodes=3, work=10.0)
    world.submit(small("first", 2))
    world.submit(small("second", 2))
    await two_jobs_at_once(world, fails=False)
    assert {pod.job for pod in world.pods()} == {"first"}
    await world.run(60)
    assert world.true("first", "Complete")
    assert world.true("second", "Complete")


async def test_a_promise_ends_with_the_reconcile_that_made_it() -> None:
    world = World(2, nodes=3, work=10.0)
    world.submit(small("first", 2))
    world.submit(small("second", 2))
    await two_jobs_at_once(world, fails=True)
    world.cluster.remove("/apis/meshwright.dev/v1alpha1/namespaces/default/paralleltrainingjobs/first")
    await world.run(60)
    assert world.true("second", "Complete")


def test_a_promise_counts_as_the_pod_will() -> None:
    amount = Resources(gpus=8, cpu_milli=1500, memory_bytes=3 << 30, pods=1)
    assert PodRequest("p", "ns", "n0", request_json_for(amount, "amd.com/gpu")).amount("amd.com/gpu") == amount
    assert request_json_of({"spec": {"containers": 7}}) == "null"


def test_nobody_else_touches_what_the_scheduler_owns() -> None:
    private = {name for name in vars(World(3, nodes=1).operators[0].scheduler) if name.startswith("_")}
    assert {"_placer", "_calibration", "_assumed"} <= private
    (package,) = meshwright_operator.__path__
    # Python 3.11 fails to make a syntax tree if meanwhile an object of an earlier test is collected, and its finalizer
    # raises.
    gc.collect()
    touched = [
        (path.name, node.lineno, ast.unparse(node))
        for path in Path(package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in private and ast.unparse(node.value) != "self"
    ]
    assert touched == []
    assert [name for name in vars(World(3, nodes=1).operators[0].scheduler) if not name.startswith("_")] == []
