"""A job for which no layout fits waits for a change of nodes."""

from __future__ import annotations

from meshwright.api.objects import KubeObject
from tests.operator.support import JOBS, job, node
from tests.operator.world import World


def whole_nodes(name: str) -> KubeObject:
    """A job whose workers need more GPUs than any node of the world has."""
    return job(name, workers={"image": "worker", "gpusPerWorker": 4})


def reconciles(world: World) -> float:
    """How many reconciles there were."""
    registry = world.operators[0].metrics.registry
    counts = (
        registry.get_sample_value("ptj_reconcile_duration_seconds_count", {"result": result})
        for result in ("ok", "stale", "error")
    )
    return sum(count or 0.0 for count in counts)


def add_node(world: World, name: str) -> None:
    """A node with four GPUs, of which a watch tells the operator."""
    found = node(name, "r0", 4)
    found["metadata"]["uid"] = f"uid-of-{name}"
    world.cluster.stamp(found)
    world.nodes[name] = found
    world.operators[0].cache.put_node(found)
    world.operators[0].nodes_changed()


async def test_it_is_reconciled_again_when_a_node_changes_and_else_only_now_and_then() -> None:
    world = World(1, nodes=4, gpus=2, work=10**6)
    world.submit(whole_nodes("large"))
    await world.run(30)
    placed = world.condition("large", "Placed")
    assert (placed["status"], placed["reason"]) == ("False", "NoLayout")
    before = reconciles(world)
    await world.run(1800, step=5.0)
    assert 1 <= reconciles(world) - before <= 4
    add_node(world, "wide0")
    await world.run(1)
    add_node(world, "wide1")
    await world.run(30)
    assert world.true("large", "Ready")


async def test_a_node_that_changes_while_the_status_is_written_wakes_the_job() -> None:
    world = World(2, nodes=4, gpus=2, work=10**6)
    cluster, patch = world.cluster, world.cluster.merge_patch

    async def patch_late(path: str, body: KubeObject) -> KubeObject:
        if path == f"{JOBS}/large/status" and "wide0" not in world.nodes:
            add_node(world, "wide0")
            add_node(world, "wide1")
        return await patch(path, body)

    cluster.merge_patch = patch_late  # type: ignore[method-assign]
    world.submit(whole_nodes("large"))
    await world.run(40)
    assert world.true("large", "Ready")
