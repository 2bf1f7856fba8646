"""Hosts of a clique in the operator: jobs with and without a channel, and jobs that an earlier version placed."""

from __future__ import annotations

from meshwright.devices.claims import CHANNEL_CLASS
from meshwright_operator.kube.paths import DEVICES
from tests.operator.test_claims import TEMPLATES, device_class, put, template
from tests.operator.test_devices import resource_slice
from tests.operator.test_elastic import FOREVER, edit, grouped, label, pods
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


async def test_a_job_that_claims_a_channel_itself_is_one_domain() -> None:
    world = World(64, nodes=4, work=FOREVER)
    body = grouped(world, 1)
    body["spec"]["workers"]["resourceClaims"] = [{"name": "channel", "resourceClaimTemplateName": "mine"}]
    make_clique(world)
    put(world, f"{DEVICES}/deviceclasses", device_class(CHANNEL_CLASS, "device.driver == 'compute-domain.nvidia.com'"))
    for host in world.nodes:
        channel = resource_slice(host, [{"name": "channel-0"}])
        channel["spec"]["driver"] = "compute-domain.nvidia.com"
        put(world, f"{DEVICES}/resourceslices", channel)
    put(world, TEMPLATES, template("mine", CHANNEL_CLASS))
    assert await world.operators[0].devices.load()
    world.submit(body)
    await world.run(60)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert world.status("job")["placement"].get("straddlingTensorGroups", 0) == 0
    assert not any("NVLink" in reason for reason in world.status("job")["plan"]["reasons"])


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


async def test_an_elastic_job_that_an_earlier_version_placed_grows_and_resumes_in_one_step() -> None:
    world = World(63, nodes=8, work=FOREVER)
    body = grouped(world, 3)
    body["spec"]["elastic"] = {"minReplicas": 1}
    world.submit(body)
    await world.run(30)
    assert world.true("job", "Ready")
    make_clique(world)
    for field, value, replicas in (("replicas", 1, 1), ("replicas", 3, 3), ("suspend", True, 3), ("suspend", False, 3)):
        before = world.status("job")["mesh"]["generation"]
        edit(world, "job", **{field: value})
        await world.run(120)
        assert world.status("job")["replicas"] == replicas, world.condition("job", "Ready")
        assert world.status("job")["mesh"]["generation"] == before + (value is not True)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
