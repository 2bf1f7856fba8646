"""Replica groups of torchft: which of them go on when others restart, and what their agents receive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.api.status import MeshStatus, ParallelTrainingJobStatus, ReplicaGroupsStatus, ReplicaGroupStatus
from meshwright.protocol.messages import AgentState, FailureKind, WorkerReport
from meshwright_operator.decide.agents import Agents
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.mesh_generation import document
from meshwright_operator.decide.observed import Observed
from tests.operator.builders import (
    agents,
    ago,
    failed,
    observed,
    plan_status,
    pod,
    report,
    revision_of,
    running_status,
    spec,
)

FIELDS: dict[str, Any] = {
    "model": None,
    "data": None,
    "training": None,
    "runtime": {"command": ["python", "train.py"], "framework": "TorchFT"},
    "parallelism": {"tensor": 2, "pipeline": 2},
}
"""Four workers with two ranks each, and two replicas of four ranks: two groups of two workers."""
LIGHTHOUSE = "10.0.0.0:3000"
BEFORE = ReplicaGroupsStatus(
    lighthouse=LIGHTHOUSE,
    groups=[ReplicaGroupStatus(master=f"10.0.0.{worker}:200{worker}", since=1) for worker in (0, 2)],
)
RUNNING = [report(worker, AgentState.RUNNING) for worker in range(4)]


def able(found: Agents, shift: int = 0) -> Agents:
    """Agents that can run the lighthouse. Ports of stores have changed since the generation began."""
    waiting = {
        worker: replace(agent, store_port=agent.store_port + 100, lighthouse_port=3000 + worker + shift)
        for worker, agent in found.waiting_agents.items()
    }
    return replace(found, waiting_agents=waiting)


def status(wanted: Any, **mesh: Any) -> ParallelTrainingJobStatus:
    fields = {"generation": 1, "master": "10.0.0.0:2000", "cause": "Start", "started_time": ago(60), **mesh}
    return running_status(mesh=MeshStatus(**fields), plan=plan_status(revision=revision_of(wanted)))


def seen(
    reports: list[WorkerReport], cause: str = "RankFailure", shift: int = 0, before: Any = BEFORE, **fields: Any
) -> Observed:
    mesh = {"pending_cause": cause, "pending_since": ago(120), "failures": 1, "replica_groups": before}
    wanted = spec(**{**FIELDS, **fields})
    pods = [pod(worker, revision=revision_of(wanted)) for worker in range(4)]
    return observed(pods, status(wanted, **mesh), received=able(agents(reports), shift), **{**FIELDS, **fields})


def since(decision: Decision) -> list[int]:
    groups = decision.mesh.replica_groups
    assert groups is not None
    return [group.since for group in groups.groups]


def events(decision: Decision) -> dict[str, str]:
    return {event.reason: event.message for event in decision.events}


def test_the_first_generation_has_a_store_for_each_group_and_a_lighthouse() -> None:
    now = seen([], "Start", before=None)
    decision = decide(now)
    assert since(decision) == [2, 2]
    told = document(now, decision.mesh)
    assert told is not None
    assert told.replica_groups is not None
    groups = told.replica_groups
    assert (told.run_version, groups.ranks, groups.lighthouse) == (2, 4, LIGHTHOUSE)
    assert [(group.master_address, group.master_port) for group in groups.groups] == [
        ("10.0.0.0", 2100),
        ("10.0.0.2", 2102),
    ]
    assert "ReplicaGroupsRestarting" not in events(decision)


def test_a_group_whose_rank_failed_restarts_and_the_other_goes_on() -> None:
    reports = [*RUNNING[:3], failed(3, FailureKind.ERROR, "boom")]
    now = seen(reports)
    decision = decide(now)
    assert since(decision) == [1, 2]
    told = document(now, decision.mesh)
    assert told is not None
    assert told.replica_groups is not None
    assert told.replica_groups.groups[0].master_port == 2000, "its store is where it was"
    assert told.replica_groups.groups[1].master_port == 2102
    assert decision.mesh.master == "10.0.0.0:2000"
    message = "Replica group 1 restarts. 1 of 2 groups keep their ranks"
    assert events(decision)["ReplicaGroupsRestarting"] == message
    assert "RestartingFromCheckpoint" not in events(decision)


def test_a_group_that_went_on_before_goes_on_again() -> None:
    groups = BEFORE.model_copy(update={"groups": [BEFORE.groups[0], BEFORE.groups[1].model_copy(update={"since": 4})]})
    reports = [report(worker, AgentState.RUNNING, generation=4) for worker in range(3)]
    now = seen([*reports, failed(3, FailureKind.ERROR, "boom", generation=4)])
    moved = now.status.model_copy(
        update={"mesh": now.mesh.model_copy(update={"generation": 4, "replica_groups": groups})}
    )
    assert since(decide(replace(now, status=moved))) == [1, 5]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"cause": "Hang"}, "nobody knows which rank is the cause"),
        ({"cause": "Rescaled"}, "the size changes"),
        ({"cause": "NodeDrained"}, "all have saved a checkpoint and stopped"),
        ({"shift": 1}, "the lighthouse has moved"),
        ({"before": None}, "there were no groups"),
    ],
)
def test_all_groups_restart(change: dict[str, Any], why: str) -> None:
    decision = decide(seen(RUNNING, **change))
    assert since(decision) == [2, 2], why


@pytest.mark.parametrize(
    "second",
    [
        failed(1, FailureKind.PEER_LOST),
        report(1, AgentState.IDLE),
        report(1, AgentState.RUNNING, generation=0),
        report(1, AgentState.RUNNING, incarnation=1),
    ],
)
def test_a_group_goes_on_only_if_all_its_ranks_run(second: WorkerReport) -> None:
    assert since(decide(seen([RUNNING[0], second, *RUNNING[2:]]))) == [2, 1]


def test_a_group_of_which_an_agent_has_not_reported_restarts() -> None:
    assert since(decide(seen([RUNNING[0], *RUNNING[2:]]))) == [2, 1]


def test_the_job_may_name_a_lighthouse_of_its_own() -> None:
    own = {
        "workers": {
            "env": [{"name": "TORCHFT_LIGHTHOUSE", "value": "http://lighthouse:29510"}],
            "image": "x",
            "gpusPerWorker": 2,
        }
    }
    now = seen(RUNNING, before=None, **own)
    decision = decide(now)
    assert decision.mesh.replica_groups is not None
    assert decision.mesh.replica_groups.lighthouse == ""


def test_other_commands_have_one_world() -> None:
    now = seen(RUNNING, before=None, runtime={"command": ["x"]})
    decision = decide(now)
    told = document(now, decision.mesh)
    assert told is not None
    assert (decision.mesh.replica_groups, told.replica_groups, told.run_version) == (None, None, 1)
