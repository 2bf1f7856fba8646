"""A job's conditions tell the truth to kstatus at every stage of every history.

Histories are drawn: pods start, end and vanish, ranks fail, the owner suspends and edits, room comes and goes. After
each decision the state that kstatus reads is compared with the truth, worked out here from what the world holds.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from meshwright.api import conditions as names
from meshwright.api.conditions import find, is_true
from meshwright.api.labels import GANG_GATE
from meshwright.api.parsing import parse_status
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.placement import place
from meshwright.planner.plan import make_plan
from meshwright.protocol.messages import AgentState, FailureKind, Progress, WorkerReport
from meshwright_operator.decide.agents import Agents, ReceivedReport, WaitingAgent
from meshwright_operator.decide.applied_spec import revision_of
from meshwright_operator.decide.conditions import BlockedEdit
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.failure_detection import JOB_FAILURES
from meshwright_operator.decide.observed import Observed, has_started, observe_workers
from meshwright_operator.decide.placement_outcome import Granted, NotGranted, apply_grant
from meshwright_operator.decide.rejected_job import rejected, unplannable
from meshwright_operator.kube.pod_info import Pod
from tests.operator.builders import NODES, NOW, pod, spec
from tests.operator.kstatus import CURRENT, FAILED, IN_PROGRESS, kstatus
from tests.operator.support import node
from tests.randomness import runs

WORKERS = st.integers(0, 3)
INVENTORY = Inventory.from_objects([node(name, "r0") for name in NODES], [])


class History(RuleBasedStateMachine):
    """One job in a world of pods and agents, and what its status says."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.generation = 1
        self.fields: dict[str, Any] = {}
        self.blocked_edit: BlockedEdit | None = None
        self.room = True
        self.status: dict[str, Any] = {"observedGeneration": -1}
        self.pods: dict[str, Pod] = {}
        self.failed: dict[int, FailureKind] = {}
        self.received = True
        self.halted_seconds = 20.0
        self.trained = False
        """Whether all ranks trained according to the last reports of the agents."""
        self.truth = IN_PROGRESS

    # --- what the owner does

    @rule(suspend=st.booleans())
    def suspends(self, suspend: bool) -> None:
        self._edit(suspend=suspend)

    @rule(image=st.sampled_from(["a", "b"]))
    def edits_the_image(self, image: str) -> None:
        if self.blocked_edit is None:
            self._edit(workers={"image": image, "gpusPerWorker": 2})

    @rule(limit=st.integers(0, 3))
    def edits_the_budget(self, limit: int) -> None:
        self._edit(recovery={"maxRestarts": limit})

    @rule(retryable=st.booleans())
    def edits_into_what_cannot_be(self, retryable: bool) -> None:
        if has_started(self._parsed()):
            self.blocked_edit = BlockedEdit("EditDoesNotFit" if retryable else "InvalidSpec", "it cannot be", retryable)
            self._edit()

    @rule()
    def puts_the_edit_right(self) -> None:
        if self.blocked_edit is not None:
            self.blocked_edit = None
            self._edit()

    @rule(seconds=st.sampled_from([300, 100_000]))
    def sets_a_deadline(self, seconds: int) -> None:
        self._edit(activeDeadlineSeconds=seconds)

    # --- what the cluster does

    @rule()
    def all_goes_well_for_a_while(self) -> None:
        self.room = self.received = True
        for _ in range(8):
            self.time_passes(1)
            self.pods_go_on()
            self._reconcile()
            self.kstatus_reads_the_truth()

    @rule(seconds=st.sampled_from([1, 20, 90, 400]))
    def time_passes(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(room=st.booleans())
    def room_comes_and_goes(self, room: bool) -> None:
        self.room = room

    @rule()
    def pods_go_on(self) -> None:
        self.pods = {name: self._grown(p) for name, p in self.pods.items() if not p.deleting}
        self.failed.clear()

    @rule(worker=WORKERS)
    def a_pod_vanishes(self, worker: int) -> None:
        self.pods = {name: p for name, p in self.pods.items() if p.worker != worker}

    @rule(worker=WORKERS, code=st.sampled_from([1, 137]))
    def a_pod_crashes(self, worker: int, code: int) -> None:
        for name, p in self.pods.items():
            if p.worker == worker and p.phase == "Running":
                self.pods[name] = replace(p, phase="Failed", exit_code=code, ended=self.now)

    @rule(worker=WORKERS, kind=st.sampled_from(FailureKind))
    def ranks_fail(self, worker: int, kind: FailureKind) -> None:
        self.failed[worker] = kind

    @rule()
    def the_run_ends_well(self) -> None:
        mesh = self._parsed().mesh
        if mesh is not None and mesh.generation and not mesh.pending_cause:
            for name, p in self.pods.items():
                if p.phase == "Running":
                    self.pods[name] = replace(p, phase="Succeeded", exit_code=0, ended=self.now)

    @rule(received=st.booleans())
    def the_operator_restarts(self, received: bool) -> None:
        self.received = received

    @rule(retryable=st.booleans())
    def cannot_be_understood_before_it_started(self, retryable: bool) -> None:
        status = self._parsed()
        if has_started(status) or is_true(status.conditions, names.FAILED):
            return
        suspended = bool(self.fields.get("suspend"))
        if retryable:
            status = unplannable(status, self.generation, self.now, "no node", suspended=suspended)
            self.truth = CURRENT if suspended else IN_PROGRESS
        else:
            status = rejected(status, self.generation, self.now, "InvalidSpec", "spec.x: must be y")
            self.truth = FAILED
        self.status = status.wire()

    # --- what the operator does

    @initialize()
    def is_seen(self) -> None:
        assert kstatus(self._object()) == IN_PROGRESS, "before it is seen, nobody may take it for settled"

    @rule()
    def reconciles(self) -> None:
        self._reconcile()

    def _reconcile(self) -> None:
        observed = self._observed()
        decision = decide(observed)
        if decision.place is not None and self.room:
            apply_grant(decision, Granted(place(observed.plan, INVENTORY, decision.place.assigned_nodes)))
        elif decision.place is not None:
            apply_grant(decision, NotGranted("short by 4 workers"))
        self.status = decision.status.wire()
        self.truth = self._truth(observed, decision.status)
        entries = {
            entry.worker: entry for entry in (decision.status.placement.workers if decision.status.placement else [])
        }
        for worker in decision.create:
            made = pod(worker, entries[worker].incarnation, node=entries[worker].node, created=self.now)
            made = replace(made, gates=(GANG_GATE,), bound=False, phase="Pending", address="")
            self.pods[made.name] = replace(made, revision=observed.revision)
        for p in decision.ungate:
            self.pods[p.name] = replace(self.pods[p.name], gates=())
        for p in decision.delete:
            self.pods[p.name] = replace(self.pods[p.name], deleting=True)

    def _observed(self) -> Observed:
        status = self._parsed()
        wanted = spec(**self.fields)
        revision = revision_of(wanted)
        kept = status.plan if status.plan is not None and status.plan.revision == revision else None
        plan = make_plan(wanted, INVENTORY, kept)
        workers, excess_pods = observe_workers(range(len(plan.workers)), status, list(self.pods.values()), NODES, {})
        return Observed(
            now=self.now,
            name="train",
            uid="job-uid",
            generation=self.generation,
            spec=wanted,
            revision=revision,
            status=status,
            plan=plan,
            workers=workers,
            excess_pods=excess_pods,
            agents=self._agents(status),
            blocked_edit=self.blocked_edit,
        )

    def _agents(self, status: ParallelTrainingJobStatus) -> Agents:
        mesh = status.mesh
        generation = mesh.generation if mesh is not None else 0
        running = [p for p in self.pods.values() if p.phase == "Running"]
        waiting_agents = {p.worker: WaitingAgent(p.incarnation, p.address, 2000 + p.worker) for p in running}
        reports = (
            {p.worker: ReceivedReport(self._report(p, generation), 0.1, self.halted_seconds) for p in running}
            if self.received
            else {}
        )
        return Agents(waiting_agents=waiting_agents, reports=reports, newest_generation=generation)

    def _report(self, p: Pod, generation: int) -> WorkerReport:
        failure = self.failed.get(p.worker)
        state = AgentState.RUNNING if failure is None else AgentState.FAILED
        identity = {"worker": p.worker, "incarnation": p.incarnation, "pod_uid": p.uid, "generation": generation}
        progress = Progress(step=7, loss=2.5, step_seconds=0.5, tokens_per_second=1e4) if p.worker == 0 else None
        return WorkerReport(**identity, state=state, failure=failure, progress=progress)

    def _grown(self, p: Pod) -> Pod:
        if p.phase != "Pending" or p.gates:
            return p
        return replace(p, bound=True, phase="Running", address=f"10.0.0.{p.worker}")

    def _truth(self, observed: Observed, after: ParallelTrainingJobStatus) -> str:
        """What a person who sees the world would say."""
        self.trained = self._trains(observed, after)
        if is_true(after.conditions, names.COMPLETE):
            return CURRENT
        if is_true(after.conditions, names.FAILED):
            return FAILED
        if self.blocked_edit is not None:
            return IN_PROGRESS if self.blocked_edit.retryable else FAILED
        if observed.spec.suspend:
            return IN_PROGRESS if observed.live_pods else CURRENT
        placed = find(after.conditions, names.PLACED)
        if placed is not None and placed.reason in JOB_FAILURES.values():
            return FAILED  # another start would fail in the same way: its user has to correct something
        return CURRENT if self.trained else IN_PROGRESS

    def _trains(self, observed: Observed, after: ParallelTrainingJobStatus) -> bool:
        mesh = after.mesh
        if mesh is None or mesh.generation != observed.mesh.generation or mesh.pending_cause:
            return False
        runs = all(
            w.pod is not None
            and w.pod.phase in ("Running", "Succeeded")
            and not w.pod.deleting
            and (w.pod.phase == "Succeeded" or w.index not in self.failed)
            for w in observed.workers
        )
        # Agents that were not heard yet since the operator began: what was true before is not taken back.
        return mesh.generation > 0 and runs and (self.received or self.trained)

    def _edit(self, **fields: Any) -> None:
        self.fields |= fields
        self.generation += 1
        self.truth = IN_PROGRESS

    def _parsed(self) -> ParallelTrainingJobStatus:
        return parse_status({"status": self.status})

    def _object(self) -> dict[str, Any]:
        return {"metadata": {"generation": self.generation}, "status": self.status}

    # --- what must hold whatever happened

    @invariant()
    def kstatus_reads_the_truth(self) -> None:
        assert kstatus(self._object()) == self.truth, self.status

    @invariant()
    def conditions_are_whole(self) -> None:
        conditions = self.status.get("conditions")
        if conditions is None:
            return
        values = {c["type"]: c["status"] for c in conditions}
        assert tuple(values)[: len(names.ALL)] == names.ALL
        assert not (values["Reconciling"] == values["Stalled"] == "True")
        assert (values["Ready"], values["Reconciling"], values["Stalled"]).count("True") == 1
        assert not (values["Complete"] == values["Failed"] == "True")
        if values["Ready"] == "True":
            assert values["Complete"] == "True" or values["Suspended"] == "True" or values["Placed"] == "True"
        for condition in conditions:
            assert condition["reason"]
            assert condition["observedGeneration"] == self.status["observedGeneration"]

    @invariant()
    def nothing_is_told_of_what_does_not_run(self) -> None:
        ready = next((c["reason"] for c in self.status.get("conditions", []) if c["type"] == "Ready"), "")
        if ready in ("Completed", "Suspended", "Suspending", "Placing", "DeadlineExceeded", "RestartLimitReached"):
            assert self.status["readyRanks"] in ("", "0/8")
            assert not {"tokensPerSecond", "etaSeconds"} & set(self.status)

    @invariant()
    def the_status_is_one_the_api_server_takes(self) -> None:
        ParallelTrainingJobStatus.model_validate(self.status)


@pytest.mark.parametrize("edit", ["sets_a_deadline", "edits_into_what_cannot_be"])
def test_an_edit_seen_by_an_operator_that_has_not_heard_the_agents_yet(edit: str) -> None:
    life = History()
    life.all_goes_well_for_a_while()
    life.sets_a_deadline(300) if edit == "sets_a_deadline" else life.edits_into_what_cannot_be(False)
    life.the_operator_restarts(received=False)
    life.reconciles()
    life.kstatus_reads_the_truth()
    life.conditions_are_whole()
    assert life.status["readyRanks"] == "8/8"


@pytest.mark.parametrize("blocked_edit", [False, True])
def test_an_edit_seen_while_a_failure_waits_to_be_judged(blocked_edit: bool) -> None:
    life = History()
    life.all_goes_well_for_a_while()
    life.ranks_fail(1, FailureKind.ERROR)
    life.halted_seconds = 0.5
    life.edits_into_what_cannot_be(False) if blocked_edit else life.sets_a_deadline(300)
    life.reconciles()
    life.conditions_are_whole()
    assert kstatus(life._object()) == (FAILED if blocked_edit else CURRENT)


TestHistory = pytest.mark.chaos(History.TestCase)
TestHistory.settings = settings(max_examples=runs(10), stateful_step_count=40, deadline=None)
