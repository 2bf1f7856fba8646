"""GPU time: every millisecond of every GPU of a job's pods is booked once, whatever order things happen in."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.api.goodput import GoodputStatus, TimeCause
from meshwright.api.parsing import parse_status
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_operator.decide import goodput
from meshwright_operator.decide.gpu_ledger import gpu_seconds_by_cause, unbooked_gpu_milliseconds
from meshwright_operator.decide.time_ledger import Seen, Steps, advance, begin
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.metrics.job_metrics import JobMetrics
from tests.operator.builders import NOW, ago, running_status
from tests.operator.support import JOBS
from tests.operator.test_elastic import edit, elastic
from tests.operator.test_goodput import FOREVER, kill_the_operator
from tests.operator.test_job_progress_metrics import page_of
from tests.operator.world import World

CAUSES = [cause for cause in TimeCause if cause not in ("RedoneSteps", "CheckpointStall", "Detecting")]


def seen(seconds: float, cause: str, gpus: int | None, steps: Steps | None = None, **more: bool) -> Seen:
    return Seen(now=NOW + timedelta(seconds=seconds), cause=cause, gpus=gpus, steps=steps, **more)


def book(*moments: Seen) -> GoodputStatus:
    ledger = begin(NOW, TimeCause.QUEUED)
    for moment in moments:
        ledger = advance(ledger, moment)
    return ledger


def gpu_seconds(ledger: GoodputStatus) -> dict[str, float]:
    return {entry.cause: entry.gpu_milliseconds / 1000 for entry in ledger.booked if entry.gpu_milliseconds}


def test_a_queued_job_spends_no_gpu_time_and_a_resized_one_that_of_its_size() -> None:
    ledger = book(
        seen(0, TimeCause.QUEUED, 0),
        seen(60, TimeCause.STARTING, 8),
        seen(90, TimeCause.TRAINING, 8, Steps(0)),
        seen(190, TimeCause.RESCALING, 4, Steps(100, seconds=1)),
        seen(200, TimeCause.TRAINING, 4, Steps(100, first=100)),
        seen(300, TimeCause.TRAINING, 4, Steps(150, first=100, seconds=2)),
    )
    assert gpu_seconds(ledger) == {"Starting": 240, "Training": 800 + 400, "Rescaling": 40}


def test_pods_that_come_while_steps_run_count_from_then_on() -> None:
    ledger = book(
        seen(0, TimeCause.STARTING, 4),
        seen(0, TimeCause.TRAINING, 4, Steps(0)),
        seen(10, TimeCause.TRAINING, 8, Steps(0)),
        seen(30, TimeCause.TRAINING, 8, Steps(10, seconds=3)),
    )
    assert gpu_seconds(ledger) == {"Training": 4 * 10 + 8 * 20}


def test_nothing_changes_without_a_booking_or_another_number() -> None:
    ledger = book(seen(0, TimeCause.STARTING, 8))
    assert advance(ledger, seen(50, TimeCause.STARTING, 8)) == ledger
    assert advance(ledger, seen(50, TimeCause.STARTING, None)) == ledger
    assert unbooked_gpu_milliseconds(ledger, NOW + timedelta(seconds=50)) == 400_000


def test_an_earlier_ledger_begins_with_the_first_number_that_is_seen() -> None:
    old = GoodputStatus(cause=TimeCause.STARTING, since=ago(100))
    ledger = advance(advance(old, seen(0, TimeCause.STARTING, 8)), seen(10, TimeCause.SUSPENDED, 0))
    assert gpu_seconds(ledger) == {"Starting": 80}
    assert GoodputStatus.model_validate(ledger.model_dump()) == ledger


@given(
    st.lists(
        st.tuples(st.integers(-5, 60), st.sampled_from(CAUSES), st.none() | st.integers(0, 16), st.booleans()),
        min_size=1,
        max_size=30,
    )
)
def test_the_sum_is_exact_for_any_sequence(moments: list[tuple[int, TimeCause, int | None, bool]]) -> None:
    """A moment of which nothing was written is not known later: if the clock is set back, it counts from the moment
    that was.
    """
    ledger, at, written, gpus, spent, step = begin(NOW, TimeCause.QUEUED), 0, 0, 0, 0, 0
    ledger = advance(ledger, seen(0, TimeCause.QUEUED, 0))
    for passed, cause, number, failed in moments:
        at, step = at + passed, step + 3  # the clock may be set back
        steps = Steps(step, seconds=1.5, stall_seconds=1) if cause is TimeCause.TRAINING else None
        before, ledger = ledger, advance(ledger, seen(at, cause, number, steps, failed=failed))
        if (ledger.gpus, ledger.gpus_since) != (before.gpus, before.gpus_since):
            spent, written = spent + gpus * max(0, at - written), max(at, written)
            gpus = gpus if number is None else number
        now = max(at, written)
        booked = sum(entry.gpu_milliseconds or 0 for entry in ledger.booked)
        unbooked = unbooked_gpu_milliseconds(ledger, NOW + timedelta(seconds=now))
        assert booked + unbooked == 1000 * (spent + gpus * (now - written))


def test_metrics_grow_between_reconciles_and_outlive_the_job_in_its_namespace() -> None:
    jobs, key = JobMetrics(), JobKey("default", "train")
    ledger = book(seen(0, TimeCause.QUEUED, 0), seen(10, TimeCause.STARTING, 8), seen(20, TimeCause.SUSPENDED, 0))
    status = running_status(goodput=ledger)
    record = jobs.record(key, "uid")
    record.put(status, None, 0.0, gpu_seconds={"Starting": 20.0})
    record.put(status, None, 1.0, gpu_seconds=goodput.gpu_seconds_by_cause(status, NOW + timedelta(seconds=99)))
    page = page_of(jobs)
    assert page['ptj_job_gpu_seconds_total{cause="Starting"}'] == 80
    assert page['ptj_namespace_gpu_seconds_total{cause="Starting"}'] == 60, "20 were before"
    jobs.forget(key)
    page = page_of(jobs)
    assert not [name for name in page if name.startswith("ptj_job_")]
    assert page['ptj_namespace_gpu_seconds_total{cause="Starting"}'] == 60


def test_every_cause_has_a_series_before_it_happens() -> None:
    """Prometheus counts no increase of a series' first value: a short restart would be missing in every `increase`."""
    jobs, key = JobMetrics(), JobKey("default", "train")
    status = running_status(goodput=book(seen(0, TimeCause.QUEUED, 0), seen(10, TimeCause.STARTING, 8)))
    jobs.record(key, "uid").put(status, None, 0.0, seconds={"Queued": 10.0}, gpu_seconds={"Starting": 80.0})
    page = page_of(jobs)
    for name in ("ptj_job_seconds_total", "ptj_job_gpu_seconds_total", "ptj_namespace_gpu_seconds_total"):
        assert page[f'{name}{{cause="Restarting"}}'] == 0, name
    jobs.forget(key)
    assert page_of(jobs)['ptj_namespace_gpu_seconds_total{cause="Restarting"}'] == 0


def test_gpu_time_of_a_start_is_counted_up_to_now_and_that_of_steps_up_to_the_last() -> None:
    starting = book(seen(0, TimeCause.STARTING, 8))
    status = ParallelTrainingJobStatus(goodput=starting)
    assert goodput.gpu_seconds_by_cause(status, NOW + timedelta(seconds=5)) == {"Starting": 40}
    status.goodput = advance(starting, seen(10, TimeCause.TRAINING, 8, Steps(0)))
    assert goodput.gpu_seconds_by_cause(status, NOW + timedelta(seconds=50)) == {"Starting": 80}


async def test_gpu_time_is_that_of_the_pods_through_a_suspension_and_restarts_of_the_operator() -> None:
    world = World(4, nodes=2, work=FOREVER)
    world.submit(elastic("job", 2))
    occupied = 0.0
    for second in range(160):
        if second in (40, 75):
            kill_the_operator(world)
        if second in (60, 100):
            edit(world, "job", suspend=second == 60)
        await world.tick()
        pods = [pod for name, pod in world.cluster.objects.items() if "/pods/" in name]
        occupied += sum(2 for pod in pods if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"))
    ledger = parse_status(world.cluster.objects[f"{JOBS}/job"]).goodput
    assert ledger is not None
    spent = gpu_seconds_by_cause(ledger, world.now)
    assert sum(spent.values()) == pytest.approx(occupied, rel=0.05), "counted from the pods themselves"
    assert occupied > 400
    assert not spent.get("Queued")
    assert spent.get("Suspended", 0) < 0.2 * occupied, "only while pods stop"
