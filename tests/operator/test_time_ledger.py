"""The ledger of a job's time: each cause, and the exact sum for any sequence of observations."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.api.goodput import BookedTime, GoodputStatus, TimeCause
from meshwright.api.status import MAX_SAFE_INTEGER
from meshwright_operator.decide.time_ledger import Seen, Steps, advance, begin, seconds_by_cause
from meshwright_operator.timestamps import parse_time
from tests.operator.builders import NOW

IDLE_CAUSES = [cause for cause in TimeCause if cause not in ("Training", "RedoneSteps", "CheckpointStall", "Detecting")]


def seen(seconds: float, cause: str, steps: Steps | None = None, **more: object) -> Seen:
    return Seen(now=NOW + timedelta(seconds=seconds), cause=cause, steps=steps, **more)  # type: ignore[arg-type]


def book(*moments: Seen, furthest_step: int = 0) -> GoodputStatus:
    """The ledger of a job that was created at `NOW`."""
    ledger = begin(NOW, TimeCause.QUEUED, furthest_step)
    for moment in moments:
        ledger = advance(ledger, moment)
    return ledger


def booked(ledger: GoodputStatus) -> dict[str, float]:
    return {entry.cause: entry.milliseconds / 1000 for entry in ledger.booked}


def training(at: float, step: int, **fields: float) -> Seen:
    return seen(at, TimeCause.TRAINING, Steps(step, **fields))  # type: ignore[arg-type]


def test_a_start_lasts_until_its_first_step_began() -> None:
    ledger = book(seen(5, TimeCause.STARTING), training(40, 4, seconds=0.5), training(50, 24, seconds=0.5))
    assert booked(ledger) == {"Queued": 5, "Starting": 33, "Training": 2 + 10}


def test_time_in_one_cause_changes_nothing_until_it_ends() -> None:
    ledger = book(seen(5, TimeCause.SUSPENDED))
    assert advance(ledger, seen(500, TimeCause.SUSPENDED)) == ledger
    assert seconds_by_cause(ledger, NOW + timedelta(seconds=500)) == {"Queued": 5, "Suspended": 495}


def test_a_step_that_never_ends_is_the_detection_of_the_failure() -> None:
    ledger = book(seen(0, TimeCause.STARTING), training(10, 0), training(20, 10, seconds=1))
    assert advance(ledger, training(60, 10, seconds=1)) == ledger, "no step, no training"
    hung = seen(80, TimeCause.RESTARTING, Steps(12, seconds=1), failed=True, detection_seconds=50)
    assert booked(advance(ledger, hung)) == {"Starting": 10, "Training": 10 + 2, "Detecting": 58}


def test_without_the_time_of_steps_the_symptom_tells_how_long_detection_took() -> None:
    command = {"trains_unseen": True}
    ledger = book(seen(0, TimeCause.STARTING), seen(10, TimeCause.TRAINING, **command))
    ledger = advance(ledger, seen(40, TimeCause.TRAINING, **command))
    ledger = advance(ledger, seen(100, TimeCause.RESTARTING, failed=True, detection_seconds=25))
    assert booked(ledger) == {"Starting": 10, "Training": 65, "Detecting": 25}


def test_a_planned_end_detects_nothing() -> None:
    ledger = book(seen(0, TimeCause.STARTING), training(10, 10), seen(25, TimeCause.RESCALING, Steps(18, seconds=1)))
    ledger = advance(ledger, training(45, 20, first=18, seconds=1))
    assert booked(ledger) == {"Starting": 10, "Training": 15 + 2, "Rescaling": 18}


def test_steps_are_redone_up_to_the_furthest() -> None:
    ledger = book(
        seen(0, TimeCause.STARTING),
        training(0, 0),
        training(100, 100, seconds=1),
        seen(130, TimeCause.RESTARTING, Steps(105, seconds=1), failed=True),
        training(160, 60, first=50, seconds=1),
    )
    assert ledger.cause == TimeCause.REDONE_STEPS
    assert ledger.furthest_step == 105, "a step that was only seen at the verdict counts too"
    assert booked(ledger) == {"Training": 105, "Detecting": 25, "Restarting": 20, "RedoneSteps": 10}
    ledger = advance(ledger, training(220, 120, first=50, seconds=1))
    assert ledger.cause == TimeCause.TRAINING
    assert booked(ledger) == {"Training": 105 + 15, "Detecting": 25, "Restarting": 20, "RedoneSteps": 10 + 45}


def test_stalls_are_those_of_the_generation() -> None:
    ledger = book(seen(0, TimeCause.STARTING), training(0, 0), training(20, 10, stall_seconds=3))
    ledger = advance(ledger, training(40, 20, stall_seconds=5))
    assert booked(ledger) == {"Training": 35, "CheckpointStall": 5}
    ledger = advance(ledger, seen(40, TimeCause.RESTARTING, Steps(20, stall_seconds=5)))
    ledger = advance(ledger, training(50, 20, first=20))
    ledger = advance(ledger, training(60, 30, first=20, stall_seconds=2))
    assert booked(ledger) == {"Training": 35 + 8, "CheckpointStall": 5 + 2, "Restarting": 10}


def test_a_report_without_the_stalls_books_none_of_them_again() -> None:
    """While the loss is not finite there is no progress, and the next report has all stalls of the generation again."""
    ledger = book(seen(0, TimeCause.STARTING), training(0, 0), training(20, 10, stall_seconds=5))
    ledger = advance(ledger, training(30, 15))
    ledger = advance(ledger, training(40, 20, stall_seconds=6))
    assert booked(ledger) == {"Training": 34, "CheckpointStall": 6}


def test_a_run_that_is_over_before_a_step_is_seen() -> None:
    ledger = book(seen(3, TimeCause.STARTING), seen(30, "", Steps(20, seconds=1)))
    assert booked(ledger) == {"Queued": 3, "Starting": 7, "Training": 20}
    assert ledger.cause == ""


def test_a_generation_that_fails_before_a_step_is_seen() -> None:
    fails = seen(30, TimeCause.RESTARTING, Steps(20, seconds=1), failed=True, detection_seconds=2)
    assert booked(book(seen(3, TimeCause.STARTING), fails)) == {
        "Queued": 3,
        "Starting": 5,
        "Training": 20,
        "Detecting": 2,
    }


def test_a_clock_that_is_set_back_books_nothing_twice() -> None:
    ledger = book(seen(100, TimeCause.STARTING), seen(40, TimeCause.SUSPENDED), seen(60, TimeCause.STARTING))
    assert booked(ledger) == {"Queued": 100}
    assert booked(advance(ledger, seen(130, TimeCause.QUEUED))) == {"Queued": 100, "Starting": 30}


@pytest.mark.parametrize("since", [None, "yesterday"])
def test_a_damaged_ledger_goes_on(since: str | None) -> None:
    damaged = GoodputStatus(since=since, booked=[BookedTime(cause="Training", milliseconds=MAX_SAFE_INTEGER)])
    ledger = advance(damaged, seen(7, TimeCause.STARTING))
    ledger = advance(ledger, training(17, 10, seconds=1))
    assert booked(ledger) == {"Training": MAX_SAFE_INTEGER / 1000}
    assert ledger.model_validate(ledger.model_dump()) == ledger


def test_causes_of_a_later_version_are_kept() -> None:
    later = GoodputStatus(
        cause="Probing", since="2026-01-02T03:04:05Z", booked=[BookedTime(cause="Probing", milliseconds=5000)]
    )
    assert booked(advance(later, seen(7, TimeCause.STARTING))) == {"Probing": 12}


def test_a_job_that_had_finished_books_nothing_when_it_is_seen_to_have_finished_again() -> None:
    finished = book(seen(5, TimeCause.STARTING), training(40, 4, seconds=0.5), seen(50, "", Steps(24, seconds=0.5)))
    assert advance(finished, seen(90, "", Steps(24, seconds=0.5), failed=True)) == finished


Observation = tuple[int, str, Steps | None, bool, bool, float, bool]
"""Milliseconds, cause, steps, whether a command trains, whether it failed, detection, whether it is written."""
numbers = st.integers(0, 1000) | st.sampled_from([0, MAX_SAFE_INTEGER])
amounts = st.floats(-10, 1000) | st.sampled_from([0.0, float("nan"), float("inf"), 1e300])
observations = st.tuples(
    st.integers(-100_000, 200_000),
    st.sampled_from(["", *IDLE_CAUSES, "Training", "Training", "Training"]),
    st.none() | st.builds(Steps, numbers, numbers, amounts, amounts),
    st.booleans(),
    st.booleans(),
    amounts,
    st.booleans(),
)


@given(st.lists(observations, max_size=40))
def test_the_sum_is_exact_for_any_sequence(sequence: list[Observation]) -> None:
    written = begin(NOW, TimeCause.QUEUED)
    now = latest = NOW
    for milliseconds, cause, steps, unseen, failed, detection, writes in sequence:
        now += timedelta(milliseconds=milliseconds)
        ledger = advance(
            written,
            Seen(now=now, cause=cause, steps=steps, trains_unseen=unseen, failed=failed, detection_seconds=detection),
        )
        assert ledger.model_validate(ledger.model_dump()) == ledger, "the API server accepts it"
        before, after = booked(written), booked(ledger)
        assert all(after[known] >= before[known] for known in before), "time of a cause never gets less"
        since = parse_time(ledger.since)
        assert since is not None
        assert since >= (parse_time(written.since) or NOW)
        assert sum(entry.milliseconds for entry in ledger.booked) == (since - NOW) / timedelta(milliseconds=1)
        if writes:
            # What is not written is lost when the operator is killed, and computed again by the next one.
            written, latest = ledger, max(latest, now)
    assert (parse_time(written.since) or NOW) <= latest
    end = max(latest, now)
    if written.cause:
        total = sum(seconds_by_cause(written, end).values())
        assert total == pytest.approx((end - NOW).total_seconds(), abs=0.001)
