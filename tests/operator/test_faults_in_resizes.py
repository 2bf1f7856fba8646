"""A second fault while a job grows, shrinks, moves or recovers: each pair ends with the job whole and its time booked.

An elastic job of two replicas has a node for each, and one to spare. The world checks that no worker has two live pods.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Awaitable, Callable

import pytest

from meshwright.api.parsing import parse_status
from meshwright.protocol.messages import AgentState, FailureKind
from meshwright_operator.timestamps import parse_time, unix_milliseconds
from tests.operator.support import JOBS
from tests.operator.test_drains import cordon, node_of
from tests.operator.test_elastic import FOREVER, edit, elastic, pods, set_ready, size
from tests.operator.test_goodput import kill_the_operator
from tests.operator.test_job_being_deleted import HOLD, delete_job
from tests.operator.world import World
from tests.tiers import mostly_long

Fault = Callable[[World], Awaitable[None]]
NODES = ("n0", "n1", "n2")


async def growing(world: World) -> None:
    world.unprepared = True
    edit(world, "job", replicas=3)
    await world.run(10)
    assert world.condition("job", "Rescaling")["reason"] == "Growing"


async def shrinking(world: World) -> None:
    """The ranks that end still save their checkpoint."""
    for agent in world.agents.values():
        agent.hung = True
    edit(world, "job", replicas=1)
    await world.run(2)
    assert world.status("job")["mesh"]["pendingCause"] == "Rescaled"


async def moving(world: World) -> None:
    world.unprepared = True
    cordon(world, node_of(world, 1), cordoned=True)
    await world.run(5)
    assert world.condition("job", "Rescaling")["reason"] == "Moving"


async def recovering(world: World) -> None:
    """The third failure of a rank: the next start waits."""
    for _ in range(3):
        await world.run(15)
        agent = world.agents[next(iter(sorted(pods(world, "job"))))]
        agent.state, agent.failure = AgentState.FAILED, FailureKind.ERROR
        await world.run(4)
    assert world.status("job")["mesh"]["pendingCause"] == "RankFailure"


async def suspended_for_a_while(world: World) -> None:
    edit(world, "job", suspend=True)
    await world.run(60)
    assert not pods(world, "job")
    assert world.true("job", "Suspended")
    edit(world, "job", suspend=False)


async def suspended_for_a_moment(world: World) -> None:
    edit(world, "job", suspend=True)
    await world.run(1)
    edit(world, "job", suspend=False)


async def two_replicas_lost_at_once(world: World) -> None:
    for name in sorted(pods(world, "job"))[:2]:
        world.crash(name)


async def every_pod_evicted(world: World) -> None:
    for name in sorted(pods(world, "job")):
        await world.evict(name)


async def spot_nodes_taken_back(world: World) -> None:
    """Two nodes get a notice, and are gone half a minute later, whatever their ranks still do."""
    for node in NODES[:2]:
        cordon(world, node, cordoned=True)
    await world.run(30)
    for node in NODES[:2]:
        set_ready(world, node, ready=False)
    await world.run(20)
    for node in NODES[:2]:
        set_ready(world, node, ready=True)
        cordon(world, node, cordoned=False)


async def a_node_that_flaps(world: World) -> None:
    for _ in range(8):
        cordon(world, "n1", cordoned=True)
        await world.run(3)
        cordon(world, "n1", cordoned=False)
        await world.run(3)


async def preempted(world: World) -> None:
    """A job of a higher priority takes two nodes for a while."""
    body = elastic("other", 2)
    del body["spec"]["elastic"]
    body["spec"]["priority"] = 10
    world.submit(body)
    await world.run(120)
    assert world.true("other", "Ready"), world.condition("other", "Placed")
    delete_job(world, "other", [])
    await world.run(5)


async def operator_killed(world: World) -> None:
    kill_the_operator(world)


PHASES: tuple[Fault, ...] = (growing, shrinking, moving, recovering)
FAULTS: tuple[Fault, ...] = (
    suspended_for_a_while,
    suspended_for_a_moment,
    two_replicas_lost_at_once,
    every_pod_evicted,
    spot_nodes_taken_back,
    a_node_that_flaps,
    preempted,
    operator_killed,
)
PAIRS = list(itertools.product(PHASES, FAULTS))
ALWAYS = {(growing, suspended_for_a_while), (shrinking, spot_nodes_taken_back), (moving, two_replicas_lost_at_once)}


def check_ledger(world: World) -> None:
    ledger = parse_status(world.cluster.objects[f"{JOBS}/job"]).goodput
    assert ledger is not None
    until = parse_time(ledger.since)
    assert until is not None
    begin = unix_milliseconds(until) - sum(entry.milliseconds for entry in ledger.booked)
    assert abs(unix_milliseconds(world.now) - 1000 * world.seconds() - begin) <= 1000


@pytest.mark.parametrize(("phase", "fault"), mostly_long(PAIRS, ALWAYS.__contains__))
async def test_a_fault_while_something_else_is_under_way(phase: Fault, fault: Fault) -> None:
    world = World(7, nodes=3, work=FOREVER)
    body = elastic("job", 2, minReplicas=1, maxReplicas=3, pauseSeconds=10)
    body["spec"] |= {"preemptible": True, "recovery": {"maxRestarts": 5}}
    world.submit(body)
    await world.run(20)
    assert world.true("job", "Ready")
    await phase(world)
    await fault(world)
    check_ledger(world)
    world.unprepared = False
    for agent in world.agents.values():
        agent.hung, agent.preparing = False, False
    for node in NODES:
        cordon(world, node, cordoned=False)
    await world.run(900)
    wanted = {growing: 3, shrinking: 1}.get(phase, 2)
    assert (size(world, "job"), len(pods(world, "job"))) == (wanted, wanted), world.status("job")
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert not world.true("job", "Rescaling")
    counted = world.status("job").get("restartsTowardLimit", 0)
    crashes = fault is two_replicas_lost_at_once
    assert counted <= (3 if phase is recovering else 0) + crashes, "losses and resizes count toward no limit"
    check_ledger(world)


@pytest.mark.parametrize("phase", mostly_long(PHASES, {growing}.__contains__))
async def test_a_job_that_is_deleted_meanwhile_leaves_nothing(phase: Fault) -> None:
    world = World(8, nodes=3, work=FOREVER)
    world.submit(elastic("job", 2, minReplicas=1, maxReplicas=3, pauseSeconds=10))
    await world.run(20)
    await phase(world)
    delete_job(world, "job", [HOLD])
    await world.run(120)
    assert not pods(world, "job")
    assert world.condition("job", "Ready")["reason"] == "Terminating"
    writes = world.cluster.writes
    await world.run(120)
    assert world.cluster.writes == writes
    world.submit(elastic("next", 3))
    await world.run(30)
    assert world.true("next", "Ready"), "its nodes are free"


async def in_a_resize(phase: Fault) -> World:
    world = World(8, nodes=3, work=FOREVER)
    body = elastic("job", 2, minReplicas=1, maxReplicas=3, pauseSeconds=10)
    body["spec"]["preemptible"] = True
    world.submit(body)
    await world.run(20)
    await phase(world)
    assert world.true("job", "Rescaling")
    return world


def assert_no_resize(world: World) -> None:
    assert not world.true("job", "Rescaling"), world.condition("job", "Rescaling")
    assert not world.status("job")["elastic"].get("nextPlacement")


@pytest.mark.parametrize("phase", [growing, shrinking, moving])
async def test_a_job_without_pods_resizes_no_more(phase: Fault) -> None:
    """The condition stayed True as long as the job was suspended, and the alert of a resize that is stuck fired."""
    world = await in_a_resize(phase)
    edit(world, "job", suspend=True)
    await world.run(100)
    assert world.true("job", "Suspended")
    assert_no_resize(world)


async def test_a_job_that_is_stopped_for_another_one_resizes_no_more() -> None:
    world = await in_a_resize(shrinking)
    other = elastic("other", 3)
    del other["spec"]["elastic"]
    other["spec"]["priority"] = 10
    world.submit(other)
    await world.run(300)
    assert world.true("other", "Ready")
    assert not pods(world, "job")
    assert_no_resize(world)


async def test_a_job_that_has_failed_resizes_no_more() -> None:
    world = await in_a_resize(growing)
    edit(world, "job", activeDeadlineSeconds=1)
    await world.run(5)
    assert world.true("job", "Failed")
    assert_no_resize(world)
    await world.run(100)
    assert not pods(world, "job")


async def test_a_job_that_is_elastic_no_more_does_not_resize() -> None:
    world = await in_a_resize(shrinking)
    new = copy.deepcopy(world.cluster.objects[f"{JOBS}/job"])
    del new["spec"]["elastic"]
    new["metadata"]["generation"] += 1
    world.cluster.update(f"{JOBS}/job", new)
    await world.run(100)
    assert world.true("job", "Ready")
    assert not world.true("job", "Rescaling")


async def test_a_budget_of_restarts_that_is_used_up_is_whole_again_after_its_window() -> None:
    world = World(9, nodes=3, work=FOREVER)
    body = elastic("job", 2)
    body["spec"]["recovery"] = {"maxRestarts": 2, "restartWindowSeconds": 600}
    world.submit(body)
    await world.run(20)

    async def fail() -> None:
        agent = world.agents[min(pods(world, "job"))]
        agent.state, agent.failure = AgentState.FAILED, FailureKind.ERROR
        await world.run(90)

    for _ in range(2):
        await fail()
    assert world.status("job")["restartsTowardLimit"] == 2
    await world.run(700)
    await fail()
    assert world.true("job", "Ready")
    assert world.status("job")["restartsTowardLimit"] == 1
    await fail()
    await fail()
    assert world.true("job", "Failed")
    assert world.condition("job", "Failed")["reason"] == "RestartLimitReached"
