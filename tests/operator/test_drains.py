"""Nodes that drain, in virtual time: ranks pause and save before pods go, and elastic jobs continue with fewer."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from meshwright.protocol.messages import AgentState, FailureKind
from meshwright_operator.scheduling.policy import parse_policy
from tests.operator.support import JOBS
from tests.operator.test_elastic import FOREVER, edit, elastic, events, grouped, pods, size
from tests.operator.test_replicas_continue import MemoryWorld
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
        for key in operator.cache.jobs_on(node):
            operator.queue.add(key)


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


async def test_replacements_start_beside_an_elastic_job_and_the_ranks_train_until_they_are_ready() -> None:
    world = World(5, nodes=3, work=FOREVER)
    world.submit(elastic("job", 2))
    await world.run(5)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    before, node = pods(world, "job"), node_of(world, 1)
    agents = [world.agents[name] for name in before]
    world.unprepared = True
    cordon(world, node, cordoned=True)
    await world.run(20)
    assert {agent.state for agent in agents} == {AgentState.RUNNING}, "they train, also when trained for less than 30 s"
    (new,) = pods(world, "job") - before
    assert world.condition("job", "Rescaling")["reason"] == "Moving"
    world.unprepared, world.agents[new].preparing = False, False
    seen = set()
    (leaving,) = {pod.name for pod in world.pods("job") if pod.node == node}
    for _ in range(40):
        await world.tick(1)
        if leaving in pods(world, "job"):
            seen.add(world.agents[leaving].state)
    assert AgentState.IDLE in seen, "its ranks save while the pod stays"
    assert pods(world, "job") == before - {leaving} | {new}
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert size(world, "job") == 2
    status = world.status("job")
    assert status["restarts"] == [{"cause": "NodeDrained", "count": 1}]
    assert status["mesh"]["generation"] == 2
    assert not world.true("job", "Rescaling")
    assert sorted(entry["ranks"] for entry in status["placement"]["workers"]) == ["0-1", "2-3"]
    cordon(world, node, cordoned=False)
    await world.run(100)
    assert world.status("job")["mesh"]["generation"] == 2


@pytest.mark.parametrize(("bound", "most"), [("maxGpusPerJob: 4", 4), ("maxGpusPerJob: 5", 4), ("maxGpusPerJob: 6", 6)])
async def test_replacements_start_beside_an_elastic_job_only_as_far_as_the_policy_allows(bound: str, most: int) -> None:
    world = World(5, nodes=3, work=FOREVER)
    world.operators[0].scheduler.set_policy(parse_policy(f"defaults: {{{bound}}}"))
    world.submit(elastic("job", 2))
    await world.run(60)
    before, node, held = pods(world, "job"), node_of(world, 1), 0
    cordon(world, node, cordoned=True)
    for _ in range(90):
        await world.tick(1)
        held = max(held, 2 * sum(not pod.terminal for pod in world.pods("job")))
    assert held == most
    assert len(pods(world, "job") & before) == 1
    assert node not in {pod.node for pod in world.pods("job")}
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert size(world, "job") == 2
    assert world.status("job")["restarts"] == [{"cause": "NodeDrained", "count": 1}]


@pytest.mark.parametrize("nodes", [3, 2], ids=["replaced", "given up"])
async def test_status_has_the_checkpoint_of_rank_0_if_its_worker_leaves(nodes: int) -> None:
    world = World(10, nodes=nodes, work=FOREVER)
    world.submit(elastic("job", 2))
    await world.run(30)
    assert "checkpoint" not in world.status("job")
    before = pods(world, "job")
    (leaving,) = {pod.name for pod in world.pods("job") if pod.worker == 0}
    agent, step = world.agents[leaving], 0
    cordon(world, node_of(world, 0), cordoned=True)
    for _ in range(60):
        await world.tick(1)
        step = max(step, int(agent.trained))
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert pods(world, "job") & before == before - {leaving}
    status = world.status("job")
    assert status["checkpoint"]["step"] == step > 0
    assert size(world, "job") == nodes - 1


async def test_one_worker_of_a_tensor_group_is_replaced_beside_the_others() -> None:
    world = World(11, nodes=4, work=FOREVER)
    world.submit(grouped(world, 1))
    await world.run(30)
    before, node = pods(world, "job"), node_of(world, 1)
    assert len(before) == 2
    (leaving,) = {pod.name for pod in world.pods("job") if pod.worker == 1}
    cordon(world, node, cordoned=True)
    await world.run(60)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert pods(world, "job") & before == before - {leaving}
    assert len(pods(world, "job")) == 2
    assert world.status("job")["restarts"] == [{"cause": "NodeDrained", "count": 1}]


async def test_a_move_ends_when_the_node_drains_no_more() -> None:
    world = World(6, nodes=3, work=FOREVER)
    world.submit(elastic("job", 2))
    await world.run(20)
    before, node = pods(world, "job"), node_of(world, 1)
    world.unprepared = True
    cordon(world, node, cordoned=True)
    await world.run(20)
    assert len(pods(world, "job")) == 3
    cordon(world, node, cordoned=False)
    await world.run(30)
    assert pods(world, "job") == before
    assert world.status("job")["mesh"]["generation"] == 1
    assert world.true("job", "Ready")
    assert not world.true("job", "Rescaling")
    assert events(world, "job", "MoveEnded")


async def test_a_job_moves_to_its_spare_node() -> None:
    world = World(7, nodes=3, work=FOREVER)
    body = elastic("job", 2)
    body["spec"]["recovery"] = {"spareNodes": 1}
    world.submit(body)
    await world.run(20)
    (spare,) = world.status("job")["placement"]["spares"]
    cordon(world, node_of(world, 1), cordoned=True)
    await world.run(60)
    assert spare in {pod.node for pod in world.pods("job")}
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert (size(world, "job"), world.status("job")["mesh"]["generation"]) == (2, 2)


async def test_a_growth_gives_its_nodes_to_workers_that_must_leave_theirs() -> None:
    world = World(8, nodes=3, work=FOREVER)
    world.submit(elastic("job", 2))
    await world.run(20)
    world.unprepared = True
    edit(world, "job", replicas=3)
    await world.run(10)
    assert len(pods(world, "job")) == 3
    world.unprepared = False
    node = node_of(world, 1)
    cordon(world, node, cordoned=True)
    await world.run(60)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert size(world, "job") == 2
    assert node not in {pod.node for pod in world.pods("job") if not pod.terminal}
    assert not {entry["cause"] for entry in world.status("job")["restarts"]} - {"NodeDrained"}


async def test_replacements_that_do_not_start_are_tried_again_while_the_job_trains() -> None:
    world = World(9, nodes=3, work=FOREVER)
    world.submit(elastic("job", 2))
    await world.run(20)
    before = pods(world, "job")
    cordon(world, node_of(world, 1), cordoned=True)
    world.broken_image = True
    await world.run(140)
    assert events(world, "job", "MoveFailed")
    assert world.status("job")["mesh"]["generation"] == 1
    assert world.true("job", "Ready")
    world.broken_image = False
    await world.run(120)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert len(pods(world, "job") & before) == 1
    assert (size(world, "job"), world.status("job")["mesh"]["generation"]) == (2, 2)


async def moving(world: World, **recovery: Any) -> tuple[str, str]:
    """A job of two workers, of which one is being replaced beside it: the one that leaves, and the new one."""
    body = elastic("job", 2)
    body["spec"]["recovery"] = recovery
    world.submit(body)
    await world.run(20)
    before, node = pods(world, "job"), node_of(world, 1)
    world.unprepared = True
    cordon(world, node, cordoned=True)
    await world.run(5)
    (new,) = pods(world, "job") - before
    world.unprepared = False
    return next(pod.name for pod in world.pods("job") if pod.node == node), new


@pytest.mark.parametrize("ready", [True, False])
async def test_an_evicted_worker_is_replaced_by_the_pod_that_has_started_beside_it(ready: bool) -> None:
    """As with `kubectl drain`, which evicts the pods of a node as soon as it is cordoned."""
    world = World(12, nodes=4, work=FOREVER)
    leaving, new = await moving(world)
    (stays,) = pods(world, "job") - {leaving, new}
    world.agents[new].preparing = not ready
    await world.evict(leaving)
    await world.run(20)
    world.agents[new].preparing = False
    await world.run(40)
    assert pods(world, "job") == {stays, new}
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert not world.true("job", "Rescaling")
    assert (size(world, "job"), world.status("job")["mesh"]["generation"]) == (2, 2)
    (event,) = events(world, "job", "WorkersReplaced")
    assert event.message.startswith("Worker 2 on n"), event.message
    assert "replaces worker 1" in event.message
    assert not events(world, "job", "MoveEnded")


async def test_a_restart_for_another_reason_uses_replacements_only_if_they_are_ready() -> None:
    world = World(13, nodes=4, work=FOREVER)
    leaving, new = await moving(world)
    (stays,) = pods(world, "job") - {leaving, new}
    agent = world.agents[stays]
    agent.state, agent.failure = AgentState.FAILED, FailureKind.ERROR
    await world.run(10)
    assert events(world, "job", "MoveEnded"), "the ranks start again at once in the pods that are ready"
    assert new not in pods(world, "job")


async def test_ranks_that_hold_their_state_go_on_in_their_pods_after_a_failure() -> None:
    """The state of the rank that moves would be lost with its pod."""
    world = MemoryWorld(15, nodes=4, work=FOREVER)
    leaving, new = await moving(world, inMemory=True)
    (stays,) = pods(world, "job") - {leaving, new}
    agent = world.agents[stays]
    world.agents[new].preparing = False
    agent.state, agent.failure = AgentState.FAILED, FailureKind.ERROR
    for _ in range(60):
        await world.tick()
        if world.status("job")["mesh"]["generation"] == 2:
            break
    assert pods(world, "job") == {stays, leaving}
    assert events(world, "job", "MoveEnded")
    assert not events(world, "job", "WorkersReplaced")
    assert not events(world, "job", "MemoryLost")


async def test_a_lost_worker_is_replaced_by_one_that_was_to_make_the_job_larger() -> None:
    world = World(14, nodes=3, work=FOREVER)
    world.submit(elastic("job", 2, maxReplicas=3))
    await world.run(20)
    before = pods(world, "job")
    world.unprepared = True
    edit(world, "job", replicas=3)
    await world.run(5)
    (new,) = pods(world, "job") - before
    world.unprepared = False
    (lost,) = {pod.name for pod in world.pods("job") if pod.worker == 1}
    cordon(world, node_of(world, 1), cordoned=True)
    world.agents[new].preparing = False  # at the moment of the loss
    world.crash(lost)
    await world.run(30)
    assert pods(world, "job") == before - {lost} | {new}
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert (size(world, "job"), world.status("job")["mesh"]["generation"]) == (2, 2)
    assert sorted(entry["ranks"] for entry in world.status("job")["placement"]["workers"]) == ["0-1", "2-3"]
