"""Runs with each learning-rate schedule: resumed in each phase, extended, on islands and in pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.manifest import read_manifest
from meshwright_worker.optimizers.learning_rate import learning_rate
from meshwright_worker.rank.task import Outcome
from tests.distributed.cases import Recorder, train_fully
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_recovery import losses, tensors_of

STABLE_THEN_DECAY = {"warmup_steps": 3, "decay": "SquareRoot", "decay_steps": 4}
PEAK = 1e-3


def run_of(steps: int, every: int = 100, **options: Any) -> NativeRun:
    return small_run(steps=steps, every=every, optimizer=STABLE_THEN_DECAY, **options)


def train(pool: RankPool, run: NativeRun, root: Path, text: Path, stop_after: int | None = None) -> Recorder:
    """The steps on rank 0 of a run that stops early, or ends."""
    stop = -1 if stop_after is None else 0
    (outcome, recorder), *_ = pool.run(train_fully, run, stop, stop_after, checkpoint_dir=root, data_dir=text)
    assert outcome is (Outcome.COMPLETE if stop_after is None else Outcome.STOPPED)
    recorded: Recorder = recorder
    return recorded


def rates(*recorders: Recorder) -> dict[int, float]:
    return {report.step: report.learning_rate for recorder in recorders for report in recorder.reports}


def assert_same_end(one: Path, other: Path, step: int) -> None:
    """Both directories have the same checkpoint of a step, bit by bit."""
    want, got = tensors_of(one, step), tensors_of(other, step)
    assert set(want) == set(got)
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert (
        read_manifest(CheckpointDirectory(one).path(step)).state
        == read_manifest(CheckpointDirectory(other).path(step)).state
    )


@pytest.mark.parametrize(
    "stopped",
    [
        pytest.param(2, id="warm-up", marks=pytest.mark.long),
        pytest.param(5, id="stable", marks=pytest.mark.long),
        pytest.param(6, id="border", marks=pytest.mark.long),
        pytest.param(8, id="decay"),
    ],
)
def test_a_run_resumed_in_any_phase_ends_bitwise_where_an_uninterrupted_one_does(
    pool: RankPool, tmp_path: Path, text: Path, stopped: int
) -> None:
    run = run_of(10)
    straight = train(pool, run, tmp_path / "straight", text)
    begun = train(pool, run, tmp_path / "stopped", text, stopped)
    resumed = train(pool, run, tmp_path / "stopped", text)
    assert resumed.began_at == stopped
    assert losses(begun) | losses(resumed) == losses(straight)
    assert rates(begun, resumed) == rates(straight)
    assert rates(straight)[6] == PEAK
    assert rates(straight)[10] == 0.0
    assert_same_end(tmp_path / "straight", tmp_path / "stopped", 10)


@pytest.mark.long
def test_a_run_extended_before_its_decay_is_bitwise_the_longer_run(pool: RankPool, tmp_path: Path, text: Path) -> None:
    """With `decaySteps`, an edit of `training.steps` changes no step that has been trained."""
    longer = train(pool, run_of(14), tmp_path / "longer", text)
    begun = train(pool, run_of(10), tmp_path / "extended", text, 6)
    extended = train(pool, run_of(14), tmp_path / "extended", text)
    assert losses(begun) | losses(extended) == losses(longer)
    assert rates(begun, extended) == rates(longer)
    assert_same_end(tmp_path / "longer", tmp_path / "extended", 14)


def test_a_run_extended_within_its_decay_returns_to_the_peak(pool: RankPool, tmp_path: Path, text: Path) -> None:
    begun = train(pool, run_of(10), tmp_path, text, 8)
    assert rates(begun)[8] == pytest.approx(PEAK * (1 - 0.5**0.5))
    extended = train(pool, run_of(14), tmp_path, text)
    found = rates(extended)
    assert [found[9], found[10]] == [PEAK, PEAK]
    assert found[12] == pytest.approx(PEAK * (1 - 0.5**0.5))
    assert found[14] == 0.0


def test_another_job_continues_a_finished_one_from_a_checkpoint_before_its_decay(
    pool: RankPool, tmp_path: Path, text: Path
) -> None:
    """What docs/learning-rate.md describes."""
    finished = train(pool, run_of(10, every=5), tmp_path / "finished", text)
    longer = train(pool, run_of(14), tmp_path / "longer", text)
    run = run_of(14)
    assert run.checkpoint is not None
    checkpoint = run.checkpoint.model_copy(update={"resume_from": "finished/step-00000005"})
    other = train(pool, run.model_copy(update={"checkpoint": checkpoint}), tmp_path / "other", text)
    assert other.began_at == 5
    assert losses(other) == {step: loss for step, loss in losses(longer).items() if step > 5}
    assert losses(finished)[5] == losses(longer)[5]
    assert losses(finished)[8] != losses(longer)[8]
    assert_same_end(tmp_path / "longer", tmp_path / "other", 14)


@pytest.mark.long
def test_a_run_shortened_to_begin_its_decay_now_is_bitwise_the_shorter_run(
    pool: RankPool, tmp_path: Path, text: Path
) -> None:
    shorter = train(pool, run_of(8), tmp_path / "shorter", text)
    begun = train(pool, run_of(100), tmp_path / "shortened", text, 4)
    ended = train(pool, run_of(8), tmp_path / "shortened", text)
    assert losses(begun) | losses(ended) == losses(shorter)
    assert_same_end(tmp_path / "shorter", tmp_path / "shortened", 8)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"data": 2, "outer": {"method": "LocalSGD", "every_steps": 5}}, marks=pytest.mark.long),
        {"data": 2, "outer": {"method": "DiLoCo", "every_steps": 5}},
        pytest.param(
            {"data": 2, "outer": {"method": "AsyncSGD", "every_steps": 5, "staleness": 0}}, marks=pytest.mark.long
        ),
        {"pipeline": 2, "micro_batches": 1, "clip": 0.0, "parallelism": {"schedule": "PipeDream"}},
    ],
    ids=["LocalSGD", "DiLoCo", "AsyncSGD", "PipeDream"],
)
def test_islands_and_asynchronous_pipelines_have_the_rates_of_the_schedule(
    pool: RankPool, tmp_path: Path, text: Path, options: dict[str, Any]
) -> None:
    run = run_of(10, **options)
    found = rates(train(pool, run, tmp_path, text))
    assert found == {step: learning_rate(step, 10, run.training.optimizer) for step in range(1, 11)}
