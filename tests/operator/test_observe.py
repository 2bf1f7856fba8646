"""What a job object means: what is wanted, what runs, and which of the two is acted on."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.status import ParallelTrainingJobStatus, WorkerPlacement
from meshwright.planner.cost_model import Calibration
from meshwright.planner.plan import Plan
from meshwright_operator.controller.observe import JobObserver, JobRejectedError, managed_here
from meshwright_operator.decide.agents import Agents
from meshwright_operator.decide.applied_spec import encode_spec, revision_of
from meshwright_operator.decide.observed import Observed
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.manifests.worker_pod import PodContext, worker_pod
from meshwright_operator.planning.planner import Planner
from meshwright_operator.scheduling.inventories import Inventories
from meshwright_operator.scheduling.scheduler import JobScheduler
from tests.operator.builders import JOB, NOW, plan_status, pod, running_status, spec
from tests.operator.support import job, node

KEY = JobKey("default", JOB)
ZERO = {"tensor": 2, "pipeline": 2, "microBatches": 2, "zeroStage": 1}
TRAINING = {"steps": 50, "globalBatchSize": 8, "sequenceLength": 64}


def look(status: ParallelTrainingJobStatus | None, pods: list[Pod] | None = None, **fields: Any) -> Observed:
    """A job of this status, whose spec was edited to have these fields, on four nodes of two GPUs."""
    cache = Cache()
    for number in range(4):
        cache.nodes[f"n{number}"] = {"spec": {}, **node(f"n{number}", "r0")}
    for p in pods if pods is not None else [pod(worker) for worker in range(4)]:
        cache.put_pod(p)
    obj = job(JOB, **fields)
    obj["metadata"] |= {"uid": "job-uid", "generation": 2, "namespace": "default"}
    obj["status"] = status.wire() if status is not None else {"observedGeneration": -1}
    scheduler = JobScheduler(None, cache, None, ())  # type: ignore[arg-type]  # nothing is placed here
    planner = Planner(Inventories(cache), lambda: scheduler.calibration)
    return JobObserver(cache, scheduler, planner).observe(KEY, obj, Agents(), NOW)


def started(**changes: Any) -> ParallelTrainingJobStatus:
    return running_status(**{"applied_spec": encode_spec(spec()), **changes})


def test_a_spec_that_runs_is_acted_on() -> None:
    seen = look(started())
    assert (seen.spec, seen.blocked_edit, seen.fallback) == (spec(), None, None)


def test_pods_of_a_job_with_copies_in_host_memory_request_it() -> None:
    workers = {"image": "i", "gpusPerWorker": 2, "resources": {"memory": "1Gi"}}
    fields = {"workers": workers, "recovery": {"inMemory": True, "copyEverySteps": 5}}
    runs = spec(**fields)
    seen = look(
        started(applied_spec=encode_spec(runs), plan=plan_status(revision=revision_of(runs))),
        [pod(worker, revision=revision_of(runs)) for worker in range(4)],
        **fields,
    )
    copies = seen.plan.copies_bytes
    assert copies > 0
    assert seen.plan.worker_request.memory_bytes == (1 << 30) + copies
    assert seen.spec.workers.resources.memory == f"{1024 + -(-copies // (1 << 20))}Mi"
    assert seen.own_workers == runs.workers, "the applied spec has only what the job states"
    context = PodContext(JOB, "default", "job-uid", seen.spec, seen.revision, "http://coordinator:9470", "secret")
    made = worker_pod(context, WorkerPlacement(worker=0, incarnation=0, pod=f"{JOB}-w0-0", node="n0", ranks="0-1"))
    resources = made["spec"]["containers"][0]["resources"]
    assert {resources[part]["memory"] for part in ("requests", "limits")} == {seen.spec.workers.resources.memory}


def test_an_edit_that_restarts_the_gang_comes_with_what_runs() -> None:
    seen = look(started(), replicas=1, recovery={"maxRestarts": 3})
    assert (seen.spec.replicas, seen.blocked_edit) == (1, None)
    assert seen.fallback is not None
    assert seen.fallback.revision == revision_of(spec())
    assert seen.fallback.spec.recovery.max_restarts == 3, "what takes effect at once is not held back"
    assert len(seen.fallback.workers) == 4


@pytest.mark.parametrize(
    ("fields", "reason", "retryable", "text"),
    [
        ({"replicas": -1}, "InvalidSpec", False, "spec.replicas"),
        ({"workers": "none"}, "InvalidSpec", False, "spec.workers"),
        ({"parallelism": {"tensor": 3}}, "InvalidSpec", False, "spec.parallelism.tensor"),
        ({"data": {"source": "Files", "claimName": "c"}}, "ImmutableField", False, "spec.data: cannot be changed"),
        ({"training": {**TRAINING, "optimizer": {"name": "Muon"}}, "parallelism": ZERO}, "InvalidSpec", False, "Muon`"),
        ({"workers": {"image": "i", "gpusPerWorker": 4}}, "NoNodeLargeEnough", True, "gpusPerWorker"),
    ],
    ids=["below its bound", "wrong type", "contradiction", "immutable", "what ranks refuse", "no such node"],
)
def test_an_edit_that_cannot_be_is_held_and_the_gang_goes_on(
    fields: dict[str, Any], reason: str, retryable: bool, text: str
) -> None:
    seen = look(started(step=3), **fields)
    assert seen.blocked_edit is not None
    assert (seen.blocked_edit.reason, seen.blocked_edit.retryable) == (reason, retryable)
    assert text in seen.blocked_edit.message
    assert seen.revision == revision_of(spec())
    assert seen.spec == spec()
    assert seen.generation == 2
    assert [worker.pod.name for worker in seen.workers if worker.pod] == [f"{JOB}-w{w}-0" for w in range(4)]


@pytest.mark.parametrize("step", [None, 0])
def test_until_a_step_is_finished_every_field_can_be_corrected(step: int | None) -> None:
    """The ranks found that the data is missing: nothing depends on it yet."""
    seen = look(started(step=step), data={"source": "Files", "claimName": "c"})
    assert seen.blocked_edit is None
    assert seen.spec.data is not None
    assert seen.spec.data.claim_name == "c"


@pytest.mark.parametrize(
    ("training", "parallelism"),
    [({"outer": {"method": "DiLoCo"}}, {}), ({"parameterOffload": True}, {"zeroStage": 3})],
    ids=["islands", "parameters that replicas share"],
)
def test_scaling_to_what_ranks_would_refuse_is_held(training: dict[str, Any], parallelism: dict[str, Any]) -> None:
    fields = {"training": {**TRAINING, **training}, "parallelism": {**ZERO, "zeroStage": 0, **parallelism}}
    runs = spec(**fields)
    seen = look(
        started(applied_spec=encode_spec(runs), plan=plan_status(revision=revision_of(runs))), **fields, replicas=1
    )
    assert seen.blocked_edit is not None
    assert seen.blocked_edit.reason == "InvalidSpec"
    assert next(iter(training)) in seen.blocked_edit.message
    assert seen.spec == runs


def test_suspension_is_heard_however_damaged_the_rest_is() -> None:
    seen = look(started(), workers=None, suspend=True)
    assert seen.blocked_edit is not None
    assert seen.spec.suspend


@pytest.mark.parametrize("status", [None, running_status()], ids=["not started", "no record of what runs"])
def test_without_a_record_of_what_runs_a_bad_spec_is_refused(status: ParallelTrainingJobStatus | None) -> None:
    with pytest.raises(JobRejectedError, match=r"spec\.replicas"):
        look(status, replicas=-1)


def test_a_finished_job_is_what_it_was() -> None:
    done = started(conditions=[{**CONDITION, "type": "Complete"}])
    for fields in ({"replicas": -1}, {"replicas": 1}, {"data": {"source": "Files", "claimName": "c"}}):
        seen = look(done, [], ttlSecondsAfterFinished=5, **fields)
        assert (seen.blocked_edit, seen.fallback) == (None, None)
        assert seen.revision == revision_of(spec())
        assert seen.spec.ttl_seconds_after_finished == (None if fields.get("replicas") == -1 else 5)


CONDITION = {
    "status": "True",
    "reason": "Completed",
    "lastTransitionTime": "2026-01-02T03:04:05Z",
}


@pytest.mark.parametrize(
    ("stated", "ours"),
    [({}, True), ({"managedBy": "meshwright.dev/operator"}, True), ({"managedBy": "example.com/x"}, False)],
)
def test_whose_job_it_is(stated: dict[str, Any], ours: bool) -> None:
    assert managed_here({"spec": stated}) is ours
    assert managed_here({"spec": "damaged"})
    assert managed_here({})


def test_an_edit_of_the_size_changes_no_micro_batch_of_what_runs() -> None:
    fields: dict[str, Any] = {"elastic": {}, "checkpoint": {"claimName": "c"}}
    before = spec(**fields)
    revision = revision_of(before)
    status = running_status(applied_spec=encode_spec(before), plan=plan_status(revision=revision))
    seen = look(status, [pod(worker, revision=revision) for worker in range(4)], replicas=4, **fields)
    assert (seen.plan.layout.data, seen.plan.strategy.micro_batches) == (2, 2)
    assert (seen.spec.replicas, seen.spec.parallelism.micro_batches) == (2, 2)
    assert [(plan.layout.data, plan.strategy.micro_batches) for plan in seen.size_plans] == [(4, 2), (2, 2), (1, 8)]


def test_the_plans_of_all_sizes_are_found_again_only_if_something_else_is_asked_for() -> None:
    planner, made = Planner(Inventories(Cache()), Calibration), []

    def make() -> list[Plan]:
        made.append(1)
        return []

    for asked in ("a", "a", "b"):
        planner.sizes(KEY, asked, make)
    assert len(made) == 2
    planner.forget(KEY)
    planner.sizes(KEY, "b", make)
    assert len(made) == 3
