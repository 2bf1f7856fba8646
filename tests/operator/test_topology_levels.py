"""A job whose required levels cannot be met waits, says why, and starts when they can."""

from __future__ import annotations

from meshwright.api.topology import FabricLevel
from tests.operator.test_gang_races import small
from tests.operator.world import World


async def test_a_job_waits_until_its_level_can_be_met_and_keeps_it_when_a_node_is_lost() -> None:
    world = World(1, nodes=6)
    rack = "network.topology.nvidia.com/leaf"
    for index, node in enumerate(world.nodes.values()):
        labels = node["metadata"]["labels"]
        for key in [key for key in labels if key == rack]:
            del labels[key]
        labels[rack] = f"r{index // 3}"
    world.submit(small("other", 2))
    await world.run(4)
    taken = {pod.node for pod in world.pods("other")}
    assert {index // 3 for index, name in enumerate(world.nodes) if name in taken} == {0}
    world.submit(small("far", 4, topology={"data": {"required": FabricLevel.RACK.value}}))
    await world.run(4)
    placed = world.condition("far", "Placed")
    assert (placed["status"], placed["reason"]) == ("False", "DoesNotFit")
    assert (
        "`topology.data.required: rack` needs 4 workers with 2 GPUs each in one rack: the most that fit in one are 3"
        in (placed["message"])
    )
    world.submit(small("near", 3, topology={"data": {"required": "rack"}}))
    await world.run(6)
    assert world.true("near", "Ready")
    assert world.status("near")["placement"]["topology"]["data"] == "rack"
    assert {pod.node for pod in world.pods("near")} == {"n3", "n4", "n5"}
