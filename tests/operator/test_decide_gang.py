"""The gang's next step, and what a placement or the lack of one does to the job."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from meshwright.api.status import MeshStatus, ParallelTrainingJobStatus
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.placement import place
from meshwright_operator.decide import gang, gang_actions
from meshwright_operator.decide.agents import Agents, WaitingAgent
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.mesh_generation import document
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.placement_outcome import Granted, NotGranted, apply_grant
from meshwright_operator.kube.pod_info import Pod, read_pod
from tests.operator.builders import NODES, NOW, agents, ago, gated, observed, placement, pod, running_status
from tests.operator.support import node

NEW = ParallelTrainingJobStatus()


def step(seen: Observed, cause: str = "PodLost") -> gang_actions.GangAction:
    return gang.next_action(seen, cause)


def pending(cause: str = "PodLost", seconds: float = 5, **fields: object) -> ParallelTrainingJobStatus:
    mesh = MeshStatus(generation=1, master="10.0.0.0:2000", pending_cause=cause, pending_since=ago(seconds))
    return running_status(mesh=mesh, **fields)


def inventory() -> Inventory:
    return Inventory.from_objects([node(f"n{n}", f"r{n // 2}") for n in range(4)], [])


@pytest.mark.parametrize(
    ("pods", "kind", "words"),
    [
        ([], gang_actions.Place, ""),
        ([pod(0), pod(1, deleting=True), pod(3)], gang_actions.Wait, "1 pod to terminate"),
        ([gated(0), gated(1), gated(2)], gang_actions.Place, ""),
        ([gated(0), gated(1), gated(2), gated(3)], gang_actions.Ungate, ""),
        ([pod(0), gated(1), pod(2), pod(3)], gang_actions.Ungate, ""),
        ([pod(0), pod(1), pod(2, phase="Pending", address=""), pod(3)], gang_actions.Wait, "3 of 4 pods are running"),
        ([pod(0), pod(1), pod(2, address=""), pod(3)], gang_actions.Wait, "3 of 4 pods are running"),
        ([pod(0), pod(1), pod(2), pod(3)], gang_actions.FormGeneration, ""),
        ([pod(0), pod(0, 1), pod(1), pod(2), pod(3)], gang_actions.Delete, ""),
        ([pod(w) for w in range(5)], gang_actions.Delete, ""),
        ([pod(0), pod(1), pod(2, revision="other"), pod(3)], gang_actions.Delete, ""),
    ],
    ids=["nothing", "draining", "partly made", "all gated", "one gated", "starting", "no address", "all there",
         "an older pod lives", "a stray", "another revision"],
)  # fmt: skip
def test_next_step(pods: list[Pod], kind: type, words: str) -> None:
    found = step(observed(pods, pending()))
    assert isinstance(found, kind)
    if isinstance(found, gang_actions.Wait):
        assert words in found.message


def test_workers_that_live_are_kept_where_they_are() -> None:
    found = step(observed([pod(0), pod(2, node="n7"), pod(3)], pending()))
    assert isinstance(found, gang_actions.Place)
    assert [w.index for w in found.workers] == [1]
    assert found.assigned_nodes == {0: "n0", 2: "n7", 3: "n3"}


def test_a_gated_pod_whose_node_is_cordoned_is_given_up() -> None:
    pods = [gated(0), gated(1), gated(2), gated(3)]
    found = step(observed(pods, pending(), refused={"n2": "cordoned"}))
    assert isinstance(found, gang_actions.Delete)
    assert [p.name for p in found.pods] == ["train-w2-0"]
    gone = {name: down for name, down in NODES.items() if name != "n1"}
    found = step(observed(pods, pending(), down=gone))
    assert isinstance(found, gang_actions.Delete)
    assert [p.name for p in found.pods] == ["train-w1-0"]


def test_a_pod_that_runs_stays_when_its_node_is_cordoned() -> None:
    assert isinstance(step(observed(status=pending(), refused={"n2": "cordoned"})), gang_actions.FormGeneration)


def test_an_agent_must_say_hello_as_the_current_incarnation() -> None:
    status = pending(placement=placement({2: 1}))
    pods = [pod(0), pod(1), pod(2, 1), pod(3)]
    found = step(observed(pods, status))
    assert found == gang_actions.Wait("3 of 4 agents are ready")
    waiting_agents = {**agents().waiting_agents, 2: WaitingAgent(1, "10.0.0.2", 2102)}
    assert isinstance(
        step(observed(pods, status, received=Agents(waiting_agents=waiting_agents))), gang_actions.FormGeneration
    )


def test_an_absent_agent_on_a_dead_node_is_given_up() -> None:
    found = step(observed(status=pending(), received=agents(hello=range(3)), down={**NODES, "n3": True}))
    assert isinstance(found, gang_actions.Delete)
    assert [p.name for p in found.pods] == ["train-w3-0"]


@pytest.mark.parametrize(("age", "reason"), [(5, ""), (11, "ImagePullBackOff")])
def test_a_pod_that_cannot_start_is_reported_after_ten_seconds(age: float, reason: str) -> None:
    stuck = pod(
        1, phase="Pending", address="", problem="ImagePullBackOff: no such image", created=NOW - timedelta(seconds=age)
    )
    found = step(observed([pod(0), stuck, pod(2), pod(3)], pending()))
    assert isinstance(found, gang_actions.Wait)
    assert found.reason == reason
    decision = decide(observed([pod(0), stuck, pod(2), pod(3)], pending()))
    ready = next(c for c in decision.status.conditions if c.type == "Ready")
    assert ready.reason == (reason or "Restarting")
    assert ("no such image" in ready.message) == bool(reason)


def test_a_new_job_is_placed_with_first_incarnations() -> None:
    decision = decide(observed([], NEW, received=Agents()))
    assert decision.place is not None
    apply_grant(decision, Granted(place(decision.observed.plan, inventory(), decision.place.assigned_nodes)))
    assert decision.create == [0, 1, 2, 3]
    assert decision.status.placement is not None
    assert [entry.incarnation for entry in decision.status.placement.workers] == [0, 0, 0, 0]
    assert decision.status.start_time == decision.status.active_since == ago(0)
    assert (decision.mesh.generation, decision.mesh.pending_cause) == (0, "Start")
    found = {c.type: c.status for c in decision.status.conditions}
    assert found == {
        "Ready": "False", "Reconciling": "True", "Stalled": "False", "Placed": "True",
        "Complete": "False", "Failed": "False", "Suspended": "False",
    }  # fmt: skip


def test_only_the_lost_worker_gets_a_new_incarnation() -> None:
    decision = decide(observed([pod(0), pod(1), pod(3)], pending()))
    assert decision.place is not None
    apply_grant(decision, Granted(place(decision.observed.plan, inventory(), decision.place.assigned_nodes)))
    assert decision.status.placement is not None
    assert [entry.incarnation for entry in decision.status.placement.workers] == [0, 0, 1, 0]
    assert decision.create == [2]


def test_after_another_spec_no_incarnation_comes_again() -> None:
    status = pending("SpecChanged", placement=placement({0: 2, 3: 5}))
    decision = decide(observed([], status, received=Agents()))
    assert decision.place is not None
    apply_grant(decision, Granted(place(decision.observed.plan, inventory(), decision.place.assigned_nodes)))
    assert decision.status.placement is not None
    assert {entry.incarnation for entry in decision.status.placement.workers} == {6}


def test_no_room_is_told_once_and_holds_nothing() -> None:
    decision = decide(observed([], NEW, received=Agents()))
    apply_grant(decision, NotGranted("short by 2 workers"))
    assert [note.reason for note in decision.events] == ["PlacementFailed"]
    again = decide(observed([], decision.status, received=Agents()))
    apply_grant(again, NotGranted("short by 1 worker"))
    assert again.events == []
    placed_condition = next(c for c in again.status.conditions if c.type == "Placed")
    assert (placed_condition.status, placed_condition.message) == ("False", "short by 1 worker")
    assert again.requeue_after == 120


@pytest.mark.parametrize(
    ("seconds", "blocked_by_kept_workers", "released"), [(5, False, 0), (40, False, 3), (5, True, 3)]
)
def test_survivors_are_held_for_a_while_and_then_let_go(
    seconds: float, blocked_by_kept_workers: bool, released: int
) -> None:
    decision = decide(observed([pod(0), pod(1), pod(3)], pending(seconds=seconds)))
    apply_grant(decision, NotGranted("short by 1 worker", blocked_by_kept_workers=blocked_by_kept_workers))
    assert len(decision.delete) == released


def test_the_generation_follows_the_highest_any_agent_named() -> None:
    received = Agents(waiting_agents=agents().waiting_agents, newest_generation=41)
    assert decide(observed(status=pending(), received=received)).mesh.generation == 42


def test_an_ipv6_address_of_rank_0_is_written_in_brackets_and_read_without() -> None:
    pods = [pod(worker, address=f"fd00::{worker + 1:x}") for worker in range(4)]
    decision = decide(observed(pods, pending()))
    assert decision.mesh.master == "[fd00::1]:2000"
    told = document(decision.observed, decision.mesh)
    assert told is not None
    assert (told.master_address, told.master_port) == ("fd00::1", 2000)
    assert [member.address for member in told.members] == ["fd00::1", "fd00::2", "fd00::3", "fd00::4"]


def test_forming_a_generation_persists_master_and_cause() -> None:
    decision = decide(observed(status=pending()))
    assert decision.mesh.model_dump() == {
        "generation": 2, "master": "10.0.0.0:2000", "started_time": ago(0), "cause": "PodLost",
        "pending_cause": "", "pending_since": None, "attempts": 0, "retry_time": None, "failures": 0,
            "succeeded_workers": "", "completed_time": None, "agent_replacements": 0,
            "in_memory": None, "node_check": None, "copies": None, "recovery": None, "replica_groups": None,
    }  # fmt: skip
    told = document(decision.observed, decision.mesh)
    assert told is not None
    assert (told.generation, told.world_size, told.master_address, told.master_port) == (2, 8, "10.0.0.0", 2000)
    assert [(m.worker, m.first_rank, m.ranks) for m in told.members] == [(0, 0, 2), (1, 2, 2), (2, 4, 2), (3, 6, 2)]
    assert (told.run.tensor, told.run.pipeline, told.run.data_parallel, told.run.micro_batches) == (2, 2, 2, 2)


def test_no_document_while_a_generation_is_being_formed() -> None:
    seen = observed(status=pending())
    assert document(seen, seen.mesh) is None


@pytest.mark.parametrize(
    ("ran", "listening", "waited", "gives_up"),
    [(200, 900, 900, True), (5, 900, 900, False), (200, 20, 900, False), (200, 900, 20, False)],
    ids=["long enough", "its image took long", "the operator just started", "the ranks were stopped just now"],
)
def test_an_absent_agent_is_given_the_time_in_which_it_could_have_come(
    ran: float, listening: float, waited: float, gives_up: bool
) -> None:
    long_ago = NOW - timedelta(seconds=1000)
    late = pod(3, created=long_ago, started=NOW - timedelta(seconds=ran))
    received = replace(agents(hello=range(3)), listening_seconds=listening)
    found = step(observed([pod(0), pod(1), pod(2), late], pending(seconds=waited), received=received))
    assert isinstance(found, gang_actions.Delete if gives_up else gang_actions.Wait)
    if isinstance(found, gang_actions.Delete):
        assert [p.name for p in found.pods] == ["train-w3-0"]


def test_a_worker_that_started_late_is_read_from_its_container() -> None:
    name, when = (
        {"name": "train-w0-0", "uid": "u", "labels": {"meshwright.dev/job-name": "train"}},
        "2026-01-02T03:04:05Z",
    )
    container = {"name": "worker", "state": {"running": {"startedAt": when}}}
    found = read_pod({"metadata": name, "status": {"phase": "Running", "containerStatuses": [container]}})
    assert found is not None
    assert found.started == NOW
