"""When checkpoints are due, as rank 0 decides, and which of them stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.api.checkpoint import CheckpointSpec, Interval, Retention, StoreSpec
from meshwright.protocol.messages import FailureHistory
from meshwright.rules.checkpoint_interval import auto_interval, best_interval_seconds, estimated_mtbf, mtbf_of_nodes
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.manifest import MANIFEST
from meshwright_worker.checkpoint.retention import removable
from meshwright_worker.checkpoint.schedule import (
    BUSY,
    MEASURE_SECONDS,
    PATIENCE_SECONDS,
    CheckpointSchedule,
    due_after,
    tier_bit,
)
from meshwright_worker.checkpoint.store import Tier

HISTORY = FailureHistory(failures=3, trained_seconds=36_000.0, nodes=16)
WALL = 1_000_000.0


def no_loss(step: int) -> None:
    """The evaluation loss of each checkpoint."""


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tier(path: Path, every: str | int) -> Tier:
    spec = CheckpointSpec(claim_name="c", **{"every_steps" if isinstance(every, int) else "every": every})
    return Tier(CheckpointDirectory(path), spec.retention_of(), spec.interval_of())


def schedule_of(clock: Clock, *tiers: Tier) -> CheckpointSchedule:
    return CheckpointSchedule(tiers, HISTORY, clock, lambda: WALL + clock.now)


def saved(path: Path, step: int, moment: float) -> None:
    """A complete checkpoint, as far as listing it needs."""
    directory = path / f"step-{step:08d}"
    directory.mkdir(parents=True)
    (directory / MANIFEST).write_text("{}")
    os.utime(directory / MANIFEST, (moment, moment))


def steps_saved(schedule: CheckpointSchedule, clock: Clock, tier: Tier, step_seconds: float, steps: int) -> list[int]:
    """The steps after which the first tier is due, if saves take no time."""
    found = []
    for step in range(1, steps + 1):
        flags = schedule.flags(False)
        clock.now += step_seconds
        if flags & tier_bit(0):
            schedule.begun([0], 0.0)
            schedule.saved(tier, step, 0.0)
            found.append(step)
    return found


def test_an_interval_in_time_is_due_after_the_nearest_step(tmp_path: Path) -> None:
    clock, every = Clock(), tier(tmp_path, "30s")
    assert steps_saved(schedule_of(clock, every), clock, every, 4.0, 30) == [7, 14, 21, 28]
    clock, every = Clock(), tier(tmp_path, "30s")
    assert steps_saved(schedule_of(clock, every), clock, every, 50.0, 4) == [2, 3, 4], (
        "the first step shows how long one takes"
    )


def test_intervals_in_steps_are_counted_and_not_told(tmp_path: Path) -> None:
    tiers = tier(tmp_path, 5), tier(tmp_path, 15), tier(tmp_path, "1s")
    assert [due_after(tiers, step) for step in (4, 5, 15, 30)] == [[], [0], [0, 1], [0, 1]]
    clock = Clock()
    schedule = schedule_of(clock, *tiers)
    clock.now = 100.0
    assert schedule.flags(False) == tier_bit(2)


def test_a_tier_without_the_step_that_training_goes_on_from_is_as_old_as_its_newest_checkpoint(tmp_path: Path) -> None:
    clock, volume, store = Clock(), tier(tmp_path / "volume", "1h"), tier(tmp_path / "store", "1h")
    saved(tmp_path / "volume", 40, WALL - 10)
    saved(tmp_path / "store", 10, WALL - 3000)
    schedule = schedule_of(clock, volume, store)
    schedule.resumed(40)
    clock.now = 900.0
    assert schedule.flags(False) == tier_bit(1)
    first, second = schedule.reports() or ()
    assert (first.step, first.saved_at, second.step) == (40, WALL - 10, 10)


def test_a_tier_that_has_none_is_due_at_once_unless_training_begins(tmp_path: Path) -> None:
    for step, due in ((0, 0), (7, tier_bit(0))):
        schedule = schedule_of(Clock(), tier(tmp_path, "1h"))
        schedule.resumed(step)
        assert schedule.flags(False) == due


@pytest.mark.parametrize(
    ("newest", "step", "due"),
    [(10, 20, [0]), (10, 23, [0]), (20, 20, []), (20, 23, []), (None, 7, []), (None, 10, [0]), (30, 20, [])],
)
def test_a_save_that_was_interrupted_is_overdue(tmp_path: Path, newest: int | None, step: int, due: list[int]) -> None:
    if newest is not None:
        saved(tmp_path, newest, WALL)
    schedule = schedule_of(Clock(), tier(tmp_path, 10), tier(tmp_path, "1h"))
    schedule.resumed(step)
    assert schedule.overdue(step) == due


def test_auto_measures_a_first_save_and_then_has_the_interval_of_the_formula(tmp_path: Path) -> None:
    clock, auto = Clock(), tier(tmp_path, "Auto")
    schedule = schedule_of(clock, auto)
    schedule.resumed(0)
    (first,) = schedule.reports() or ()
    assert first.interval_seconds is None
    assert "the first save is measured" in first.reason
    assert schedule.flags(False) == 0
    clock.now = MEASURE_SECONDS
    assert schedule.flags(False) == tier_bit(0)
    clock.now += 1.0
    schedule.begun([0], 2.0)
    clock.now += 30.0
    schedule.saved(auto, 9, 30.0)
    (after,) = schedule.reports() or ()
    mtbf = estimated_mtbf(3, 36_000.0 + clock.now, mtbf_of_nodes(16))
    assert after.interval_seconds == pytest.approx(best_interval_seconds(2.0, mtbf, 30.0))
    assert "stops steps for 2 s and is complete after 30 s" in after.reason
    assert "(3 in 10.0 h)" in after.reason
    assert schedule.reports() is None, "nothing has changed"


def test_more_failures_and_faster_saves_give_shorter_intervals() -> None:
    settings = {"durable_seconds": 5.0, "step_seconds": 1.0, "nodes": 8, "trained_seconds": 86_400.0}
    often = auto_interval(stall_seconds=1.0, failures=50, **settings)
    rarely = auto_interval(stall_seconds=1.0, failures=0, **settings)
    cheap = auto_interval(stall_seconds=0.01, failures=0, **settings)
    assert 5.0 <= often.seconds < rarely.seconds <= 86_400.0
    assert cheap.seconds < rarely.seconds
    slow = {**settings, "durable_seconds": 900.0}
    assert auto_interval(stall_seconds=0.001, failures=50, **slow).seconds == 900.0


def test_no_save_begins_while_one_is_in_progress_and_steps_wait_for_it_only_once(tmp_path: Path) -> None:
    clock, every, counted = Clock(), tier(tmp_path / "a", "10s"), tier(tmp_path / "b", 5)
    schedule = schedule_of(clock, every, counted)
    schedule.begun([0, 1], 0.1)
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        clock.now += seconds
        return False

    schedule.wait_before(4, True, wait)
    assert waited == []
    schedule.wait_before(5, True, wait)
    schedule.wait_before(10, True, wait)
    assert waited == [PATIENCE_SECONDS]
    assert schedule.flags(True) == BUSY
    assert all(one.saving_since == WALL for one in schedule.reports() or ())
    schedule.saved(every, 3, 40.0)
    schedule.saved(counted, 3, 40.0)
    assert all(one.saving_since is None for one in schedule.reports() or ())
    schedule.wait_before(15, True, lambda seconds: not waited.append(seconds))
    assert len(waited) == 2


def test_a_failure_is_reported_until_a_save_succeeds(tmp_path: Path) -> None:
    clock, every = Clock(), tier(tmp_path, "10s")
    schedule = schedule_of(clock, every)
    clock.now = 5.0
    schedule.failed(every, "the volume is full")
    clock.now = 15.0
    schedule.failed(every, "the volume is still full")
    (report,) = schedule.reports() or ()
    assert (report.error, report.failing_since) == ("the volume is still full", WALL + 5)
    schedule.saved(every, 7, 1.0)
    (report,) = schedule.reports() or ()
    assert (report.error, report.failing_since, report.step, report.saved_at) == ("", None, 7, WALL + 15)


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(2), {80, 90}),
        (Retention(1, seconds=36.0), {60, 70, 80, 90}),
        (Retention(1, every_steps=40), {40, 80, 90}),
        (Retention(1, every_steps=25), {30, 50, 80, 90}),
        (Retention(1, seconds=16.0, every_steps=50), {50, 80, 90}),
    ],
)
def test_what_any_rule_retains_stays(retention: Retention, kept: set[int]) -> None:
    steps = list(range(10, 100, 10))
    gone = removable(steps, retention, now=95.0, saved_at=float, evaluation_loss=no_loss)
    assert set(steps) - set(gone) == kept
    # One save after the other leaves the same.
    left: set[int] = set()
    for step in steps:
        left.add(step)
        left -= set(removable(left, retention, now=step + 5.0, saved_at=float, evaluation_loss=no_loss))
    assert left == kept


def test_a_checkpoint_whose_age_is_unknown_is_not_young() -> None:
    assert removable([1, 2, 3], Retention(1, seconds=1e9), 0.0, lambda step: None, no_loss) == [2, 1]


@pytest.mark.parametrize(("saved_at", "removed"), [(40.0, [1]), (40.5, [])])
def test_a_checkpoint_is_young_until_its_time_is_over(saved_at: float, removed: list[int]) -> None:
    assert removable([1, 2], Retention(1, seconds=60.0), 100.0, lambda step: saved_at, no_loss) == removed


def test_the_store_has_the_settings_of_the_volume_unless_it_has_its_own() -> None:
    spec = CheckpointSpec(uri="s3://b/x", every="30m", keep=3, keep_for="2d", keep_every_steps=1000)
    assert spec.interval_of(StoreSpec()) == Interval(seconds=1800.0)
    assert spec.retention_of(StoreSpec()) == Retention(3, 172_800.0, 1000)
    own = StoreSpec(every="Auto", keep=9, keep_for="1h", keep_every_steps=50)
    assert spec.interval_of(own).is_auto
    assert spec.retention_of(own) == Retention(9, 3600.0, 50)
    assert CheckpointSpec(claim_name="c").interval_of(StoreSpec(every_steps=200)) == Interval(steps=200)
