"""One task places jobs in the order of the queue: who is first, who is tried again and when, and who leaves it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from meshwright_operator.decide.placement_outcome import WAITING_RETRY_SECONDS, Granted, NotGranted
from meshwright_operator.scheduling.placer import LATER, Placer
from tests.operator.queueing import Attempts, Tenants
from tests.operator.support import node
from tests.operator.test_gang_races import small
from tests.operator.world import JOBS, PODS, World


async def test_a_gang_that_lost_a_pod_is_looked_at_before_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = Tenants(4)
    await tenants.start("gang", 3)
    await tenants.start("other", 1)
    for number in range(20):
        await tenants.ask(tenants.request(f"waits{number}", 1))
    await tenants.freed()
    gang = tenants.request("gang", 3)
    kept = {one.worker: one.node for one in tenants.cache.pods(gang.key, gang.uid) if one.worker}
    attempts = Attempts(monkeypatch)
    tenants.end("gang", worker=0)
    new = [asyncio.create_task(tenants.ask(tenants.request(f"new{number}", 1))) for number in range(10)]
    await asyncio.sleep(0)
    answer = await tenants.ask(replace(gang, assigned_nodes=kept))
    assert isinstance(answer, Granted)
    assert attempts.jobs.index("default/gang") <= 1, "it waits for the attempt that runs, at most"
    await asyncio.gather(*new)


async def test_many_reconciles_do_not_wait_at_once_and_each_gets_its_answer() -> None:
    tenants = Tenants(1)
    await tenants.start("runs", 1)
    requests = [tenants.request(f"job{number}", 1) for number in range(12)]
    answers = await asyncio.gather(*(tenants.ask(request) for request in requests))
    assert answers.count(LATER) == 9
    assert set(await tenants.freed()) >= {
        str(r.key) for r, answer in zip(requests, answers, strict=True) if answer is LATER
    }
    for request in requests:
        assert isinstance(await tenants.ask(request), NotGranted)


async def test_a_reconcile_does_not_wait_while_jobs_ahead_ask_again_and_again() -> None:
    tenants = Tenants(1)
    await tenants.start("runs", 1)
    requests = [tenants.request(f"ahead{number}", 1) for number in range(12)]
    late_request = tenants.request("late", 1)
    late = asyncio.create_task(tenants.ask(late_request))
    ahead = [asyncio.create_task(tenants.ask(request)) for request in requests[:2]]
    for request in requests[2:]:
        await ahead.pop(0)
        ahead.append(asyncio.create_task(tenants.ask(request)))
        await asyncio.sleep(0)
    assert late.done()
    assert await late is LATER
    await asyncio.gather(*ahead)
    assert "default/late" in await tenants.freed()
    assert isinstance(await tenants.ask(late_request), NotGranted)


async def test_waiting_jobs_are_tried_again_only_when_capacity_became_free(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = Tenants(3)
    await tenants.start("first", 1)
    await tenants.start("second", 2)
    for number in range(5):
        await tenants.ask(tenants.request(f"waits{number}", 2))
    await tenants.freed()
    attempts = Attempts(monkeypatch)
    for number in range(5):
        await tenants.ask(tenants.request(f"waits{number}", 2))
    assert attempts.jobs == [], "nothing has changed since"
    tenants.end("second")
    assert await tenants.freed() == ["default/waits0"], "only the one that fits"
    assert attempts.jobs == ["default/waits0", "default/waits1"], "the others request the same as the second one"
    tenants.cache.put_node(node("n9", "r0"))
    tenants.cache.put_node(node("n8", "r0"))
    assert await tenants.freed() == ["default/waits0", "default/waits1"]


async def test_priorities_hold_however_long_ago_a_job_was_looked_at() -> None:
    tenants = Tenants(2)
    await tenants.start("runs", 2)
    assert isinstance(await tenants.ask(tenants.request("urgent", 2, priority=1000)), NotGranted)
    tenants.end("runs")
    behind = tenants.request("behind", 2)
    later = replace(behind, requested_at=behind.requested_at + timedelta(seconds=61), since=behind.requested_at)
    answer = await tenants.ask(later)
    assert isinstance(answer, NotGranted)
    assert answer.waits_for_turn
    assert "default/urgent is ahead" in answer.message
    assert "default/urgent" in await tenants.freed()
    assert isinstance(await tenants.ask(tenants.request("urgent", 2)), Granted)


@pytest.mark.parametrize("how", ["deleted", "suspended", "withdrawn"])
async def test_a_job_leaves_the_queue_when_it_needs_no_nodes(how: str) -> None:
    tenants = Tenants(2)
    await tenants.start("runs", 2)
    urgent = tenants.request("urgent", 2, priority=5)
    await tenants.ask(urgent)
    await tenants.ask(tenants.request("next", 2))
    if how == "deleted":
        del tenants.cache.jobs[urgent.key]
    elif how == "suspended":
        tenants.cache.jobs[urgent.key]["spec"]["suspend"] = True
    else:
        tenants.scheduler.withdraw(urgent.uid)
    tenants.end("runs")
    assert await tenants.freed() == ["default/next"]
    assert isinstance(await tenants.ask(tenants.request("next", 2)), Granted)


@pytest.mark.parametrize("how", ["deleted", "withdrawn", "placed"])
async def test_an_edit_that_waits_for_its_turn_is_tried_when_the_job_ahead_leaves_the_queue(how: str) -> None:
    """The job ahead claims no nodes: it would only fit if the one with the edit stopped."""
    tenants = Tenants(4)
    await tenants.start("runs", 2)
    urgent = tenants.request("urgent", 3, priority=5)
    assert isinstance(await tenants.ask(urgent), NotGranted)
    edit = replace(tenants.request("runs", 2), restarts=True)
    answer = await tenants.scheduler.try_edit(edit)
    assert isinstance(answer, NotGranted)
    assert answer.waits_for_turn
    await tenants.freed()
    if how == "deleted":
        del tenants.cache.jobs[urgent.key]
        tenants.scheduler.forget(urgent.uid)
    elif how == "withdrawn":
        tenants.scheduler.withdraw(urgent.uid)
    else:
        assert isinstance(await tenants.ask(replace(urgent, plan=tenants.request("small", 2).plan)), Granted)
    assert "default/runs" in await tenants.freed()
    assert not isinstance(await tenants.scheduler.try_edit(edit), NotGranted)


async def test_what_a_cancelled_request_would_have_got_stays_free() -> None:
    tenants = Tenants(2)
    task = asyncio.create_task(tenants.ask(tenants.request("gone", 2)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    tenants.scheduler.withdraw("uid-default/gone")
    assert isinstance(await tenants.ask(tenants.request("next", 2)), Granted)


async def test_what_pods_request_is_counted_once_and_forgotten_with_them() -> None:
    tenants = Tenants(3)
    for turn in range(6):
        await tenants.start(f"job{turn}", 3)
        assert isinstance(await tenants.ask(tenants.request(f"blocked{turn}", 1), runs=False), NotGranted)
        tenants.scheduler.withdraw(f"uid-default/blocked{turn}")
        tenants.end(f"job{turn}")


async def test_a_lost_node_and_a_new_one_change_what_is_free() -> None:
    tenants = Tenants(2)
    tenants.cache.remove_node("n1")
    assert isinstance(await tenants.ask(tenants.request("job", 2)), NotGranted)
    cordoned = node("n1", "r0")
    cordoned["spec"] = {"unschedulable": True}
    tenants.cache.put_node(cordoned)
    assert await tenants.freed() == []
    tenants.cache.put_node(node("n1", "r0"))
    assert await tenants.freed() == ["default/job"]
    assert isinstance(await tenants.ask(tenants.request("job", 2)), Granted)


async def test_an_edit_that_waits_is_applied_when_nodes_come_not_after_a_while() -> None:
    world = World(5, nodes=2, work=10**6)
    world.submit(small("grows", 2))
    await world.run(30)
    edited: dict[str, Any] = dict(world.cluster.objects[f"{JOBS}/grows"])
    edited["spec"] = {**edited["spec"], "replicas": 3}
    edited["metadata"] = {**edited["metadata"], "generation": 2}
    world.cluster.update(f"{JOBS}/grows", edited)
    await world.run(3)
    assert world.condition("grows", "Ready")["reason"] == "EditDoesNotFit"
    world.nodes["n2"] = node("n2", "r0")
    for operator in world.operators:
        operator.cache.put_node(world.nodes["n2"])
    await world.run(1)
    assert world.condition("grows", "Ready")["reason"] != "EditDoesNotFit"
    await world.run(40)
    assert world.true("grows", "Ready")
    assert len(world.status("grows")["placement"]["workers"]) == 3


async def test_an_edit_that_does_not_fit_is_not_looked_at_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(5, nodes=2, work=10**6)
    world.submit(small("grows", 2))
    await world.run(30)
    edited: dict[str, Any] = dict(world.cluster.objects[f"{JOBS}/grows"])
    edited["spec"] = {**edited["spec"], "replicas": 3}
    edited["metadata"] = {**edited["metadata"], "generation": 2}
    world.cluster.update(f"{JOBS}/grows", edited)
    await world.run(30)
    assert world.condition("grows", "Ready")["reason"] == "EditDoesNotFit"
    served = []
    serve = Placer._serve

    async def counted(placer: Placer, call: Any) -> None:
        served.append(call.purpose)
        await serve(placer, call)

    monkeypatch.setattr(Placer, "_serve", counted)
    await world.run(1200)
    assert world.condition("grows", "Ready")["reason"] == "EditDoesNotFit"
    assert len(served) <= 1200 / WAITING_RETRY_SECONDS + 2


async def test_waiting_jobs_and_edits_see_that_a_foreign_pod_ended() -> None:
    world = World(6, nodes=4, work=10**6)
    for name in ("n2", "n3"):
        container = {"name": "c", "resources": {"requests": {"nvidia.com/gpu": "1"}}}
        world.cluster.put(
            f"{PODS}/notebook-{name}",
            {"metadata": {"name": f"notebook-{name}"}, "spec": {"nodeName": name, "containers": [container]}},
        )
    world.submit(small("grows", 2))
    await world.run(30)
    edited: dict[str, Any] = dict(world.cluster.objects[f"{JOBS}/grows"])
    edited["spec"] = {**edited["spec"], "replicas": 3}
    edited["metadata"] = {**edited["metadata"], "generation": 2}
    world.cluster.update(f"{JOBS}/grows", edited)
    world.submit(small("waits", 1))
    await world.run(3)
    assert world.condition("grows", "Ready")["reason"] == "EditDoesNotFit"
    assert "pod default/notebook-n3 (1 GPU) ends" in world.condition("waits", "Placed")["message"]
    world.cluster.remove(f"{PODS}/notebook-n2")
    world.cluster.remove(f"{PODS}/notebook-n3")
    await world.run(60)
    assert world.true("waits", "Ready")
    assert world.true("grows", "Ready")


async def start_all(tenants: Tenants, names: list[str]) -> list[str]:
    """Has the jobs that are woken ask for their nodes, until none is woken any more. Returns those that got nodes."""
    started: list[str] = []
    while woken := await tenants.freed():
        for name in woken:
            key = name.removeprefix("default/")
            if key in names and key not in started and isinstance(await tenants.ask(tenants.request(key, 1)), Granted):
                started.append(key)
    return started


@pytest.mark.parametrize("jobs", [10, 30])
async def test_jobs_that_share_a_node_are_tried_a_fixed_number_of_times_each(
    jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that fits claims its whole node. Each grant tried all jobs behind it again: quadratic time."""
    tenants = Tenants(1)
    await tenants.start("runs", 1)
    names = [f"waits{number}" for number in range(jobs)]
    for name in names:
        assert isinstance(await tenants.ask(tenants.request(name, 1)), NotGranted)
    await tenants.freed()
    attempts = Attempts(monkeypatch)
    tenants.cache.put_node(node("large", "r0", 2 * jobs))
    assert await start_all(tenants, names) == names, "in their order"
    assert len(attempts.jobs) <= 6 * jobs


async def test_a_job_is_tried_although_another_one_with_other_requirements_does_not_fit() -> None:
    tenants = Tenants(2)
    await tenants.start("runs", 2)
    for name, size in (("wide", 3), ("wider", 3), ("narrow", 1)):
        assert isinstance(await tenants.ask(tenants.request(name, size)), NotGranted)
    await tenants.freed()
    tenants.cache.put_node(node("more", "r0"))
    assert await tenants.freed() == ["default/narrow"]
