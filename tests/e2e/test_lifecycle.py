"""A job from apply to Complete; suspended; too large; deleted; two at once."""

import asyncio
import json
import math

import pytest

from meshwright.api import conditions
from meshwright.api.conditions import find, is_true
from meshwright.api.labels import LABEL_JOB_UID
from meshwright.api.objects import service_name
from meshwright_local.kube.resources import EVENTS, JOBS, SECRETS, SERVICES
from tests.e2e.local_stack import NAMESPACE, command, endless, eventually, holds, processes, tiny


async def test_apply_to_complete(stage, reference):
    assert (reference["step"], reference["samples"]) == (60, 60 * 8)
    assert float.fromhex(reference["loss"]) < 5.0  # from ln 260 = 5.56


async def test_status_says_what_happened(undisturbed):
    status = undisturbed.status
    assert (status.step, status.total_steps, status.restart_count) == (60, 60, 0)
    assert status.plan is not None
    assert (status.plan.tensor, status.plan.pipeline, status.plan.data, status.plan.workers) == (2, 1, 2, 2)
    assert status.placement is not None
    assert status.placement.straddling_tensor_groups == 0
    assert status.checkpoint is not None
    assert status.checkpoint.step == 60
    assert status.evaluation is not None
    assert status.evaluation.step == 60
    assert float(status.evaluation.loss) < 5.5  # from ln 260 = 5.56
    assert float(status.evaluation.perplexity) == pytest.approx(math.exp(float(status.evaluation.loss)), rel=1e-4)
    assert status.observed_generation == 1
    for condition in (conditions.READY, conditions.PLACED, conditions.COMPLETE, conditions.PREFLIGHT_PASSED):
        assert is_true(status.conditions, condition), condition
    for condition in (conditions.RECONCILING, conditions.STALLED, conditions.FAILED, conditions.SUSPENDED):
        assert not is_true(status.conditions, condition), condition
    assert undisturbed.checkpoints == ["step-00000050", "step-00000060"]  # the newest two, as `keep` says


@pytest.mark.long  # with ranks: tests/distributed/test_resume_from.py; the status: tests/operator/test_resumed_from.py
async def test_another_job_begins_from_a_checkpoint_of_a_deleted_one(stage, reference, undisturbed):
    """On one rank instead of four, under its own name, on the same claim."""
    run, name = undisturbed.status.checkpoint.path.split("/")[-2], "branch"
    checkpoint = {"claimName": "reference", "resumeFrom": f"{run}/step-00000050"}
    one = {"replicas": 1, "workers": {"gpusPerWorker": 1}, "parallelism": {"tensor": 1}}
    await stage.apply(tiny(name, checkpoint=checkpoint, **one)[1:])
    status = await stage.complete(name)
    assert (status.resumed_from.step, status.resumed_from.path.split("/")[-2:]) == (50, [run, "step-00000050"])
    own = await stage.checkpoint(name)
    manifest = json.loads((own / "meshwright.json").read_text())
    assert {key: manifest["state"][key] for key in ("step", "samples", "digest")} == {
        key: reference[key] for key in ("step", "samples", "digest")
    }
    assert float.fromhex(manifest["state"]["loss"]) == pytest.approx(float.fromhex(reference["loss"]), rel=1e-3)
    parent = manifest["provenance"]["parent"]
    assert (parent["resumed"], parent["step"], parent["provenance"]["job"]) == (True, 50, f"{NAMESPACE}/reference")
    assert own.parent.name.startswith(f"{name}-")
    assert sorted(path.name for path in own.parent.glob("step-*")) == ["step-00000050", "step-00000060"]
    assert sorted(path.name for path in (own.parent.parent / run).glob("*step-*")) == undisturbed.checkpoints

    async def events():
        posted = (await stage.client.list(EVENTS, NAMESPACE)).items
        return [event for event in posted if event["reason"] == "ResumedFromOtherRun"]

    (event,) = await eventually("the event is posted", events)
    assert event["message"] == f"Resumed from {status.resumed_from.path} step 50"
    await stage.delete(name)


@pytest.mark.long
async def test_ranks_that_share_sequences_train_on_the_same_samples(stage, reference):
    await stage.apply(tiny("shared", parallelism={"tensor": 1, "context": 2, "contextMethod": "RingZigZag"}))
    status = await stage.complete("shared")
    assert status.plan is not None
    assert (status.plan.summary, status.plan.context) == ("TP 1 x CP 2 x PP 1 x DP 2", 2)
    saved = await stage.saved("shared")
    assert {k: saved[k] for k in ("step", "samples", "digest")} == {
        k: reference[k] for k in ("step", "samples", "digest")
    }
    assert float.fromhex(saved["loss"]) == pytest.approx(float.fromhex(reference["loss"]), rel=1e-3)
    await stage.delete("shared")


@pytest.mark.long
async def test_suspend_deletes_the_pods_and_resume_continues(stage, reference):
    """By default, `test_command_line` suspends and resumes a job, and `test_recovery` compares runs that resume."""
    await stage.apply(tiny("pause"))
    uid = (await stage.client.get(JOBS, "pause", NAMESPACE))["metadata"]["uid"]
    await stage.trained("pause", 15)
    await stage.client.patch(JOBS, "pause", {"spec": {"suspend": True}}, NAMESPACE)
    status = await stage.until("pause", holds(conditions.SUSPENDED), "Suspended")
    await stage.until("pause", lambda s: s.ready_ranks.startswith("0/"), "without ranks")
    await stage.gone("pause", uid)
    status = await stage.status("pause")
    assert is_true(status.conditions, conditions.READY)  # settled as it was asked to be
    assert status.checkpoint is not None
    assert 15 <= status.checkpoint.step < 60
    await stage.client.patch(JOBS, "pause", {"spec": {"suspend": False}}, NAMESPACE)
    await stage.complete("pause")
    saved = await stage.saved("pause")
    assert {k: saved[k] for k in ("step", "samples", "digest", "loss")} == {
        k: reference[k] for k in ("step", "samples", "digest", "loss")
    }
    await stage.delete("pause")


async def test_a_job_too_large_says_what_is_missing_and_starts_when_it_fits(stage):
    await stage.apply(command("large", "sleep", "1", replicas=6))
    unplaced = lambda s: (c := find(s.conditions, conditions.PLACED)) is not None and c.status == "False"  # noqa: E731
    status = await stage.until("large", unplaced, "refused by placement")
    condition = find(status.conditions, conditions.PLACED)
    assert condition is not None
    assert "6 workers" in condition.message, condition.message
    assert await stage.pods("large") == []
    await stage.client.patch(JOBS, "large", {"spec": {"replicas": 1}}, NAMESPACE)
    await stage.complete("large")
    await stage.delete("large")


@pytest.mark.long
async def test_two_jobs_train_side_by_side(stage, reference):
    await stage.apply(tiny("left") + tiny("right", training={"seed": 4}))
    await asyncio.gather(stage.trained("left", 1), stage.trained("right", 1))
    nodes = [{p["spec"]["nodeName"] for p in await stage.pods(name)} for name in ("left", "right")]
    assert not nodes[0] & nodes[1]
    await asyncio.gather(stage.complete("left"), stage.complete("right"))
    left, right = await stage.saved("left"), await stage.saved("right")
    assert (left["loss"], left["digest"]) == (reference["loss"], reference["digest"])
    assert right["digest"] != reference["digest"]
    await asyncio.gather(stage.delete("left"), stage.delete("right"))


async def test_deletion_leaves_no_pod_service_secret_or_process(stage):
    await stage.apply(endless("brief", replicas=1))
    uid = (await stage.client.get(JOBS, "brief", NAMESPACE))["metadata"]["uid"]
    await stage.trained("brief", 2)
    assert len(processes(uid)) >= 4  # an agent, what it forks ranks from, and two ranks
    owned = f"{LABEL_JOB_UID}={uid}"
    assert await stage.client.find(SERVICES, service_name("brief", uid), NAMESPACE)
    assert len((await stage.client.list(SECRETS, NAMESPACE, label_selector=owned)).items) == 1
    await stage.client.delete(JOBS, "brief", NAMESPACE)
    await stage.gone("brief", uid)

    async def collected():
        service = await stage.client.find(SERVICES, service_name("brief", uid), NAMESPACE)
        return service is None and not (await stage.client.list(SECRETS, NAMESPACE, label_selector=owned)).items

    await eventually("service and secret are collected", collected)


@pytest.mark.long
async def test_a_job_applied_at_once_after_its_deletion_trains(stage):
    """As the job of `test_mistakes` that is deleted and applied again, with ranks that train."""
    await stage.apply(endless("twice", replicas=1))
    old = (await stage.client.get(JOBS, "twice", NAMESPACE))["metadata"]["uid"]
    await stage.trained("twice", 2)
    await stage.client.delete(JOBS, "twice", NAMESPACE)
    await stage.apply(endless("twice", replicas=1))
    assert (await stage.client.get(JOBS, "twice", NAMESPACE))["metadata"]["uid"] != old
    await stage.until("twice", lambda status: is_true(status.conditions, conditions.READY), "trains")
    assert not processes(old)
    await stage.delete("twice")
