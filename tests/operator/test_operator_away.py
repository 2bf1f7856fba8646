"""Generations that end or form while no operator runs: a new one loses no state that ranks hold, and no checkpoint.

Status has what was decided, but what agents were told, and what they have reported, is gone with the operator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from meshwright.memory_recovery import keeping_ranks
from meshwright.protocol.messages import AgentState, HeldState
from meshwright_operator.controller.reconciler import Reconciler
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import ApiError
from meshwright_operator.kube.pod_info import Pod
from tests.operator.test_elastic import FOREVER, edit, elastic, pods, set_ready, size
from tests.operator.test_replicas_continue import MemoryAgent, MemoryWorld, agents_of, continuing
from tests.operator.world import Agent, Operator, World
from tests.randomness import seeds

LOST = {"MemoryLost", "RestartingFromCheckpoint", "InMemoryUnavailable"}


@dataclass
class SeparateAgent(MemoryAgent):
    """An agent whose polls and reports arrive at different times, as over two connections."""

    world: World | None = None
    polls: float = 1.0
    reports: float = 1.0
    """The probabilities that a poll, and a report, arrives in a second. One of three does, unless none can."""
    missed: dict[str, int] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Steps that its ranks have."""
        return self.step + (int(self.trained) if self.state is AgentState.RUNNING else 0)

    def train(self, seconds: float, work: float) -> None:
        """A step needs the ranks of all workers."""
        assert self.world is not None
        running = {
            (agent.pod.worker, agent.generation)
            for agent in self.world.agents.values()
            if agent.uid == self.uid and agent.state is AgentState.RUNNING
        }
        members = self.document.members if self.document is not None else []
        if all((member.worker, self.generation) in running for member in members):
            super().train(seconds, work)

    def talk(self, operator: Operator) -> None:
        if self.silent:
            return
        assert self.world is not None
        for arrives, act in ((self.reports, self._say), (self.polls, self._ask)):
            missed = self.missed.get(act.__name__, 0)
            if self.world.random.random() < arrives or (arrives and missed > 1):
                self.missed[act.__name__] = 0
                act(operator)
            else:
                self.missed[act.__name__] = missed + 1

    def _say(self, operator: Operator) -> None:
        registry, key = operator.coordinator.registry(self.uid), JobKey(self.pod.namespace, self.pod.job)
        urgent = registry.receive_report(self.report())
        operator.notify(key, urgent)
        if self.state is not AgentState.RUNNING:
            return
        if registry.leave_for(self.pod.worker) == self.generation:
            self.step = self.done
            self.state, self.held = AgentState.IDLE, HeldState(step=self.step, reduced=self.step + 1)
            self.missed["_say"] = 2  # an agent reports a change at once
        elif registry.pause_for(self.pod.worker) == self.generation:
            self.state = AgentState.IDLE

    def _ask(self, operator: Operator) -> None:
        registry, hello = operator.coordinator.registry(self.uid), self._hello()
        if registry.superseded(hello):
            self.state = AgentState.DRAINING
            return
        document = registry.document_for(hello)
        if document is None:
            new = registry.is_new(hello)
            with registry.polling(hello):
                if new:
                    operator.notify(JobKey(self.pod.namespace, self.pod.job), urgent=True)
            return
        registry._presences.pop(self.pod.worker, None)
        memory, before = document.memory, self.generation
        self.document, self.generation = document, document.generation
        since = memory is not None and memory.generation <= before < document.generation
        goes_on = self.held is not None and memory is not None and since and self.first_rank in keeping_ranks(memory)
        self.starts += not goes_on
        assert memory is None or not goes_on or self.step <= memory.step
        self.step = memory.step if memory is not None else 0
        self.state, self.trained, self.idle, self.held = AgentState.RUNNING, 0.0, 0.0, None
        self.first_ranks.append(self.first_rank)


class SeparateWorld(MemoryWorld):
    def agent(self, pod: Pod, address: str) -> Agent:
        made = SeparateAgent(pod, pod.owner, address, silent=self.mute, preparing=self.unprepared)
        made.world = self
        return made


def die_before(world: World, method: str) -> None:
    """The operator dies when it is about to call this method of its reconciler, after the status was written."""
    operator = world.operators[0]
    before: Callable[..., Any] = getattr(Reconciler, method)

    async def killed(registry: Any, draft: Any) -> None:
        if draft.status.mesh == draft.observed.status.mesh:
            await before(operator.reconciler, registry, draft)
            return
        operator.blind = True
        world.operators = []
        raise ApiError(0, "Killed", "the operator died")

    setattr(operator.reconciler, method, killed)


async def without_operator(world: World, seconds: float) -> None:
    """Nobody decides anything for a while. Then a new operator does."""
    assert not world.operators, "it has not died"
    await world.run(seconds)
    world.operators = [world.operator()]


def lose(world: World, worker: int) -> str:
    """The node of a worker goes down. Returns its name."""
    node = next(pod.node for pod in world.pods("job") if pod.worker == worker and not pod.terminal)
    set_ready(world, node, ready=False)
    return node


async def trains_in_memory(seed: int, replicas: int, **fields: Any) -> SeparateWorld:
    world = SeparateWorld(seed, nodes=replicas + 1, work=FOREVER)
    world.submit(continuing("job", replicas, **fields))
    await world.run(30)
    assert world.true("job", "Ready")
    return world


@pytest.mark.parametrize("away", [0, 40])
async def test_an_operator_dies_before_it_tells_ranks_to_leave_a_generation(away: int) -> None:
    world = await trains_in_memory(1, 3)
    die_before(world, "_publish")
    lose(world, 0)
    await world.run(3)
    await without_operator(world, away)
    survivors = [agent for worker, agent in agents_of(world, "job").items() if worker != 0]
    await world.run(60)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert [agent.starts for agent in survivors] == [1, 1]
    assert not LOST & set(world.operators[0].notes.reasons("job"))


@pytest.mark.parametrize("away", [0, 40])
async def test_an_operator_dies_before_it_announces_the_generation_in_which_ranks_go_on(away: int) -> None:
    """Another replica is lost meanwhile, so that nobody ever gets that generation."""
    world = await trains_in_memory(2, 4)
    lose(world, 0)
    for _ in range(20):
        if any(agent.held is not None for agent in agents_of(world, "job").values()):
            die_before(world, "_publish")
            break
        await world.tick()
    await world.run(6)
    lose(world, 1)
    await without_operator(world, away)
    survivors = [agent for worker, agent in agents_of(world, "job").items() if worker > 1]
    await world.run(60)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert [agent.starts for agent in survivors] == [1, 1]
    assert not LOST & set(world.operators[0].notes.reasons("job"))


async def test_agents_poll_before_they_report_to_a_new_operator() -> None:
    world = await trains_in_memory(3, 3)
    lose(world, 0)
    for _ in range(20):
        await world.tick()
        if all(agent.held is not None for worker, agent in agents_of(world, "job").items() if worker):
            break
    world.operators[0].blind = True
    world.operators = [world.operator()]
    survivors = [agent for worker, agent in agents_of(world, "job").items() if worker != 0]
    for agent in world.agents.values():
        agent.reports = 0.0  # type: ignore[attr-defined]
    await world.run(3)
    for agent in world.agents.values():
        agent.reports = 1.0  # type: ignore[attr-defined]
    await world.run(60)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert [agent.starts for agent in survivors] == [1, 1]
    assert not LOST & set(world.operators[0].notes.reasons("job"))


async def test_ranks_that_were_to_save_for_a_resize_save_although_the_operator_was_away() -> None:
    world = World(4, nodes=2, work=FOREVER)
    world.submit(elastic("job", 2, maxReplicas=2))
    await world.run(30)
    assert size(world, "job") == 2
    die_before(world, "_publish")
    edit(world, "job", replicas=1)
    await world.run(3)
    await without_operator(world, 60)
    await world.run(40)
    assert size(world, "job") == 1
    steps = world.status("job")["checkpoint"]["step"]
    assert steps > 60, "the ranks trained while the operator was away, and saved that before they stopped"


async def test_workers_that_became_ready_while_the_operator_was_away_join() -> None:
    world = World(5, nodes=2, work=FOREVER)
    world.submit(elastic("job", 1, maxReplicas=2))
    await world.run(30)
    world.unprepared = True
    edit(world, "job", replicas=2)
    await world.run(10)
    assert len(pods(world, "job")) == 2
    world.operators[0].blind = True
    world.operators = []
    for agent in world.agents.values():
        agent.preparing = False
    await without_operator(world, 700)
    await world.run(40)
    assert size(world, "job") == 2
    assert "GrowthFailed" not in world.operators[0].notes.reasons("job")


async def test_a_resize_waits_for_a_late_report_of_what_ranks_hold() -> None:
    """Nobody is lost: a worker that is not waited for would get the state of others, in new processes."""
    world = await trains_in_memory(6, 2, maxReplicas=3)
    edit(world, "job", replicas=3)
    while world.status("job")["mesh"].get("pendingCause") != "Rescaled":
        await world.tick()
    ranks = agents_of(world, "job")
    ranks[1].reports = 0.0  # type: ignore[attr-defined]
    await world.run(7)
    ranks[1].reports = 1.0  # type: ignore[attr-defined]
    await world.run(30)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert size(world, "job") == 3
    assert [ranks[0].starts, ranks[1].starts] == [1, 1]


class History:
    """A series of losses, restarts of the operator and slow connections of a job whose replicas continue."""

    def __init__(self, world: SeparateWorld, chance: random.Random) -> None:
        self.world, self.chance = world, chance
        self.down: list[str] = []
        self.reasons: list[str] = []
        self.best = 0

    def live(self) -> list[SeparateAgent]:
        return [agent for agent in agents_of(self.world, "job").values() if isinstance(agent, SeparateAgent)]

    async def happen(self) -> None:
        """Something happens. At least two replicas whose ranks train or hold their state stay."""
        self.chance.choice((self.lose, self.slow, self.die, self.die_in_between, self.heal, self.heal))()
        for _ in range(self.chance.choice((1, 2, 4, 8, 20))):
            await self.tick()

    async def tick(self) -> None:
        if not self.world.operators and self.chance.random() < 0.2:
            self.world.operators = [self.world.operator()]
        before = {agent.pod.name: agent.starts for agent in self.live()}
        await self.world.tick()
        self.note()
        for agent in self.live():
            again = agent.starts > before.get(agent.pod.name, 1)
            assert not again or agent.starts == 1, f"the ranks of {agent.pod.name} started again: {self.reasons[-6:]}"

    def note(self) -> None:
        for operator in self.world.operators:
            self.reasons += operator.notes.reasons("job")
            operator.notes.notes.clear()

    def with_state(self) -> list[SeparateAgent]:
        return [agent for agent in self.live() if agent.held is not None or agent.done > 0]

    def lose(self) -> None:
        found = self.with_state()
        if len(found) > 2 and len(self.down) < 2:
            node = self.chance.choice(found).pod.node
            set_ready(self.world, node, ready=False)
            self.down.append(node)

    def heal(self) -> None:
        if self.down:
            set_ready(self.world, self.down.pop(0), ready=True)

    def slow(self) -> None:
        for agent in self.live():
            agent.polls, agent.reports = self.chance.choice(((1, 1), (1, 1), (0.3, 1), (1, 0.3), (0.5, 0.5)))

    def die(self) -> None:
        for operator in self.world.operators:
            operator.blind = True
        self.world.operators = []

    def die_in_between(self) -> None:
        if self.world.operators:
            die_before(self.world, "_publish")


@pytest.mark.chaos
@pytest.mark.parametrize("seed", seeds(2))
async def test_whatever_happens_to_the_operator_replicas_that_are_left_go_on(seed: int) -> None:
    world = await trains_in_memory(seed, 4, pauseSeconds=10)
    history = History(world, random.Random(seed))
    for _ in range(12):
        await history.happen()
    for _ in range(2):
        history.heal()
    for agent in history.live():
        agent.polls = agent.reports = 1.0
    if not world.operators:
        world.operators = [world.operator()]
    for _ in range(200):
        await history.tick()
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert size(world, "job") == 4
    assert "MemoryLost" not in history.reasons
