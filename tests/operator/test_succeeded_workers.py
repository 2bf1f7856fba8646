"""A worker that has succeeded in a generation stays succeeded, also after its pod object is gone."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest

from meshwright.api.conditions import find
from meshwright.api.status import MeshStatus
from meshwright.protocol.messages import AgentState
from meshwright_operator.decide.applied_spec import revision_of
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.failure_detection import detect
from meshwright_operator.decide.lifecycle import EXIT_SECONDS, finished
from meshwright_operator.decide.observed import PodState
from meshwright_operator.decide.succeeded_workers import MAX_TEXT, format_workers, parse_workers
from tests.operator.builders import (
    NODES,
    NOW,
    agents,
    ago,
    crashed,
    observed,
    plan_status,
    pod,
    report,
    running_status,
    spec,
)
from tests.operator.support import JOBS, PODS
from tests.operator.test_gang_races import command, small
from tests.operator.world import World


def suspend(world: World, name: str, value: bool) -> None:
    obj = copy.deepcopy(world.cluster.objects[f"{JOBS}/{name}"])
    obj["spec"]["suspend"] = value
    world.cluster.update(f"{JOBS}/{name}", obj)


def mesh(**fields: Any) -> MeshStatus:
    return MeshStatus(generation=1, master="10.0.0.0:2000", cause="Start", started_time=ago(60), **fields)


@pytest.mark.parametrize(
    ("workers", "text"),
    [(set(), ""), ({3}, "3"), ({0, 1, 2, 5, 7, 8}, "0-2,5,7-8"), (set(range(12500)), "0-12499")],
)
def test_workers_are_stored_as_ranges(workers: set[int], text: str) -> None:
    assert format_workers(workers) == text
    assert parse_workers(text) == workers


def test_a_text_that_is_too_long_is_cut_between_ranges() -> None:
    text = format_workers(set(range(0, 65536, 2)))
    assert len(text) <= MAX_TEXT
    assert parse_workers(text) <= set(range(0, 65536, 2))


@pytest.mark.parametrize("text", ["x", "3-1", "1-", "-4", "1,,2", "0-99999999999", "٣"])
def test_a_damaged_text_names_nobody_else(text: str) -> None:
    assert parse_workers(text) <= {1, 2}


def test_a_worker_that_succeeded_is_persisted() -> None:
    decision = decide(observed([pod(0), pod(1, phase="Succeeded"), pod(2), pod(3)]))
    assert decision.mesh.succeeded_workers == "1"
    again = decide(observed([pod(0), pod(2), pod(3)], decision.status))
    assert (again.mesh.generation, again.mesh.pending_cause) == (1, "")
    assert again.mesh.succeeded_workers == "1"


def test_a_report_that_the_run_is_complete_is_persisted_before_the_pod_is_gone() -> None:
    reports = [report(w, AgentState.COMPLETE if w == 1 else AgentState.RUNNING) for w in range(4)]
    decision = decide(observed(received=agents(reports)))
    assert decision.mesh.succeeded_workers == "1"
    seen = observed([pod(0), pod(2), pod(3)], decision.status, received=agents([]))
    assert seen.workers[1].state is PodState.SUCCEEDED
    assert detect(seen) is None


@pytest.mark.parametrize(
    "last", [None, pod(1, deleting=True), pod(1, phase="Failed", disrupted=True)], ids=["gone", "deleting", "evicted"]
)
def test_a_worker_whose_run_is_complete_is_not_lost_with_its_pod(last: Any) -> None:
    status = running_status(mesh=mesh(succeeded_workers="1"))
    pods = [pod(0), pod(2), pod(3), *([last] if last is not None else [])]
    assert detect(observed(pods, status)) is None
    assert detect(observed(pods, status, down={**NODES, "n1": True})) is None


def test_a_report_of_another_generation_or_incarnation_counts_for_nothing() -> None:
    old = [report(1, AgentState.COMPLETE, generation=0), report(2, AgentState.COMPLETE, incarnation=3)]
    assert decide(observed(received=agents(old))).mesh.succeeded_workers == ""


def test_the_next_generation_begins_with_nobody() -> None:
    fields: dict[str, Any] = {"model": None, "data": None, "training": None, "runtime": {"command": ["x"]}}
    fields |= {"parallelism": {"tensor": 2, "pipeline": 2}}
    revision = revision_of(spec(**fields))
    status = running_status(mesh=mesh(succeeded_workers="1"), plan=plan_status(revision=revision))
    left = [pod(0, revision=revision), pod(3, revision=revision)]
    lost = decide(observed([*left, pod(2, revision=revision, deleting=True)], status, **fields))
    assert lost.mesh.pending_cause == "PodLost"
    seen = observed([*left, pod(2, revision=revision)], lost.status, **fields)
    assert seen.workers[1].state is PodState.MISSING, "it must run again, with all others"
    assert decide(seen).place is not None


def test_an_edit_that_restarts_forgets_who_succeeded() -> None:
    status = running_status(mesh=mesh(succeeded_workers="0-3"))
    decision = decide(observed([], status, workers={"image": "other", "gpusPerWorker": 2}))
    assert decision.mesh.pending_cause == "SpecChanged"
    assert not any(c.type == "Complete" and c.status == "True" for c in decision.status.conditions)


def test_ranks_of_the_runtime_end_together() -> None:
    """The last step is collective: if one worker has succeeded, no rank has a step left."""
    ended = [pod(0, phase="Succeeded"), pod(1, phase="Succeeded"), pod(3, phase="Succeeded")]
    decision = decide(observed(ended, received=agents([])))
    assert any(c.type == "Complete" and c.status == "True" for c in decision.status.conditions)
    alive = [pod(0, phase="Succeeded"), pod(1), pod(3, phase="Succeeded")]
    waits = decide(observed(alive, received=agents([])))
    assert (waits.mesh.pending_cause, finished(waits.status)) == ("", False)
    assert decide(observed([], received=agents([]))).mesh.pending_cause == "PodLost"


@pytest.mark.parametrize("body", [small("done", 3), command("done", 3)], ids=["runtime", "command"])
async def test_a_succeeded_pod_may_vanish_while_others_run(body: dict[str, Any]) -> None:
    world = World(1, nodes=3, work=500.0)
    world.submit(body)
    await world.run(20)
    assert world.true("done", "Ready")
    world.agents["done-w1-0"].trained = 500.0
    await world.run(5)
    assert {p.name: p.phase for p in world.pods()}["done-w1-0"] == "Succeeded"
    world.crash("done-w1-0")
    await world.run(60)
    assert world.status("done")["mesh"]["generation"] == 1
    assert len(world.pods()) == 2
    await world.run(500)
    assert world.true("done", "Complete")
    assert world.status("done").get("restartCount", 0) == 0
    assert len(world.started) == 3, "each worker trained once"


@pytest.mark.parametrize("seen", [True, False], ids=["the operator saw it", "the operator was away"])
async def test_a_finished_run_is_not_trained_again(seen: bool) -> None:
    """All pods succeed, and one object is removed before the next operator starts."""
    world = World(2, nodes=3, work=40.0)
    world.submit(small("done", 3))
    await world.run(20)
    if seen:
        world.agents["done-w1-0"].trained = 40.0
        await world.run(3)
    world.cluster.watchers.clear()
    world.operators.clear()
    await world.run(60)
    assert [p.phase for p in world.pods()] == ["Succeeded"] * 3
    world.crash("done-w1-0")
    world.operators.append(world.operator())
    await world.run(60)
    assert world.true("done", "Complete")
    assert world.status("done")["mesh"]["generation"] == 1
    assert len(world.started) == 3


@pytest.mark.parametrize("body", [small("done", 2), command("done", 2)], ids=["runtime", "command"])
async def test_a_finished_run_that_is_suspended_before_anybody_saw_it_is_complete(body: dict[str, Any]) -> None:
    world = World(2, nodes=3, work=10.0)
    world.submit(body)
    await world.run(8)
    world.cluster.watchers.clear()
    world.operators.clear()
    await world.run(30)
    assert [p.phase for p in world.pods()] == ["Succeeded"] * 2
    suspend(world, "done", True)
    world.operators.append(world.operator())
    await world.run(10)
    for ended in world.pods():
        world.crash(ended.name)
    suspend(world, "done", False)
    await world.run(60)
    assert world.true("done", "Complete")
    assert len(world.started) == 2, "each worker trained once"


async def test_a_command_that_exits_with_0_when_it_is_suspended_is_not_complete() -> None:
    world = World(2, nodes=3, work=1e6)
    world.submit(command("paused", 2))
    await world.run(20)
    suspend(world, "paused", True)
    await world.run(1)
    for obj in list(world.cluster.of("pods")):
        world.cluster.update(f"{PODS}/{obj['metadata']['name']}", {**obj, "status": {"phase": "Succeeded"}})
    await world.run(10)
    assert not world.true("paused", "Complete")
    assert world.true("paused", "Suspended")


async def test_a_command_that_a_persisted_success_completes() -> None:
    world = World(3, nodes=2, work=60.0)
    world.submit(command("done", 2))
    await world.run(20)
    world.agents["done-w1-0"].trained = 60.0
    await world.run(5)
    world.cluster.watchers.clear()
    world.operators.clear()
    await world.run(60)
    world.crash("done-w1-0")
    world.operators.append(world.operator())
    await world.run(60)
    assert world.true("done", "Complete")
    assert len(world.started) == 2


async def test_the_first_worker_decides_also_after_its_pod_is_gone() -> None:
    world = World(4, nodes=2, work=500.0)
    world.submit(command("first", 2, successPolicy="FirstWorker"))
    await world.run(20)
    world.agents["first-w0-0"].trained = 500.0
    world.operators[0].blind = True
    await world.run(3)
    world.crash("first-w0-0")
    world.operators[0].blind = False
    world.operators[0].relist()
    await world.run(10)
    assert world.true("first", "Complete")
    assert world.status("first")["mesh"]["generation"] == 1


def all_complete() -> Any:
    return agents([report(worker, AgentState.COMPLETE) for worker in range(4)])


def test_pods_that_do_not_exit_after_their_run_do_not_keep_the_job() -> None:
    """A sidecar runs on, or the agent hangs at its exit."""
    first = decide(observed(received=all_complete()))
    assert not finished(first.status)
    assert (first.mesh.succeeded_workers, first.mesh.completed_time) == ("0-3", ago(0))
    assert first.requeue_after is not None
    assert first.requeue_after <= EXIT_SECONDS
    early = decide(observed(status=first.status, received=agents([]), now=NOW + timedelta(seconds=EXIT_SECONDS - 1)))
    assert not finished(early.status)
    assert not early.delete
    late = decide(observed(status=early.status, received=agents([]), now=NOW + timedelta(seconds=EXIT_SECONDS)))
    complete = find(late.status.conditions, "Complete")
    assert complete is not None
    assert complete.status == "True"
    assert "did not exit within 120 s" in complete.message
    assert {pod.name for pod in late.delete} == {f"train-w{worker}-0" for worker in range(4)}
    assert [(event.reason, event.type) for event in late.events] == [
        ("PodsDoNotExit", "Warning"),
        ("Completed", "Normal"),
    ]


def test_a_clock_that_was_set_back_does_not_keep_a_complete_run() -> None:
    ahead = decide(observed(received=all_complete(), now=NOW + timedelta(hours=1)))
    again = decide(observed(status=ahead.status, received=agents([])))
    assert again.mesh.completed_time == ago(0)
    assert again.requeue_after is not None
    assert again.requeue_after <= EXIT_SECONDS
    assert finished(decide(observed(status=again.status, now=NOW + timedelta(seconds=EXIT_SECONDS))).status)


def test_the_exit_is_not_waited_for_while_a_worker_has_ranks_left_or_failed() -> None:
    reports = [report(w, AgentState.COMPLETE if w else AgentState.RUNNING) for w in range(4)]
    later = NOW + timedelta(hours=1)
    assert decide(observed(received=agents(reports), now=later)).mesh.completed_time is None
    pods = [pod(0), pod(1), pod(2), crashed(3)]
    failed = decide(observed(pods, received=all_complete()))
    assert failed.mesh.pending_cause == "PodFailed"
    assert failed.mesh.completed_time is None


async def test_a_pod_that_never_exits_is_deleted_and_its_job_is_complete() -> None:
    world = World(5, nodes=3, work=40.0)
    world.keeps_running.add("done-w1-0")
    world.submit(small("done", 3))
    await world.run(100)
    assert not world.true("done", "Complete")
    await world.run(150)
    assert world.true("done", "Complete")
    assert world.operators[0].notes.reasons("done")[-2:] == ["PodsDoNotExit", "Completed"]
    assert "done-w1-0" not in {pod.name for pod in world.pods()}
    assert len(world.started) == 3, "each worker trained once"
