"""Nodes that drain, in virtual time: ranks pause and save before pods go, and elastic jobs continue with fewer."""

from __future__ import annotations

import copy

from meshwright.protocol.messages import AgentState
from tests.operator.support import JOBS
from tests.operator.test_elastic import FOREVER, elastic, events, pods, size
from tests.operator.test_settling import submitted
from tests.operator.world import World


def cordon(world: World, node: str, cordoned: bool) -> None:
    obj = copy.deepcopy(world.nodes[node])
    obj["spec"] = {"unschedulable": cordoned}
    world.cluster.stamp(obj)
    world.nodes[node] = obj
    for operator in world.operators:
        operator.cache.put_node(obj)
        operator.nodes_changed()


def node_of(world: World, worker: int) -> str:
    return next(pod.node for pod in world.pods("job") if pod.worker == worker and not pod.terminal)


async def test_an_elastic_job_gives_up_the_replica_on_a_draining_node_if_no_node_is_free() -> None:
    world = World(1, nodes=3, work=FOREVER)
    world.submit(elastic("job", 3))
    await world.run(60)
    before, node = pods(world, "job"), node_of(world, 1)
    cordon(world, node, cordoned=True)
    await world.run(60)
    assert size(world, "job") == 2
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert pods(world, "job") < before
    assert node not in {pod.node for pod in world.pods("job") if not pod.terminal}
    assert any(node in event.message for event in events(world, "job", "Rescaled"))
    cordon(world, node, cordoned=False)
    await world.run(240)
    assert size(world, "job") == 3
    assert world.true("job", "Ready")


async def test_an_elastic_job_at_its_minimum_stays_on_a_draining_node() -> None:
    world = World(2, nodes=2, work=FOREVER)
    world.submit(elastic("job", 2, minReplicas=2))
    await world.run(60)
    before = pods(world, "job")
    cordon(world, node_of(world, 1), cordoned=True)
    await world.run(120)
    assert pods(world, "job") == before
    assert world.true("job", "Ready")


async def test_ranks_pause_before_the_pod_on_a_draining_node_is_deleted() -> None:
    world = World(3, nodes=3, work=FOREVER)
    body = submitted("job", 2)
    body["spec"]["checkpoint"] = {"claimName": "shared"}
    world.submit(body)
    await world.run(60)
    node = node_of(world, 1)
    (leaving,) = {pod.name for pod in world.pods("job") if pod.worker == 1}
    agent, seen = world.agents[leaving], set()
    cordon(world, node, cordoned=True)
    for _ in range(60):
        await world.tick(1)
        if leaving in pods(world, "job"):
            seen.add(agent.state)
    assert AgentState.IDLE in seen, "its ranks save while the pod stays"
    assert leaving not in pods(world, "job")
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert world.status("job")["restarts"] == [{"cause": "NodeDrained", "count": 1}]
    assert world.cluster.objects[f"{JOBS}/job"]["status"]["mesh"]["cause"] == "NodeDrained"


async def test_the_same_pods_train_on_if_the_node_drains_no_more() -> None:
    world = World(4, nodes=3, work=FOREVER)
    body = submitted("job", 2)
    body["spec"]["checkpoint"] = {"claimName": "shared"}
    world.submit(body)
    await world.run(60)
    before, node = pods(world, "job"), node_of(world, 1)
    agents = [world.agents[name] for name in before]
    for agent in agents:
        agent.hung = True  # they save for long
    cordon(world, node, cordoned=True)
    await world.run(5)
    assert world.status("job")["mesh"]["pendingCause"] == "NodeDrained"
    cordon(world, node, cordoned=False)
    for agent in agents:
        agent.state = AgentState.IDLE
    await world.run(60)
    assert pods(world, "job") == before
    assert world.true("job", "Ready"), world.condition("job", "Ready")
