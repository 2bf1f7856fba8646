"""Workers and operators are killed; the run ends as if nothing had happened."""

import os
import re
import signal

import pytest

from meshwright.api import conditions
from meshwright.api.labels import LABEL_INCARNATION
from meshwright_local.kube.resources import JOBS
from tests.e2e.local_stack import NAMESPACE, command, endless, eventually, holds, processes, tiny

SAME = ("step", "samples", "digest", "loss")


def same(saved, reference):
    assert {key: saved[key] for key in SAME} == {key: reference[key] for key in SAME}


async def uid_of(stage, name):
    return (await stage.client.get(JOBS, name, NAMESPACE))["metadata"]["uid"]


@pytest.mark.parametrize(
    ("worker", "grace"), [pytest.param(1, None, marks=pytest.mark.long), (0, 0)], ids=["drained", "killed at once"]
)
async def test_a_lost_pod_is_replaced_and_the_run_ends_bitwise_the_same(stage, reference, worker, grace):
    name = f"lost{worker}"
    await stage.apply(tiny(name))
    await stage.trained(name, 25)
    survivor = (await stage.pod(name, 1 - worker))["metadata"]
    lost = await stage.delete_pod(name, worker, grace)
    status = await stage.complete(name)
    assert status.mesh is not None
    assert status.mesh.generation == 2
    assert [(r.cause, r.count) for r in status.restarts] == [("PodLost", 1)]
    assert status.restarts_toward_limit == 0
    replacement = (await stage.pod(name, worker))["metadata"]
    assert replacement["name"] != lost
    assert replacement["labels"][LABEL_INCARNATION] == "1"
    assert (await stage.pod(name, 1 - worker))["metadata"]["uid"] == survivor["uid"]
    same(await stage.saved(name), reference)
    await stage.delete(name)


@pytest.mark.long
async def test_an_elastic_job_that_keeps_its_size_ends_bitwise_the_same(stage, reference):
    """A lost pod is replaced before the job would shrink, and edits of how it resizes change nothing that runs."""
    await stage.apply(tiny("same", elastic={"maxReplicas": 2, "replacementSeconds": 60}))
    await stage.trained("same", 10)
    await stage.client.patch(JOBS, "same", {"spec": {"elastic": {"pauseSeconds": 60, "fill": True}}}, NAMESPACE)
    await stage.trained("same", 30)
    assert (await stage.status("same")).restart_count == 0
    await stage.delete_pod("same", 1, 0)
    status = await stage.complete("same")
    assert [(r.cause, r.count) for r in status.restarts] == [("PodLost", 1)]
    assert status.replicas == 2
    same(await stage.saved("same"), reference)
    await stage.delete("same")


@pytest.mark.long
async def test_a_killed_rank_restarts_in_place(stage, reference):
    """By default, `test_hang` has a rank that is killed and starts again in place, with the same result."""
    await stage.apply(tiny("rank"))
    uid = await uid_of(stage, "rank")
    await stage.trained("rank", 25)
    pods = {p["metadata"]["uid"] for p in await stage.pods("rank")}
    (started,) = re.findall(r"rank started rank=3 generation=1 pid=(\d+)", await stage.log("rank-w1-0"))
    assert int(started) in processes(uid)
    os.kill(int(started), signal.SIGKILL)
    status = await stage.complete("rank")
    assert [(r.cause, r.count) for r in status.restarts] == [("RankFailure", 1)]
    assert status.restarts_toward_limit == 1
    assert {p["metadata"]["uid"] for p in await stage.pods("rank")} == pods
    same(await stage.saved("rank"), reference)
    await stage.delete("rank")


@pytest.mark.long  # with agents that do as real ones: tests/operator/test_operator_recovers.py
async def test_an_operator_killed_midway_touches_no_worker(stage):
    await stage.apply(endless("steady", replicas=1))
    uid = await uid_of(stage, "steady")
    before = await stage.trained("steady", 10)
    pids = set(processes(uid))
    await stage.kill_operator()
    without = await stage.trained("steady", before + 5)  # training continues without it
    await stage.start_operator()
    # The new operator serves the agents of the same generation: it receives their progress, and passes a drain to them.
    status = await stage.until("steady", lambda s: (s.step or 0) > without, f"past step {without} in status")
    assert set(processes(uid)) == pids
    assert (status.restart_count, status.ready_ranks) == (0, "2/2")
    assert status.mesh is not None
    assert status.mesh.generation == 1
    await stage.client.patch(JOBS, "steady", {"spec": {"suspend": True}}, NAMESPACE)
    status = await stage.until("steady", holds(conditions.SUSPENDED), "Suspended")
    assert status.restart_count == 0
    saved = await stage.saved("steady")
    assert saved["step"] > without
    assert saved["samples"] == saved["step"] * 8
    await stage.delete("steady")


async def test_a_job_that_always_fails_ends_failed_with_the_reason(stage):
    script = "import sys; sys.exit('no such dataset')"
    await stage.apply(command("broken", "python", "-c", script, replicas=1, recovery={"maxRestarts": 1}))

    async def given_up():
        return condition(await stage.status("broken"), "Failed")

    failed = await eventually("the job has failed", given_up, 150)
    assert "no such dataset" in failed.message or "exit" in failed.message, failed
    status = await stage.status("broken")
    assert status.restarts_toward_limit == 1
    assert condition(status, "Stalled")
    assert not condition(status, "Complete")
    await stage.delete("broken")


def condition(status, kind):
    return next((c for c in status.conditions if c.type == kind and c.status == "True"), None)
