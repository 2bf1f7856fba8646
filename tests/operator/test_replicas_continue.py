"""`recovery.onReplicaLoss: Continue` in virtual time: replicas go on without a lost one, and it joins them again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from meshwright.memory_recovery import keeping_ranks
from meshwright.protocol.messages import AgentState, HeldState, MeshRequest, RankProcess, WorkerReport
from meshwright_operator.kube.pod_info import Pod
from tests.operator.test_elastic import FOREVER, edit, elastic, pods, set_ready, size
from tests.operator.world import Agent, Operator, World

RANKS = 2


@dataclass
class MemoryAgent(Agent):
    """An agent whose ranks hold their state when they leave a generation."""

    held: HeldState | None = None
    step: int = 0
    """The step from which its ranks went on."""
    starts: int = 0
    """How often its ranks' processes have started."""
    first_ranks: list[int] = field(default_factory=list)
    """Its first rank in each generation."""

    def talk(self, operator: Operator) -> None:
        before, generation = self.document, self.generation
        registry = operator.coordinator.registry(self.uid)
        if self.state is AgentState.RUNNING and registry.leave == self.generation:
            self.step += int(self.trained)
            self.state, self.held = AgentState.IDLE, HeldState(step=self.step)
        super().talk(operator)
        document = self.document
        if document is None or document is before:
            return
        memory, first = document.memory, self.first_rank
        since = memory is not None and memory.generation <= generation < document.generation
        goes_on = memory is not None and since and first in keeping_ranks(memory)
        self.starts += not (goes_on and self.held is not None)
        self.step = memory.step if memory is not None else 0
        self.held = None
        self.first_ranks.append(first)

    def _hello(self) -> MeshRequest:
        return super()._hello().model_copy(update={"holds_state": True})

    def report(self) -> WorkerReport:
        report = super().report()
        live = report.state is AgentState.RUNNING or self.held is not None
        ranks = [
            RankProcess(rank=self.first_rank + index, pid=7 + index, step=self.step, held=self.held)
            for index in range(RANKS if live else 0)
        ]
        return report.model_copy(update={"ranks": ranks})


class MemoryWorld(World):
    def agent(self, pod: Pod, address: str) -> Agent:
        return MemoryAgent(pod, pod.owner, address, silent=self.mute, preparing=self.unprepared)


def continuing(name: str, replicas: int, **fields: Any) -> dict[str, Any]:
    body = elastic(name, replicas, **fields)
    body["spec"]["recovery"] = {"inMemory": True, "onReplicaLoss": "Continue"}
    body["spec"].setdefault("parallelism", {})["zeroStage"] = 0
    return body


def agents_of(world: World, job: str) -> dict[int, MemoryAgent]:
    live = {pod.name for pod in world.pods(job) if not pod.terminal}
    found = (agent for name, agent in world.agents.items() if name in live)
    return {agent.pod.worker: agent for agent in found if isinstance(agent, MemoryAgent)}


def recovered(world: World, job: str) -> tuple[str, int]:
    recovery = world.status(job)["mesh"]["recovery"]
    return recovery["ranks"], recovery["step"]


async def test_the_others_go_on_without_a_lost_replica_and_it_joins_again() -> None:
    world = MemoryWorld(1, nodes=4, work=FOREVER)
    world.submit(continuing("job", 3, pauseSeconds=300))
    await world.run(30)
    assert size(world, "job") == 3
    victim = next(pod for pod in world.pods("job") if pod.worker == 0)
    survivors = {w: agent for w, agent in agents_of(world, "job").items() if w != 0}
    world.unprepared = True
    set_ready(world, victim.node, ready=False)
    await world.run(25)
    assert size(world, "job") == 2
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    ranks, step = recovered(world, "job")
    assert ranks == "0-3"
    assert step > 10
    assert [agent.starts for agent in survivors.values()] == [1, 1], "no process has started again"
    assert {agent.first_ranks[-1] for agent in survivors.values()} == {0, 2}, "one has the ranks of the lost worker"
    assert world.status("job")["mesh"]["inMemory"] == "TP 2 x PP 1 x DP 2"

    for agent in world.agents.values():
        agent.preparing = False
    await world.run(25)
    assert size(world, "job") == 3
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    ranks, later = recovered(world, "job")
    assert ranks == "0-3"
    assert later > step
    assert [agent.starts for agent in survivors.values()] == [1, 1]
    assert sorted(agent.starts for agent in agents_of(world, "job").values()) == [1, 1, 1]
    reasons = world.operators[0].notes.reasons("job")
    assert reasons.count("RecoveringInMemory") == 2
    assert not {"MemoryLost", "RestartingFromCheckpoint", "InMemoryUnavailable"} & set(reasons)
    assert {entry["cause"]: entry["count"] for entry in world.status("job")["restarts"]} == {
        "NodeLost": 1,
        "Rescaled": 1,
    }


async def test_the_last_replica_holds_its_state_for_one_that_joins() -> None:
    world = MemoryWorld(2, nodes=2, work=FOREVER)
    world.submit(continuing("job", 2))
    await world.run(30)
    victim = next(pod for pod in world.pods("job") if pod.worker == 1)
    (survivor,) = (agent for worker, agent in agents_of(world, "job").items() if worker != 1)
    set_ready(world, victim.node, ready=False)
    await world.run(30)
    assert (size(world, "job"), survivor.starts) == (1, 1)
    assert world.status("job")["mesh"]["inMemory"] == "TP 2 x PP 1 x DP 1"
    set_ready(world, victim.node, ready=True)
    await world.run(60)
    assert (size(world, "job"), survivor.starts) == (2, 1)
    assert recovered(world, "job")[0] == "0-1"
    assert "MemoryLost" not in world.operators[0].notes.reasons("job")


async def test_an_edit_of_replicas_starts_no_rank_that_stays_again() -> None:
    world = MemoryWorld(3, nodes=3, work=FOREVER)
    world.submit(continuing("job", 3, maxReplicas=3))
    await world.run(30)
    edit(world, "job", replicas=1)
    await world.run(40)
    assert size(world, "job") == 1
    (agent,) = agents_of(world, "job").values()
    assert agent.starts == 1
    edit(world, "job", replicas=2)
    await world.run(60)
    assert size(world, "job") == 2
    assert [agent.starts for agent in agents_of(world, "job").values()] == [1, 1]
    assert "MemoryLost" not in world.operators[0].notes.reasons("job")


async def test_without_continue_a_resize_restarts_all_ranks_from_the_checkpoint() -> None:
    world = MemoryWorld(4, nodes=3, work=FOREVER)
    body = continuing("job", 2, onLoss="Shrink")
    del body["spec"]["recovery"]["onReplicaLoss"]
    world.submit(body)
    await world.run(30)
    victim = next(pod for pod in world.pods("job") if pod.worker == 0)
    survivors = pods(world, "job") - {victim.name}
    set_ready(world, victim.node, ready=False)
    await world.run(60)
    assert survivors < pods(world, "job")
    assert max(agent.starts for agent in agents_of(world, "job").values()) > 1
    assert "MemoryLost" in world.operators[0].notes.reasons("job")


@pytest.mark.parametrize("seed", range(3))
async def test_losses_while_a_replica_joins_end_with_all_of_them(seed: int) -> None:
    world = MemoryWorld(seed, nodes=5, work=FOREVER)
    world.submit(continuing("job", 3, pauseSeconds=10))
    await world.run(30)
    for _ in range(4):
        running = [pod for pod in world.pods("job") if not pod.terminal]
        world.crash(world.random.choice(running).name)
        await world.run(world.random.randrange(1, 12))
    await world.run(200)
    assert size(world, "job") == 3
    assert world.true("job", "Ready"), world.condition("job", "Ready")
