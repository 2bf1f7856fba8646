"""Builders of what decisions look at: a job that trains, and changes to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from meshwright.api.labels import GANG_GATE
from meshwright.api.objects import pod_name
from meshwright.api.parsing import parse_spec
from meshwright.api.status import (
    MeshStatus,
    ParallelTrainingJobStatus,
    PlacementStatus,
    PlanStatus,
    WorkerPlacement,
)
from meshwright.planner.cluster.inventory import MALFORMED, Inventory
from meshwright.planner.cluster.pod_resources import Resources
from meshwright.planner.plan import make_plan
from meshwright.protocol.messages import AgentState, FailureKind, Progress, WorkerReport
from meshwright_operator.decide.agents import Agents, ReceivedReport, WaitingAgent
from meshwright_operator.decide.applied_spec import revision_of
from meshwright_operator.decide.observed import Observed, observe_workers
from meshwright_operator.decide.stuck_pods import stuck_pods
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.kube.pod_requests import PodRequest
from meshwright_operator.timestamps import format_time
from tests.operator.support import job

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
JOB = "train"
LISTENING_SECONDS = 50.0
"""For how long the operator runs: an agent that has never reported is not silent yet."""
NODES = {f"n{number}": False for number in range(8)}


def ago(seconds: float) -> str:
    return format_time(NOW - timedelta(seconds=seconds))


def spec(**fields: Any) -> Any:
    return parse_spec(job(JOB, **fields))


def pod(worker: int, incarnation: int = 0, **changes: Any) -> Pod:
    base = Pod(
        name=pod_name(JOB, worker, incarnation),
        namespace="default",
        uid=f"uid-{worker}-{incarnation}",
        version=10,
        job=JOB,
        owner="job-uid",
        worker=worker,
        incarnation=incarnation,
        revision=revision_of(spec()),
        gates=(),
        node=f"n{worker}",
        bound=True,
        phase="Running",
        address=f"10.0.0.{worker}",
        created=NOW - timedelta(seconds=5),
        deleting=False,
        disrupted=False,
        exit_code=None,
        ended=None,
        problem="",
    )
    return replace(base, **changes)


def gated(worker: int, incarnation: int = 0, **changes: Any) -> Pod:
    return pod(worker, incarnation, gates=(GANG_GATE,), bound=False, phase="Pending", address="", **changes)


def crashed(worker: int, incarnation: int = 0, *, seconds_ago: float = 30, code: int = 1) -> Pod:
    ended = NOW - timedelta(seconds=seconds_ago)
    return pod(worker, incarnation, phase="Failed", exit_code=code, ended=ended)


def placement(incarnations: dict[int, int] | None = None, workers: int = 4) -> PlacementStatus:
    numbers = {worker: 0 for worker in range(workers)} | (incarnations or {})
    return PlacementStatus(
        workers=[
            WorkerPlacement(
                worker=w, incarnation=i, pod=pod_name(JOB, w, i), node=f"n{w}", ranks=f"{2 * w}-{2 * w + 1}"
            )
            for w, i in numbers.items()
        ],
        cost="0",
    )


def report(worker: int, state: AgentState, generation: int = 1, incarnation: int = 0, **fields: Any) -> WorkerReport:
    progress = Progress(step=7, loss=2.25, tokens_per_second=1000.4, step_seconds=0.5) if worker == 0 else None
    fields = {"progress": progress, "pod_uid": f"uid-{worker}-{incarnation}", **fields}
    return WorkerReport(worker=worker, incarnation=incarnation, generation=generation, state=state, **fields)


def failed(worker: int, kind: FailureKind, message: str = "", generation: int = 1) -> WorkerReport:
    return report(worker, AgentState.FAILED, generation, failure=kind, message=message)


def agents(
    reports: list[WorkerReport] | None = None, *, hello: range = range(4), halted_seconds: float = 0.0
) -> Agents:
    if reports is None:
        reports = [report(worker, AgentState.RUNNING) for worker in range(4)]
    return Agents(
        waiting_agents={worker: WaitingAgent(0, f"10.0.0.{worker}", 2000 + worker) for worker in hello},
        reports={
            r.worker: ReceivedReport(r, 0.1, halted_seconds if r.state in (AgentState.FAILED, AgentState.IDLE) else 0.0)
            for r in reports
        },
        newest_generation=1,
        listening_seconds=LISTENING_SECONDS,
    )


def plan_status(**changes: Any) -> PlanStatus:
    numbers = {"tensor": 2, "pipeline": 2, "data": 2, "micro_batches": 2, "world_size": 8, "workers": 4}
    return PlanStatus(**{**numbers, "revision": revision_of(spec()), "summary": "TP 2 x PP 2 x DP 2", **changes})


def running_status(**fields: Any) -> ParallelTrainingJobStatus:
    """The status of a job in its first generation."""
    return ParallelTrainingJobStatus(
        **{
            "observed_generation": 1,
            "plan": plan_status(),
            "placement": placement(),
            "mesh": MeshStatus(generation=1, master="10.0.0.0:2000", cause="Start", started_time=ago(60)),
            "start_time": ago(90),
            "active_since": ago(90),
            **fields,
        }
    )


def observed(
    pods: list[Pod] | None = None,
    status: ParallelTrainingJobStatus | None = None,
    *,
    received: Agents | None = None,
    down: dict[str, bool] | None = None,
    refused: dict[str, str] | None = None,
    now: datetime = NOW,
    some_node_ready: bool = True,
    **fields: Any,
) -> Observed:
    """A job that trains in generation 1 with four pods by default."""
    wanted = spec(**fields)
    revision = revision_of(wanted)
    if status is None:
        status = running_status()
    kept = status.plan if status.plan is not None and status.plan.revision == revision else None
    plan = make_plan(wanted, Inventory(), kept or plan_status())
    if pods is None:
        pods = [pod(worker) for worker in range(4)]
    received = received if received is not None else agents()
    workers, excess_pods = observe_workers(
        range(len(plan.workers)), status, pods, down or NODES, refused or {}, agents=received, now=now
    )
    return Observed(
        now=now,
        name=JOB,
        uid="job-uid",
        generation=1,
        spec=wanted,
        revision=revision,
        status=status,
        plan=plan,
        workers=workers,
        excess_pods=excess_pods,
        agents=received,
        stuck_pods=stuck_pods(pods, down or NODES, now),
        some_node_ready=some_node_ready,
    )


def requested_by_node(pod_requests: Iterable[PodRequest], gpu_resource: str) -> tuple[dict[str, Resources], list[str]]:
    """Node -> resources that these pods request there, and a message for each pod that cannot be counted.

    The operator counts changes of pods instead of all pods.
    """
    requested: dict[str, Resources] = {}
    malformed: list[str] = []
    for one in pod_requests:
        try:
            requested[one.node] = requested.get(one.node, Resources()) + one.amount(gpu_resource)
        except MALFORMED as error:
            malformed.append(f"pod {one.name} was not counted: its object is malformed ({error})")
    return requested, malformed
