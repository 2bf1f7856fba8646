"""Jobs that wait for nodes depend on each other only through nodes: each change wakes whom it helps, and no job that
fails, is silent or is gone keeps another waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright_operator.decide.placement_outcome import Granted, NotGranted
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.pod_requests import PodRequest
from meshwright_operator.scheduling import waiting_jobs
from meshwright_operator.scheduling.attempt import Attempt, Outcome, run_attempt
from meshwright_operator.scheduling.cluster_view import ClusterView
from meshwright_operator.scheduling.counted_capacity import CountedCapacity
from meshwright_operator.scheduling.free_blocks import FreeBlocks
from meshwright_operator.scheduling.job_queue import JobQueue, Member
from meshwright_operator.scheduling.placer import LATER
from meshwright_operator.scheduling.pod_request_lister import PodRequestLister
from meshwright_operator.scheduling.policy import parse_policy
from tests.operator.queueing import Attempts, Tenants
from tests.operator.support import node
from tests.operator.test_gang_races import small


async def test_a_job_whose_placement_fails_does_not_fail_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(attempt: Attempt, view: ClusterView) -> Outcome:
        if attempt.request.key.name == "bad":
            raise ZeroDivisionError(attempt.request.key)
        return run_attempt(attempt, view)

    tenants = Tenants(3)
    await tenants.start("runs", 1)
    await tenants.ask(tenants.request("bad", 3, priority=5))
    monkeypatch.setattr(waiting_jobs, "run_attempt", run)
    tenants.cache.put_node(node("n8", "r0"))
    assert isinstance(await tenants.ask(tenants.request("good", 2)), Granted)
    await tenants.freed()
    with pytest.raises(ZeroDivisionError):
        await tenants.ask(tenants.request("bad", 3, priority=5))


async def test_a_job_that_leaves_lets_the_next_of_its_namespace_wait() -> None:
    tenants = Tenants(4)
    tenants.scheduler.set_policy(parse_policy("defaults: {maxWaitingJobs: 1}"))
    await tenants.start("other/runs", 4)
    first, second = tenants.request("first", 4), tenants.request("second", 2)
    assert isinstance(await tenants.ask(first), NotGranted)
    answer = await tenants.ask(second)
    assert isinstance(answer, NotGranted)
    assert answer.reason == "PolicyExceeded"
    await tenants.freed()
    tenants.scheduler.withdraw(first.uid)
    assert await tenants.freed() == ["default/second"]


@pytest.mark.parametrize("how", ["deleted", "refused"])
async def test_what_a_job_claimed_is_tried_by_those_behind_it_however_it_leaves(how: str) -> None:
    tenants = Tenants(2)
    await tenants.start("runs", 2)
    ahead = tenants.request("team/ahead", 2, priority=5)
    await tenants.ask(ahead)
    await tenants.ask(tenants.request("behind", 2))
    tenants.end("runs")
    assert await tenants.freed() == ["team/ahead"]
    if how == "deleted":
        del tenants.cache.jobs[ahead.key]
    else:
        tenants.scheduler._placer.queue.policy = parse_policy("namespaces: [{match: team, maxGpusInUse: 2}]")
    await tenants.ask(tenants.request("third", 4))
    assert "default/behind" in await tenants.freed()


async def test_a_replacement_that_is_not_created_is_free_for_others() -> None:
    tenants = Tenants(3)
    await tenants.start("gang", 3)
    gang = tenants.request("gang", 3)
    kept = {one.worker: one.node for one in tenants.cache.pods(gang.key, gang.uid) if one.worker}
    tenants.end("gang", worker=0)
    async with tenants.scheduler.grant(replace(gang, assigned_nodes=kept)) as grant:
        assert isinstance(grant, Granted)
        assert isinstance(await tenants.ask(tenants.request("waits", 1)), NotGranted)
        await tenants.freed()
    assert await tenants.freed() == ["default/waits"]


async def test_a_pod_and_the_promise_that_it_keeps_count_once() -> None:
    tenants = Tenants(1)
    tenants.cache.put_node(node("n0", "r0", gpus=4))
    first = tenants.request("first", 1)
    async with tenants.scheduler.grant(first) as grant:
        assert isinstance(grant, Granted)
        tenants.run(first, grant.placement.nodes)
        assert isinstance(await tenants.ask(tenants.request("second", 1)), Granted)


async def test_the_spares_of_a_job_that_ended_are_free_at_once() -> None:
    tenants = Tenants(3)
    runs = tenants.request("runs", 2, recovery={"spareNodes": 1})
    answer = await tenants.ask(runs)
    assert isinstance(answer, Granted)
    (spare,) = answer.placement.spares
    tenants.cache.jobs[runs.key]["status"] = {
        "placement": {"spares": [spare], "workers": [{"worker": 0}, {"worker": 1}]}
    }
    assert isinstance(await tenants.ask(tenants.request("waits", 3)), NotGranted)
    await tenants.freed()
    tenants.end("runs")
    assert await tenants.freed() == ["default/waits"]


async def test_a_gang_that_lost_a_pod_is_looked_at_while_another_job_waits_for_those_ahead_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tenants = Tenants(8)
    await tenants.start("gang", 3)
    await tenants.start("ends", 1)
    for number in range(20):
        await tenants.ask(tenants.request(f"large{number}", 8))
    await tenants.freed()
    gang = tenants.request("gang", 3)
    kept = {one.worker: one.node for one in tenants.cache.pods(gang.key, gang.uid) if one.worker}
    attempts = Attempts(monkeypatch)
    tenants.cache.put_node(node("n9", "r0"))
    new = asyncio.create_task(tenants.ask(tenants.request("new", 1)))
    while "default/new" not in attempts.jobs:
        await attempts.next()
    before = len(attempts.jobs)
    tenants.end("gang", worker=0)
    assert isinstance(await tenants.ask(replace(gang, assigned_nodes=kept)), Granted)
    assert attempts.jobs.index("default/gang") <= before + 1, "it waits for the attempt that runs, at most"
    assert await new is LATER, "its reconcile does not wait while 20 jobs ahead are tried again"
    assert "default/new" in await tenants.freed()
    assert isinstance(await tenants.ask(tenants.request("new", 1)), Granted)


async def test_a_job_that_fits_and_never_asks_does_not_keep_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = Tenants(2)
    await tenants.start("runs", 2)
    await tenants.ask(tenants.request("silent", 2, priority=5))
    behind = tenants.request("behind", 2)
    await tenants.ask(behind)
    tenants.end("runs")
    assert await tenants.freed() == ["default/silent"]
    assert isinstance(await tenants.ask(behind), NotGranted), "it leaves the nodes to the job ahead"
    monkeypatch.setattr(waiting_jobs, "SILENT_SECONDS", -1.0)
    await tenants.ask(behind)
    await tenants.freed()
    assert isinstance(await tenants.ask(behind), Granted)


async def test_many_waiting_jobs_are_not_ordered_again_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = Tenants(4)
    await tenants.start("runs", 4)
    for number in range(30):
        await tenants.ask(tenants.request(f"waits{number}", 4, activeDeadlineSeconds=1000 + number))
    await tenants.freed()
    attempts, orders, order = Attempts(monkeypatch), [0], JobQueue.ordered

    def counted(queue: JobQueue, in_use: Callable[[str], int]) -> list[Member]:
        orders[0] += 1
        return order(queue, in_use)

    monkeypatch.setattr(JobQueue, "ordered", counted)
    tenants.cache.put_node(node("n9", "r0"))
    assert await tenants.freed() == []
    assert len(attempts.jobs) == 30
    assert orders[0] <= 2


async def test_the_first_job_asks_again_soon_although_it_did_not_wait_for_its_answer() -> None:
    tenants = Tenants(1)
    await tenants.start("runs", 1)
    requests = [tenants.request(f"job{number}", 1, priority=number) for number in range(12)]
    answers = await asyncio.gather(*(tenants.ask(request) for request in requests))
    assert answers[-1] is LATER
    await tenants.freed()
    answer, second = await tenants.ask(requests[-1]), await tenants.ask(requests[-2])
    assert isinstance(answer, NotGranted)
    assert isinstance(second, NotGranted)
    assert answer.retry_seconds < second.retry_seconds, "no watch reports foreign pods: the first asks for all"


async def test_an_error_of_the_placer_itself_reaches_those_who_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = Tenants(2)
    monkeypatch.setattr(waiting_jobs.WaitingJobs, "position", lambda self: 1 / 0)
    with pytest.raises(RuntimeError, match="division by zero"):
        await tenants.ask(tenants.request("job", 2))
    monkeypatch.undo()
    assert isinstance(await tenants.ask(tenants.request("job", 2)), Granted)


def test_pods_that_came_and_went_while_nobody_asked_leave_nothing() -> None:
    tenants = Tenants(2)
    capacity = CountedCapacity(PodRequestLister(tenants.server, tenants.cache, ()), lambda: (), lambda: None)
    request = PodRequest("p", "ns", "n0", "{}", "job", "uid")
    for number in range(1000):
        capacity.pod_changed(f"ns/p{number}", request)
        capacity.pod_changed(f"ns/p{number}", None)
    assert not capacity.uncounted


async def test_a_gpu_resource_that_no_job_requests_any_more_is_not_counted() -> None:
    tenants = Tenants(2)
    await tenants.start("runs", 1)
    for number in range(40):
        obj = small(f"odd{number}", 1)
        obj["metadata"]["namespace"] = "default"
        obj["spec"]["workers"]["gpuResource"] = f"example.com/gpu{number}"
        tenants.cache.put_job(obj)
    assert isinstance(await tenants.ask(tenants.request("next", 1)), Granted)
    assert counted_resources(tenants) == ["nvidia.com/gpu"], "no node has any of the others"
    amd = node("amd0", "r0")
    amd["status"]["allocatable"]["example.com/gpu3"] = "2"
    tenants.cache.put_node(amd)
    await tenants.ask(tenants.request("third", 1))
    assert counted_resources(tenants) == ["example.com/gpu3", "nvidia.com/gpu"]
    del tenants.cache.jobs[JobKey("default", "odd3")]
    await tenants.ask(tenants.request("fourth", 1))
    assert counted_resources(tenants) == ["nvidia.com/gpu"]


def counted_resources(tenants: Tenants) -> list[str]:
    view = tenants.scheduler._placer._capacity.view
    return sorted(name for name in ["nvidia.com/gpu", *(f"example.com/gpu{n}" for n in range(40))] if view.knows(name))


def test_jobs_that_replace_a_pod_come_before_those_that_start_and_these_before_those_that_grow() -> None:
    tenants, queue = Tenants(4), JobQueue()
    grows = replace(tenants.request("grows", 2, assigned={0: "n0"}), grows=True)
    starts = [tenants.request(f"starts-{number}", 1) for number in (1, 2)]
    replaces = tenants.request("replaces", 2, assigned={0: "n1"})
    urgent = tenants.request("urgent", 1, priority=5)
    for request in (grows, *reversed(starts), replaces, urgent):
        queue.put(request)
    names = [member.request.key.name for member in queue.ordered(lambda namespace: 0)]
    assert names == ["urgent", "replaces", "starts-1", "starts-2", "grows"]


def test_nodes_that_are_gone_are_forgotten() -> None:
    tenants = Tenants(1)
    plan = tenants.request("job", 1).plan
    spec = tenants.request("job", 1).spec
    nodes = dict(tenants.scheduler.inventory(spec).nodes)
    blocks = FreeBlocks(plan, nodes)
    assert blocks.total == 1
    for number in range(200):
        one = replace(nodes["n0"], name=f"new{number}")
        blocks.update(one)
        assert blocks.total == 2
        blocks.remove(one.name)
    assert blocks.total == 1
    assert len(blocks) == 1
