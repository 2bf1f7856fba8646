"""Hosts of a clique in the operator: jobs with and without a channel, and jobs that an earlier version placed."""

from __future__ import annotations

from tests.operator.test_elastic import FOREVER, grouped, label, pods
from tests.operator.world import World

CLIQUE, ACCELERATOR = "nvidia.com/gpu.clique", "network.topology.nvidia.com/accelerator"


def make_clique(world: World) -> None:
    for name in world.nodes:
        label(world, name, ACCELERATOR, "unknown")
        label(world, name, CLIQUE, "one")


async def test_a_job_without_a_channel_waits_and_says_what_to_set() -> None:
    world = World(61, nodes=4, work=FOREVER)
    body = grouped(world, 1)
    make_clique(world)
    world.submit(body)
    await world.run(30)
    assert not world.pods("job")
    assert "`topology.multiNodeNVLink: true`" in world.condition("job", "Ready")["message"]


async def test_a_job_that_an_earlier_version_placed_is_not_restarted_and_its_lost_worker_is_replaced() -> None:
    world = World(62, nodes=4, work=FOREVER)
    world.submit(grouped(world, 1))
    await world.run(30)
    assert world.true("job", "Ready")
    before, status = pods(world, "job"), world.status("job")
    # From now on the hosts are separate for new jobs, as for an operator that was upgraded.
    make_clique(world)
    await world.run(60)
    assert pods(world, "job") == before
    assert world.status("job")["plan"] == status["plan"]
    assert world.status("job")["mesh"]["generation"] == 1
    (lost,) = {pod.name for pod in world.pods("job") if pod.worker == 1}
    world.crash(lost)
    await world.run(60)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert before - {lost} < pods(world, "job")
