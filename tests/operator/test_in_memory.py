"""What the operator decides about recovery in memory: who keeps its state, and when all ranks restart instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.api.status import MeshStatus, ParallelTrainingJobStatus
from meshwright.protocol.messages import (
    AgentState,
    FailureKind,
    HeldCopy,
    HeldState,
    MemoryCopies,
    MeshDocument,
    RankProcess,
    WorkerReport,
)
from meshwright_operator.coordinator.agent_registry import AgentRegistry
from meshwright_operator.decide.agents import Agents
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.in_memory import leaves
from meshwright_operator.decide.mesh_generation import document
from meshwright_operator.decide.observed import Observed
from tests.operator.builders import agents, ago, observed, pod, report, running_status

LAYOUT = "TP 2 x PP 2 x DP 2"
IN_MEMORY = {"recovery": {"inMemory": True}}


def ranks(worker: int, **states: HeldState | None) -> list[RankProcess]:
    """The processes of a worker's two ranks: the first and the second one, with what they hold."""
    return [
        RankProcess(rank=2 * worker + index, pid=100 + index, held=states.get(name, HeldState(step=7)))
        for index, name in enumerate(("first", "second"))
    ]


def holds(worker: int, kind: FailureKind = FailureKind.PEER_LOST, **states: HeldState | None) -> WorkerReport:
    return report(worker, AgentState.FAILED, failure=kind, message="boom", ranks=ranks(worker, **states))


def able(found: Agents, *, holds_state: bool = True) -> Agents:
    """Agents that can hold the state of their ranks."""
    waiting = {worker: replace(agent, holds_state=holds_state) for worker, agent in found.waiting_agents.items()}
    return replace(found, waiting_agents=waiting)


def status(**mesh: Any) -> ParallelTrainingJobStatus:
    fields = {"generation": 1, "master": "10.0.0.0:2000", "cause": "Start", "started_time": ago(60), **mesh}
    return running_status(mesh=MeshStatus(**{"in_memory": LAYOUT, **fields}))


def pending(cause: str, seconds: float = 1, /, **mesh: Any) -> ParallelTrainingJobStatus:
    return status(pending_cause=cause, pending_since=ago(seconds), failures=1, **mesh)


def seen(reports: list[WorkerReport], before: ParallelTrainingJobStatus, **fields: Any) -> Observed:
    return observed(status=before, received=able(agents(reports)), **{**IN_MEMORY, **fields})


def published(seen_now: Observed, decision: Decision) -> MeshDocument:
    found = document(seen_now, decision.mesh)
    assert found is not None
    return found


def events(decision: Decision) -> dict[str, str]:
    return {event.reason: event.message for event in decision.events}


LOST_RANK_3 = [holds(0), holds(1, FailureKind.ERROR, second=None), holds(2), holds(3)]


def test_ranks_go_on_and_a_new_one_gets_its_state_from_the_other_replica() -> None:
    now = seen(LOST_RANK_3, pending("RankFailure"))
    decision = decide(now)
    assert decision.mesh.generation == 2
    memory = published(now, decision).memory
    assert memory is not None
    assert (memory.generation, memory.step, memory.leader, memory.ranks) == (1, 7, 0, "0-2,4-7")
    assert published(now, decision).in_memory
    told = events(decision)
    assert "rank 3 gets the state of rank 7" in told["RecoveringInMemory"]
    assert "RestartingFromCheckpoint" not in told


COPIES = {"recovery": {"inMemory": True, "copyEverySteps": 5}}


def copied(first: int, *steps: int) -> HeldState:
    """What a rank holds that has copies of its own and of the peer four ranks before it, of these steps."""
    ranks_of = (first, (first - 4) % 8)
    return HeldState(step=12, copies=[HeldCopy(rank=rank, step=step) for rank in ranks_of for step in steps])


def test_ranks_make_copies_on_peers_that_status_names() -> None:
    decision = decide(seen(LOST_RANK_3, pending("RankFailure"), **COPIES))
    copies = decision.mesh.copies
    assert copies is not None
    assert (copies.every_steps, copies.shift) == (5, 2)
    assert copies.survives.startswith("the loss of any rank, worker")
    assert published(seen(LOST_RANK_3, pending("RankFailure"), **COPIES), decision).copies == MemoryCopies(
        every_steps=5, shift=2
    )
    assert decide(seen(LOST_RANK_3, pending("RankFailure"))).mesh.copies is None


def test_if_no_rank_has_the_same_state_all_go_back_to_copies() -> None:
    # Ranks 3 and 7 have the same state, and both are lost. Worker 0 has not received the newest copies completely.
    reports = [
        holds(0, first=copied(0, 5), second=copied(1, 5)),
        holds(1, first=copied(2, 5, 10), second=None),
        holds(2, first=copied(4, 5, 10), second=copied(5, 5, 10)),
        holds(3, first=copied(6, 5, 10), second=None),
    ]
    gone = decide(seen(reports, pending("RankFailure"), **COPIES))
    assert gone.mesh.recovery is None, "rank 3 had the copy of rank 7, and rank 7 that of rank 3"
    assert "the state of ranks 3, 7" in events(gone)["MemoryLost"]
    reports[0] = holds(0, first=copied(0, 5), second=copied(7, 5).model_copy(update={"copies": peers(1, 3, 7)}))
    decision = decide(now := seen(reports, pending("RankFailure"), **COPIES))
    memory = published(now, decision).memory
    assert memory is not None
    assert (memory.step, memory.ranks, memory.holders) == (5, "0-2,4-6", "3:1,7:1")
    assert "All ranks go back to step 5" in events(decision)["RecoveringInMemory"]
    later = seen([], decision.status, **COPIES)
    assert document(later, later.mesh) == published(now, decision)


def peers(*ranks_of: int) -> list[HeldCopy]:
    return [HeldCopy(rank=rank, step=5) for rank in ranks_of]


def test_every_agent_gets_the_same_document_after_a_restart_of_the_operator() -> None:
    now = seen(LOST_RANK_3, pending("RankFailure"))
    decision = decide(now)
    later = seen([], decision.status)
    assert document(later, later.mesh) == published(now, decision)


def test_a_lost_rank_is_counted_at_once_when_all_ranks_have_left() -> None:
    decision = decide(seen(LOST_RANK_3, status()))
    assert decision.mesh.generation == 2
    assert decision.mesh.recovery is not None
    assert [(cause.cause, cause.count) for cause in decision.status.restarts] == [("RankFailure", 1)]


def test_workers_that_only_left_have_reported_too() -> None:
    left = report(3, AgentState.IDLE, ranks=ranks(3))
    assert decide(seen([*LOST_RANK_3[:3], left], status())).mesh.recovery is not None


def test_ranks_have_some_seconds_to_leave() -> None:
    busy = report(2, AgentState.RUNNING)
    reports = [holds(0), holds(1, second=None), busy, holds(3)]
    early = decide(seen(reports, pending("RankFailure", 1)))
    assert early.mesh.generation == 1
    assert early.requeue_after is not None
    assert early.requeue_after <= 0.5
    late = decide(seen(reports, pending("RankFailure", 10)))
    assert late.mesh.recovery is not None
    assert late.mesh.recovery.ranks == "0-2,6-7"


@pytest.mark.parametrize(
    ("reports", "text"),
    [
        ([holds(0), holds(1, second=None), holds(2), holds(3, second=None)], "the state of ranks 3, 7"),
        ([report(worker, AgentState.FAILED) for worker in range(4)], "no rank has kept its state"),
    ],
)
def test_if_a_state_is_lost_all_ranks_restart_and_an_event_says_why(reports: list[WorkerReport], text: str) -> None:
    now = seen(reports, pending("NodeLost", 10))
    decision = decide(now)
    assert decision.mesh.generation == 2
    assert published(now, decision).memory is None
    assert text in events(decision)["MemoryLost"].replace("No rank has", "no rank has")


@pytest.mark.parametrize("cause", ["SpecChanged", "Rescaled", "NodeDrained", "Hang", "Resume"])
def test_other_causes_restart_all_ranks(cause: str) -> None:
    now = seen(LOST_RANK_3, pending(cause, 60))
    decision = decide(now)
    if decision.mesh.generation == 2:
        assert published(now, decision).memory is None
        assert "MemoryLost" not in events(decision)


def test_agents_of_earlier_versions_restart_their_ranks_and_an_event_says_so() -> None:
    now = observed(status=pending("RankFailure"), received=able(agents(LOST_RANK_3), holds_state=False), **IN_MEMORY)
    decision = decide(now)
    assert decision.mesh.generation == 2
    assert decision.mesh.in_memory is None
    found = published(now, decision)
    assert (found.in_memory, found.memory) == (None, None)
    assert "before 0.2" in events(decision)["InMemoryUnavailable"]


@pytest.mark.parametrize("step", [-1, 1 << 60])
def test_a_step_that_no_rank_can_have_is_not_believed(step: int) -> None:
    claims = holds(2, first=HeldState(step=step), second=HeldState(step=step))
    recovery = decide(seen([*LOST_RANK_3[:2], claims, holds(3)], pending("RankFailure"))).mesh.recovery
    assert recovery is not None
    assert (recovery.step, recovery.ranks) == (7, "0-2,6-7")


def test_ranks_stay_while_a_pod_terminates_and_all_save_a_checkpoint() -> None:
    ending = [pod(0), pod(1), pod(2), pod(3, deleting=True)]
    now = observed(ending, status(), received=able(agents()), **IN_MEMORY)
    decision = decide(now)
    assert decision.mesh.pending_cause == "PodLost"
    assert not leaves(now, decision.mesh)
    gone = observed(ending[:3], pending("PodLost"), received=able(agents()), **IN_MEMORY)
    assert leaves(gone, gone.mesh)


def test_without_the_field_nothing_changes() -> None:
    now = observed(status=running_status(), received=able(agents(LOST_RANK_3)))
    decision = decide(now)
    assert decision.mesh.generation == 2
    found = published(now, decision)
    assert (found.in_memory, found.memory, decision.mesh.in_memory, decision.mesh.recovery) == (None, None, None, None)
    assert not {"RecoveringInMemory", "MemoryLost", "InMemoryUnavailable"} & events(decision).keys()


def test_a_recovery_that_makes_progress_does_not_back_off() -> None:
    repeated = pending("RankFailure", 1).model_copy(deep=True)
    assert repeated.mesh is not None
    repeated.mesh.failures = 4
    repeated.restarts_toward_limit = 4
    assert decide(seen(LOST_RANK_3, repeated)).mesh.generation == 2
    still = pending("RankFailure", 1, recovery={"generation": 1, "step": 7, "leader": 0, "ranks": "0"})
    assert still.mesh is not None
    still.mesh.failures, still.restarts_toward_limit = 4, 4
    assert decide(seen(LOST_RANK_3, still)).mesh.generation == 1, "the same step again: it waits"


async def test_a_failed_rank_lets_all_agents_leave_before_anything_is_decided() -> None:
    registry = AgentRegistry()
    now = seen([], status())
    current = document(now, now.mesh)
    assert current is not None
    await registry.publish(current, dict.fromkeys(range(4), 0), generation=1)
    for worker in range(4):
        registry.receive_report(report(worker, AgentState.RUNNING))
    assert registry.leave_for(0) is None
    registry.receive_report(LOST_RANK_3[1])
    await registry.leave_with_failed(LOST_RANK_3[1])
    assert [registry.leave_for(worker) for worker in range(4)] == [1, 1, 1, 1]
    await registry.publish(None, dict.fromkeys(range(4), 0), generation=1, leave=True)
    assert registry.leave_for(2) == 1
    await registry.publish(current.model_copy(update={"generation": 2}), dict.fromkeys(range(4), 0), generation=2)
    assert registry.leave_for(2) is None


async def test_ranks_of_other_jobs_are_not_told_to_leave() -> None:
    registry = AgentRegistry()
    now = observed()
    current = document(now, now.mesh)
    assert current is not None
    await registry.publish(current, dict.fromkeys(range(4), 0), generation=1)
    await registry.leave_with_failed(LOST_RANK_3[1])
    assert registry.leave is None


RECOVERY = {"generation": 1, "step": 7, "leader": 0, "ranks": "0-2,4-7"}


def has(found: Agents, documents: dict[int, int]) -> Agents:
    """Agents that poll for a newer generation than the one of which each has the document."""
    waiting = {w: replace(agent, generation=documents.get(w, 2)) for w, agent in found.waiting_agents.items()}
    return replace(found, waiting_agents=waiting, newest_generation=2)


def interrupted(reports: list[WorkerReport], documents: dict[int, int], **mesh: Any) -> Observed:
    """Generation 2, in which ranks were to go on from memory, was interrupted before it made a step."""
    fields = {"generation": 2, "cause": "RankFailure", "recovery": RECOVERY, **mesh}
    found = has(able(agents(reports)), documents)
    return observed(status=pending("PodLost", 10, **fields), received=found, **IN_MEMORY)


def test_ranks_whose_agent_never_got_an_interrupted_generation_go_on() -> None:
    second = {"generation": 2}
    reports = [holds(0), *(holds(w).model_copy(update=second) for w in (1, 2)), holds(3)]
    now = interrupted(reports, {0: 1, 3: 1})
    memory = published(now, decide(now)).memory
    assert memory is not None
    assert (memory.generation, memory.step, memory.ranks) == (1, 7, "0-7")
    later = seen([], decide(now).status)
    assert document(later, later.mesh) == published(now, decide(now)), "after a restart of the operator too"


def test_nobody_got_an_interrupted_generation_and_all_go_on() -> None:
    now = interrupted([holds(0), holds(1), holds(2), holds(3)], dict.fromkeys(range(4), 1))
    decision = decide(now)
    assert "MemoryLost" not in events(decision)
    memory = published(now, decision).memory
    assert memory is not None
    assert (memory.generation, memory.ranks) == (1, "0-7")


@pytest.mark.parametrize(
    ("documents", "mesh", "step"),
    [
        ({0: 2}, {}, 7),  # its report is from before it received the document
        ({0: 1}, {"recovery": None}, 7),  # all ranks have started anew from a checkpoint since
        ({0: 1}, {"recovery": {**RECOVERY, "generation": 2}}, 7),
        ({0: 1}, {}, 8),  # the others went on without this step
    ],
)
def test_an_older_state_that_the_others_cannot_use_does_not_count(
    documents: dict[int, int], mesh: dict[str, Any], step: int
) -> None:
    old = holds(0, first=HeldState(step=step), second=HeldState(step=step))
    now = interrupted([old, *(holds(w).model_copy(update={"generation": 2}) for w in (1, 2, 3))], documents, **mesh)
    memory = published(now, decide(now)).memory
    assert memory is not None
    assert (memory.generation, memory.step, memory.ranks) == (2, 7, "2-7")


@pytest.mark.parametrize(
    ("cause", "fields"), [("RankFailure", IN_MEMORY), ("Rescaled", {}), ("NodeDrained", {}), ("Rebalanced", {})]
)
def test_a_new_operator_waits_for_the_reports_of_agents_that_poll(cause: str, fields: dict[str, Any]) -> None:
    before = pending(cause) if fields else running_status(mesh=pending(cause).mesh)
    heard = has(able(agents([holds(0), holds(1), holds(2)])), dict.fromkeys(range(4), 1))
    early = decide(observed(status=before, received=replace(heard, listening_seconds=1.0), **fields))
    assert early.mesh.generation == 1, "worker 3 may hold its state, or save a checkpoint"
    assert early.requeue_after is not None
    assert early.requeue_after <= 0.5
    late = decide(observed(status=before, received=replace(heard, listening_seconds=11.0), **fields))
    assert late.mesh.generation == 3
    fresh = replace(heard, waiting_agents={**heard.waiting_agents, 3: replace(heard.waiting_agents[3], generation=0)})
    new = decide(observed(status=before, received=replace(fresh, listening_seconds=1.0), **fields))
    assert new.mesh.generation == 3, "a new pod has nothing to say"


def test_a_report_from_before_the_interrupted_generation_is_waited_for() -> None:
    reports = [holds(0), *(holds(w).model_copy(update={"generation": 2}) for w in (1, 2, 3))]
    found = has(able(agents(reports)), {})
    fields = {"generation": 2, "cause": "RankFailure", "recovery": RECOVERY}
    early = decide(observed(status=pending("RankFailure", 1, **fields), received=found, **IN_MEMORY))
    assert early.mesh.generation == 2, "worker 0 has the document, and its ranks may still leave"
