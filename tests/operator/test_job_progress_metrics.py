"""Metrics of a job's progress, queue, size and checkpoints, read from its status and its agents' reports."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from meshwright.api.goodput import GoodputStatus, TimeCause
from meshwright.api.status import ElasticStatus, MeshStatus, ParallelTrainingJobStatus
from meshwright.protocol.messages import Progress
from meshwright_operator.decide.admission import QUEUE_UNAVAILABLE
from meshwright_operator.decide.conditions import set_condition
from meshwright_operator.decide.missing_claims import CLAIM_NOT_FOUND
from meshwright_operator.decide.rejected_job import rejected
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.metrics.job_metrics import JobMetrics
from meshwright_operator.metrics.job_record import JobRecord
from tests.operator.builders import NOW, ago, placement, plan_status, running_status
from tests.operator.test_elastic import elastic, set_ready
from tests.operator.world import World

KEY = JobKey("default", "train")


def page_of(jobs: JobMetrics) -> dict[str, float]:
    """Series of the scrape without the labels that name the job -> value."""
    registry = CollectorRegistry()
    registry.register(jobs)
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    pairs = [line.rsplit(" ", 1) for line in lines]
    return {
        name.replace('job_name="train",', "").replace('namespace="default"', "").replace(",}", "}"): float(value)
        for name, value in pairs
    }


def put(jobs: JobMetrics, status: ParallelTrainingJobStatus, **more: object) -> JobRecord:
    record = jobs.record(KEY, "uid")
    record.put(status, more.pop("progress", None), 0.0, **more)  # type: ignore[arg-type]
    return record


def test_progress_of_a_run_with_its_target_its_end_and_its_checkpoint_interval() -> None:
    jobs = JobMetrics()
    status = running_status(step=40, total_steps=200, eta_seconds=320, tokens_per_second=4096, loss="2.5")
    progress = Progress(step=40, loss=2.5, step_seconds=2.0, mfu=0.42)
    put(jobs, status, progress=progress, checkpoint_steps=50)
    page = page_of(jobs)
    assert page["ptj_job_step{}"] == 40
    assert page["ptj_job_target_steps{}"] == 200
    assert page["ptj_job_eta_seconds{}"] == 320
    assert page["ptj_job_tokens_per_second{}"] == 4096
    assert page["ptj_job_loss{}"] == 2.5
    assert page["ptj_job_mfu{}"] == 0.42
    assert page["ptj_job_checkpoint_interval_steps{}"] == 50
    assert page["ptj_job_checkpoint_interval_seconds{}"] == 100


@pytest.mark.parametrize("mfu", [None, float("nan"), float("inf"), -0.5, 7.0])
def test_a_utilization_that_cannot_be_is_not_exported(mfu: float | None) -> None:
    jobs = JobMetrics()
    put(jobs, running_status(step=1), progress=Progress(step=1, loss=1.0, mfu=mfu))
    assert "ptj_job_mfu{}" not in page_of(jobs)


def test_a_job_that_waits_says_since_when() -> None:
    jobs = JobMetrics()
    put(jobs, ParallelTrainingJobStatus(goodput=GoodputStatus(cause=TimeCause.QUEUED, since=ago(300))))
    assert page_of(jobs)["ptj_job_queued_timestamp_seconds{}"] == NOW.timestamp() - 300
    put(jobs, running_status(goodput=GoodputStatus(cause=TimeCause.TRAINING, since=ago(10))))
    assert "ptj_job_queued_timestamp_seconds{}" not in page_of(jobs)


@pytest.mark.parametrize("reason", ["InvalidSpec", "PolicyExceeded", "ProfileNotAllowed"])
def test_a_job_that_is_rejected_neither_starts_nor_waits_for_nodes(reason: str) -> None:
    jobs = JobMetrics()
    waiting = ParallelTrainingJobStatus(goodput=GoodputStatus(cause=TimeCause.QUEUED, since=ago(300)))
    put(jobs, rejected(waiting, 1, NOW, reason, "spec.x: must be y"))
    page = page_of(jobs)
    assert "ptj_job_queued_timestamp_seconds{}" not in page
    assert [name for name in page if name.startswith("ptj_jobs")] == ['ptj_jobs{,state="finished"}']


@pytest.mark.parametrize(("reason", "cause"), [("Preempted", "JobPreempted"), ("WaitingForQuota", "Start")])
def test_a_job_that_was_stopped_for_another_one_or_has_no_quota_waits(reason: str, cause: str) -> None:
    jobs = JobMetrics()
    waits = GoodputStatus(cause=TimeCause.QUEUED, since=ago(300))
    mesh = MeshStatus(generation=int(cause != "Start"), cause=cause)
    status = running_status(goodput=waits, mesh=mesh, ready_ranks="0/4", placement=None, restart_count=mesh.generation)
    set_condition(status, "Ready", "False", reason, "", 1, NOW)
    put(jobs, status)
    page = page_of(jobs)
    assert [name for name in page if name.startswith("ptj_jobs")] == ['ptj_jobs{,state="queued"}']
    assert page["ptj_job_queued_timestamp_seconds{}"] == NOW.timestamp() - 300


@pytest.mark.parametrize("reason", [CLAIM_NOT_FOUND, QUEUE_UNAVAILABLE])
def test_a_job_whose_claim_or_queue_is_missing_waits(reason: str) -> None:
    jobs = JobMetrics()
    waiting = ParallelTrainingJobStatus(goodput=GoodputStatus(cause=TimeCause.QUEUED, since=ago(300)))
    put(jobs, rejected(waiting, 1, NOW, reason, "missing"))
    page = page_of(jobs)
    assert page['ptj_jobs{,state="queued"}'] == 1
    assert page["ptj_job_queued_timestamp_seconds{}"] == NOW.timestamp() - 300


def test_rescales_count_by_direction_and_a_start_does_not() -> None:
    jobs = JobMetrics()
    for world in (0, 8, 4, 8, 8, 2):
        mesh = {"mesh": None} if not world else {}
        plan = plan_status(world_size=world or 8)
        put(jobs, running_status(elastic=ElasticStatus(wanted_replicas=2), plan=plan, **mesh))
    page = page_of(jobs)
    assert page['ptj_job_rescales_total{direction="up"}'] == 1
    assert page['ptj_job_rescales_total{direction="down"}'] == 2


def test_the_cost_of_a_placement_has_its_lower_bound_beside_it() -> None:
    jobs = JobMetrics()
    put(jobs, running_status(placement=placement().model_copy(update={"cost": "8", "gap": "0.25"})))
    page = page_of(jobs)
    assert (page["ptj_job_placement_cost{}"], page["ptj_job_placement_cost_lower_bound{}"]) == (8, 6)
    put(jobs, running_status(placement=placement().model_copy(update={"cost": "8", "gap": ""})))
    assert "ptj_job_placement_cost_lower_bound{}" not in page_of(jobs)


async def test_the_wait_of_a_queued_job_and_the_gpus_of_the_cluster_as_the_operator_sees_them() -> None:
    world = World(4, nodes=2, work=1e9)
    world.submit(elastic("job", 2))
    await world.run(20)
    operator = world.operators[0]
    page = operator.metrics.exposition().decode()
    assert "ptj_queue_wait_seconds_count 1.0" in page
    (count,) = (await operator.scheduler.gpu_capacities()).values()
    assert (count.free, count.allocated, count.unusable) == (0, 4, 0)
    world.submit(elastic("other", 2))
    await world.run(60)
    set_ready(world, "n1", ready=False)
    await world.run(5)
    (count,) = (await operator.scheduler.gpu_capacities()).values()
    assert count.free == 0
    assert count.allocated + count.unusable == 4
    assert "ptj_queue_wait_seconds_count 1.0" in operator.metrics.exposition().decode(), "the other job still waits"
