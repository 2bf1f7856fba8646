"""Verdicts scored against the injected truth: which fault, on which worker, in which phase of a job's life."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Awaitable, Callable

import pytest

from meshwright.protocol.messages import AgentState, FailureKind
from meshwright_operator.timestamps import format_time
from tests.operator.test_gang_races import small
from tests.operator.world import JOBS, PODS, Agent, World
from tests.tiers import mostly_long

WORKERS = 3
JOB = "job"
LONG = 10**6


def agent_of(world: World, worker: int) -> Agent:
    return next(agent for agent in world.agents.values() if agent.pod.worker == worker)


def lose_peers(world: World, victim: int) -> None:
    """What collectives report on all other workers when the connections to one break."""
    for agent in world.agents.values():
        if agent.pod.worker != victim and agent.state is AgentState.RUNNING:
            agent.state, agent.failure = AgentState.FAILED, FailureKind.PEER_LOST


def stop_all(world: World, victim: int) -> None:
    """No rank makes progress, and the victim is one step behind: it did not take part in the last collective."""
    for agent in world.agents.values():
        agent.hung = True
    agent_of(world, victim).trained -= 1.0


async def raise_in_rank(world: World, victim: int) -> None:
    agent = agent_of(world, victim)
    agent.state, agent.failure = AgentState.FAILED, FailureKind.ERROR
    lose_peers(world, victim)


async def stop_rank(world: World, victim: int) -> None:
    stop_all(world, victim)


async def kill_pod(world: World, victim: int) -> None:
    lose_peers(world, victim)
    await world.run(1)  # connections break before the deletion arrives
    world.crash(agent_of(world, victim).pod.name)


async def evict_pod(world: World, victim: int) -> None:
    await world.evict(agent_of(world, victim).pod.name)


async def crash_container(world: World, victim: int) -> None:
    pod = agent_of(world, victim).pod
    obj = copy.deepcopy(world.cluster.objects[f"{PODS}/{pod.name}"])
    ended = {"terminated": {"exitCode": 139, "finishedAt": format_time(world.now)}}
    obj["status"] |= {"phase": "Failed", "containerStatuses": [{"name": "worker", "state": ended}]}
    world.agents.pop(pod.name)
    lose_peers(world, victim)
    world.cluster.update(f"{PODS}/{pod.name}", obj)


async def lose_node(world: World, victim: int) -> None:
    """The kubelet's heartbeats stop, the node controller marks the node, and later evicts the pod."""
    agent = agent_of(world, victim)
    agent.silent = True
    world.stuck.add(agent.pod.name)  # its pod stays, and nobody knows of its processes
    lose_peers(world, victim)
    node = copy.deepcopy(world.nodes[agent.pod.node])
    node["status"]["conditions"] = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]
    world.nodes[agent.pod.node] = node
    for operator in world.operators:
        operator.cache.put_node(node)


async def cut_off(world: World, victim: int) -> None:
    """A node without a network: its agent is silent, nobody makes progress, and no connection breaks."""
    agent_of(world, victim).silent = True
    stop_all(world, victim)


FAULTS: dict[str, tuple[Callable[[World, int], Awaitable[None]], str, bool]] = {
    "a rank raises": (raise_in_rank, "RankFailure", True),
    "a rank is stopped": (stop_rank, "Hang", True),
    "a pod is killed": (kill_pod, "PodLost", False),
    "a pod is evicted": (evict_pod, "PodLost", False),
    "a container crashes": (crash_container, "PodFailed", True),
    "a node is lost": (lose_node, "NodeLost", False),
    "a node is cut off": (cut_off, "PodLost", False),
}
"""Fault -> how it is injected, the true cause, and whether `status.lastFailure` has to name the worker."""


async def in_training(world: World) -> None:
    await world.run(20)


async def without_an_operator(world: World) -> None:
    """The operator dies before the fault, and another one starts half a minute later."""
    await world.run(20)
    world.operators = []


async def while_growing(world: World) -> None:
    await world.run(20)
    body = copy.deepcopy(world.cluster.objects[f"{JOBS}/{JOB}"])
    body["spec"]["replicas"] = WORKERS + 1
    body["metadata"]["generation"] = 2
    world.cluster.update(f"{JOBS}/{JOB}", body)
    await world.run(1)


PHASES: dict[str, Callable[[World], Awaitable[None]]] = {
    "training": in_training,
    "no operator": without_an_operator,
    "growing": while_growing,
}


ABSORBED = {("growing", "a rank is stopped"), ("growing", "a node is cut off")}
"""Ranks that wait when the job grows are replaced by those of the new generation: nothing is left to find."""


async def verdict(world: World, phase: str, fault: str, victim: int) -> tuple[list[str], int | None]:
    """The causes of all failures after the fault, and the worker that the last failure names."""
    elastic = {"minReplicas": 1, "maxReplicas": 4, "pauseSeconds": 10}
    recovery = {"hangTimeoutSeconds": 120, "maxRestarts": 20}
    world.submit(small(JOB, WORKERS, recovery=recovery, elastic=elastic, checkpoint={"claimName": "c"}))
    await PHASES[phase](world)
    await FAULTS[fault][0](world, victim)
    await world.run(30)
    world.operators = world.operators or [world.operator()]
    await world.run(300)
    assert world.true(JOB, "Ready"), world.condition(JOB, "Ready")
    status = world.status(JOB)
    causes = [entry["cause"] for entry in status.get("restarts", ()) for _ in range(entry["count"])]
    failure = status.get("lastFailure")
    return [cause for cause in causes if cause != "Rescaled"], failure["worker"] if failure else None


def one_victim(case: tuple[str, str, int]) -> bool:
    """Every fault in every phase, each time on another worker."""
    phase, fault, victim = case
    return victim == (list(PHASES).index(phase) + list(FAULTS).index(fault)) % WORKERS


@pytest.mark.parametrize(
    ("phase", "fault", "victim"), mostly_long(itertools.product(PHASES, FAULTS, range(WORKERS)), one_victim)
)
async def test_the_verdict_is_the_truth(phase: str, fault: str, victim: int) -> None:
    world = World(victim, nodes=8, work=LONG)
    causes, named = await verdict(world, phase, fault, victim)
    _, truth, names_worker = FAULTS[fault]
    absorbed = (phase, fault) in ABSORBED
    assert causes == ([] if absorbed else [truth])
    assert named == (victim if names_worker and not absorbed else None)


STARTING = {"a pod is killed": 0, "a pod is evicted": 0, "a container crashes": 1, "a node is lost": 0}
"""Fault of a job that starts -> how many restarts toward the limit it costs."""


@pytest.mark.parametrize(
    ("fault", "victim"),
    mostly_long(
        itertools.product(STARTING, range(WORKERS)), lambda case: case[1] == list(STARTING).index(case[0]) % WORKERS
    ),
)
async def test_while_a_job_starts_only_its_own_failures_count(fault: str, victim: int) -> None:
    world = World(victim, nodes=8, work=LONG)
    world.mute = True
    world.submit(small(JOB, WORKERS))
    await world.run(8)
    assert len(world.agents) == WORKERS, "all pods run, and no agent has reached the coordinator"
    await FAULTS[fault][0](world, victim)
    world.mute = False
    for agent in world.agents.values():
        agent.silent = fault == "a node is lost" and agent.pod.worker == victim
    await world.run(200)
    assert world.true(JOB, "Ready")
    assert world.status(JOB).get("restartsTowardLimit", 0) == STARTING[fault]


@pytest.mark.parametrize("victim", mostly_long(range(WORKERS), lambda victim: victim == 1))
async def test_a_silent_agent_alone_is_no_fault(victim: int) -> None:
    world = World(victim, nodes=8, work=LONG)
    world.submit(small(JOB, WORKERS))
    await world.run(20)
    agent_of(world, victim).silent = True
    await world.run(300)
    assert "restarts" not in world.status(JOB) or world.status(JOB)["restarts"] == []
