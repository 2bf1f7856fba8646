"""Whatever happens in whatever order, and wherever the operator dies: what decisions lead to keeps the promises.

The model is pure: a persisted status, pods, agents, and `decide()` whose actions are carried out, all of them or only
the first few, as if the operator had died after them.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from meshwright.api.labels import GANG_GATE
from meshwright.api.objects import pod_name
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import place
from meshwright.protocol.messages import AgentState, FailureKind, MeshDocument, RankProcess, WorkerReport
from meshwright_operator.decide.agents import Agents, ReceivedReport, WaitingAgent
from meshwright_operator.decide.applied_spec import revision_of
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.goodput import update_goodput
from meshwright_operator.decide.mesh_generation import document
from meshwright_operator.decide.observed import Observed, Rejection
from meshwright_operator.decide.placement_outcome import Granted, NotGranted, apply_grant
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.timestamps import format_time, parse_time, unix_milliseconds
from tests.operator.builders import JOB, NOW, observed, spec
from tests.operator.builders import pod as make_pod
from tests.operator.support import node
from tests.randomness import runs

WORKERS, NODES = 4, 6
workers, nodes, seconds = st.integers(0, WORKERS - 1), st.integers(0, NODES - 1), st.sampled_from([1, 5, 40, 130, 700])


class Life(RuleBasedStateMachine):
    """One job and everything that can befall it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.status = ParallelTrainingJobStatus()
        self.pods: dict[str, Pod] = {}
        self.made: set[str] = set()
        self.down: set[str] = set()
        self.image, self.suspended = "one", False
        self.rejection: Rejection | None = None
        self.waiting_agents: dict[int, WaitingAgent] = {}
        self.reports: dict[int, WorkerReport] = {}
        self.documents: dict[int, MeshDocument] = {}
        self.generation = 0

    # What befalls it.

    @rule(wait=seconds)
    def time_passes(self, wait: float) -> None:
        self.now += timedelta(seconds=wait)

    @rule(worker=workers)
    def a_pod_starts(self, worker: int) -> None:
        for pod in self._of(worker):
            if not pod.gated and not pod.terminal and not pod.deleting:
                self.pods[pod.name] = replace(pod, bound=True, phase="Running", address=f"10.0.0.{worker}")

    @rule()
    def all_goes_well_for_a_while(self) -> None:
        for _ in range(4):
            self.the_operator_decides(99, 99)
            for worker in range(WORKERS):
                self.a_pod_that_goes_is_gone(worker)
                self.a_pod_starts(worker)
            self.agents_say_hello(set(range(WORKERS)))
        self.agents_report(set(range(WORKERS)), AgentState.RUNNING, 0.0)

    @rule(worker=workers, ends=st.sampled_from(["Failed", "Succeeded"]), code=st.sampled_from([0, 1, 143]))
    def a_pod_ends(self, worker: int, ends: str, code: int) -> None:
        for pod in self._of(worker):
            if pod.phase == "Running":
                self.pods[pod.name] = replace(pod, phase=ends, exit_code=code, ended=self.now, disrupted=code == 143)

    @rule(worker=workers, reason=st.sampled_from(["", "PreemptionByScheduler", "EvictionByEvictionAPI"]))
    def somebody_deletes_a_pod(self, worker: int, reason: str) -> None:
        for pod in self._of(worker):
            self.pods[pod.name] = replace(pod, deleting=True, disruption=reason)

    @rule(worker=workers)
    def a_pod_that_goes_is_gone(self, worker: int) -> None:
        for pod in self._of(worker):
            if pod.deleting and pod.node not in self.down:
                self._remove(pod)

    @rule(worker=workers, problem=st.sampled_from(["", "ImagePullBackOff: no", "Unschedulable: no"]))
    def a_pod_has_a_problem(self, worker: int, problem: str) -> None:
        for pod in self._of(worker):
            if pod.phase == "Pending":
                self.pods[pod.name] = replace(pod, problem=problem)

    @rule(number=nodes)
    def a_node_changes(self, number: int) -> None:
        self.down ^= {f"n{number}"}

    @rule(chosen=st.sets(workers))
    def agents_say_hello(self, chosen: set[int]) -> None:
        for pod in self._running(chosen):
            self.waiting_agents[pod.worker] = WaitingAgent(pod.incarnation, pod.address, 20000 + self.generation % 1000)

    @rule(chosen=st.sets(workers), state=st.sampled_from(list(AgentState)), idle=st.sampled_from([0.0, 1000.0]))
    def agents_report(self, chosen: set[int], state: AgentState, idle: float) -> None:
        for pod in self._running(chosen):
            failure = FailureKind.ERROR if state is AgentState.FAILED else None
            ranks = [RankProcess(rank=2 * pod.worker, pid=1, step=3, idle_seconds=idle)]
            self.reports[pod.worker] = WorkerReport(
                worker=pod.worker,
                incarnation=pod.incarnation,
                pod_uid=pod.uid,
                generation=self.generation,
                state=state,
                failure=failure,
                ranks=ranks,
            )

    @rule(image=st.sampled_from(["one", "two"]))
    def the_image_is_edited(self, image: str) -> None:
        self.image = image

    @rule(suspended=st.booleans())
    def it_is_suspended_or_resumed(self, suspended: bool) -> None:
        self.suspended = suspended

    @rule()
    def the_operator_forgets_what_agents_said(self) -> None:
        self.waiting_agents, self.reports, self.rejection = {}, {}, None

    # What the operator does.

    @rule(actions=st.sampled_from([99, 99, 99, 0, 1, 2, 3]), quota=st.sampled_from([99, 99, 0, 2]))
    def the_operator_decides(self, actions: int, quota: int) -> None:
        """Only the first `actions` are carried out after the status is written; pods beyond `quota` are refused."""
        seen = self._observed()
        decision = decide(seen)
        if decision.place is not None:
            self._place(decision)
        update_goodput(decision, format_time(NOW))
        self.status = ParallelTrainingJobStatus.model_validate(decision.status.wire())
        self._announce(seen, decision)
        self.rejection = None
        steps = [("create", worker) for worker in decision.create]
        steps += [("ungate", pod) for pod in decision.ungate] + [("delete", pod) for pod in decision.delete]
        for kind, what in steps[:actions]:
            getattr(self, f"_{kind}")(what, *([quota] if kind == "create" else []))

    def _place(self, decision: Decision) -> None:
        wanted = decision.place
        assert wanted is not None
        objects = [node(f"n{n}", f"r{n // 2}") for n in range(NODES) if f"n{n}" not in self.down]
        try:
            found = place(decision.observed.plan, Inventory.from_objects(objects, []), wanted.assigned_nodes)
        except DoesNotFitError as error:
            apply_grant(decision, NotGranted(str(error), blocked_by_kept_workers=error.blocked_by_kept_workers))
        else:
            apply_grant(decision, Granted(found))

    def _announce(self, seen: Observed, decision: Decision) -> None:
        told = document(seen, decision.mesh)
        assert decision.mesh.generation >= self.generation, "a generation came again"
        if decision.mesh.generation > self.generation:
            self.waiting_agents = {}
        self.generation = decision.mesh.generation
        if told is None:
            return
        assert self.status.mesh is not None
        assert told.generation == self.status.mesh.generation, "announced, but not persisted"
        assert told == self.documents.setdefault(told.generation, told), "one generation, two meshes"
        for member in told.members:
            assert pod_name(JOB, member.worker, member.incarnation) in self.pods

    def _create(self, worker: int, quota: int) -> None:
        assert self.status.placement is not None
        entry = next(e for e in self.status.placement.workers if e.worker == worker)
        if len([pod for pod in self.pods.values() if not pod.terminal]) >= quota:
            self.rejection = Rejection("QuotaExceeded", "exceeded quota")
            return
        assert entry.pod not in self.made, f"{entry.pod} is made a second time"
        for other in self._of(worker):
            assert other.terminal or self._is_lost(other), f"{entry.pod} is made while {other.name} lives"
        self.made.add(entry.pod)
        self.pods[entry.pod] = replace(
            make_pod(worker, entry.incarnation),
            revision=revision_of(self._spec()),
            gates=(GANG_GATE,),
            node=entry.node,
            bound=False,
            phase="Pending",
            address="",
            created=self.now,
        )

    def _ungate(self, pod: Pod) -> None:
        assert self.status.placement is not None
        missing = {entry.pod for entry in self.status.placement.workers} - self.pods.keys()
        assert not missing, f"{pod.name} starts without {missing}"
        if pod.name in self.pods:
            self.pods[pod.name] = replace(self.pods[pod.name], gates=())

    def _delete(self, pod: Pod) -> None:
        current = self.pods.get(pod.name)
        if current is None or current.uid != pod.uid:
            return
        if current.bound and not current.terminal:
            self.pods[pod.name] = replace(current, deleting=True)
        else:
            self._remove(current)

    @invariant()
    def at_most_one_live_pod_per_worker(self) -> None:
        for worker in range(WORKERS):
            live = [pod.name for pod in self._of(worker) if not pod.terminal and not self._was_lost(pod)]
            assert len(live) <= 1, live

    @invariant()
    def all_time_is_booked_once(self) -> None:
        ledger = self.status.goodput
        if ledger is None:
            return
        until = parse_time(ledger.since)
        assert until is not None
        booked = sum(entry.milliseconds for entry in ledger.booked)
        assert booked == unix_milliseconds(until) - unix_milliseconds(NOW), ledger
        assert until <= self.now
        finished = self.status.completion_time is not None
        assert finished == (ledger.cause == ""), (ledger, self.status.conditions)

    # Helpers.

    def _spec(self) -> Any:
        return spec(**self._fields())

    def _fields(self) -> dict[str, Any]:
        return {"suspend": self.suspended, "workers": {"image": self.image, "gpusPerWorker": 2}}

    def _observed(self) -> Observed:
        down = {f"n{n}": f"n{n}" in self.down for n in range(NODES)}
        received = Agents(
            waiting_agents=dict(self.waiting_agents),
            reports={
                w: ReceivedReport(r, 0.1, 30.0 if r.state is AgentState.FAILED else 0.0)
                for w, r in self.reports.items()
            },
            newest_generation=self.generation,
            listening_seconds=1000.0,
        )
        seen = observed(
            list(self.pods.values()), self.status, received=received, down=down, now=self.now, **self._fields()
        )
        return replace(seen, rejection=self.rejection)

    def _of(self, worker: int) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.worker == worker]

    def _running(self, chosen: set[int]) -> list[Pod]:
        return [p for w in chosen for p in self._of(w) if p.phase == "Running" and not p.deleting]

    def _remove(self, pod: Pod) -> None:
        del self.pods[pod.name]
        self.waiting_agents.pop(pod.worker, None)

    def _is_lost(self, pod: Pod) -> bool:
        return pod.deleting and pod.bound and pod.node in self.down

    def _was_lost(self, pod: Pod) -> bool:
        """A pod that was replaced because its node was down stays listed until somebody removes it."""
        newer = any(other.incarnation > pod.incarnation for other in self._of(pod.worker))
        return pod.deleting and pod.bound and newer


TestLife = pytest.mark.chaos(Life.TestCase)
TestLife.settings = settings(
    max_examples=runs(12), stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
