"""Steps that are skipped, and runs that go back: `training.anomalies` on real ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.precision import Precision
from meshwright.api.training import AnomaliesSpec, AnomalyAction
from meshwright.protocol.messages import FailureKind
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.data.open_corpus import open_corpus
from meshwright_worker.data.sample_order import SampleDigest, SampleStream
from meshwright_worker.rank.task import Outcome
from tests.distributed.anomaly_cases import train_with_changed_losses
from tests.distributed.cases import Recorder
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_recovery import manifest_of, tensors_of
from tests.tiers import mostly_long

BATCH = 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp": {"data": 2},
    "zero3": {"data": 2, "zero": 3},
    "tp-pp-zero1": {"tensor": 2, "pipeline": 2, "data": 2, "zero": 1},
    "powersgd": {"data": 2, "replicas": {"compression": "PowerSGD", "compression_rank": 8}},
}

Answer = tuple[Outcome | FailureKind | None, str, Recorder]


def anomalous(spec: AnomaliesSpec, layout: str = "dp", steps: int = 10, every: int = 1, keep: int = 20) -> NativeRun:
    return small_run(**LAYOUTS[layout], steps=steps, every=every, keep=keep, training={"anomalies": spec})


def run_ranks(
    pool: RankPool, run: NativeRun, root: Path, text: Path, factors: Mapping[int, float], **arguments: Any
) -> list[Answer]:
    ranks = arguments.pop("ranks", range(16))
    answers: list[Answer] = pool.run(
        train_with_changed_losses, run, factors, ranks, *arguments.values(), checkpoint_dir=root, data_dir=text
    )
    return answers


def digest_of(run: NativeRun, text: Path, *parts: range) -> int:
    """The digest of a run that trained on these samples."""
    digest, training = SampleDigest(), run.training
    stream = SampleStream(open_corpus(run.data, str(text)), training.sequence_length, training.seed)
    for part in parts:
        digest.add(list(part), stream.rows(list(part)))
    return digest.value


SPIKES = AnomaliesSpec(spike=AnomalyAction.SKIP, window=8, spike_sigmas=20)
NOT_FINITE = AnomaliesSpec(non_finite=AnomalyAction.SKIP)


@pytest.mark.parametrize("layout", mostly_long(LAYOUTS, lambda layout: layout == "dp"))
@pytest.mark.parametrize(("spec", "factor"), [(NOT_FINITE, math.nan), (SPIKES, 100.0)], ids=["nan", "spike"])
def test_a_skipped_step_changes_nothing_and_all_go_on(
    pool: RankPool, tmp_path: Path, text: Path, layout: str, spec: AnomaliesSpec, factor: float
) -> None:
    run = anomalous(spec, layout)
    for outcome, _, recorder in run_ranks(pool, run, tmp_path, text, {7: factor}):
        assert outcome is Outcome.COMPLETE
        assert [report.step for report in recorder.reports if report.skipped] == [7]
    before, after, later = (tensors_of(tmp_path, step) for step in (6, 7, 8))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(after[name], later[name]) for name in after)
    state = manifest_of(tmp_path, 10).state
    assert (state.step, state.samples, state.skipped) == (10, 10 * BATCH, 1)
    assert state.digest == digest_of(run, text, range(10 * BATCH))


def test_a_early_update_that_is_skipped_has_never_been(pool: RankPool, tmp_path: Path, text: Path) -> None:
    """The device drops it, since the host has not seen the loss yet. Later steps are as if it had."""
    for early in (True, False):
        run = small_run(
            data=2,
            zero=1,
            steps=10,
            every=1,
            keep=20,
            precision=Precision.BF16,
            replicas={"strategy": "ZeRO"},
            training={"anomalies": NOT_FINITE, "sharded_masters": {}},
            optimizer={"early_launch": early},
        )
        for outcome, message, recorder in run_ranks(pool, run, tmp_path / str(early), text, {7: math.nan}):
            assert outcome is Outcome.COMPLETE, message
            assert [report.step for report in recorder.reports if report.skipped] == [7]
    for step in (7, 8, 10):
        got, want = (tensors_of(tmp_path / str(early), step) for early in (True, False))
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_one_replica_with_a_spike_is_enough(pool: RankPool, tmp_path: Path, text: Path) -> None:
    answers = run_ranks(pool, anomalous(SPIKES, "dp"), tmp_path, text, {7: 100.0}, ranks=[1])
    assert [[r.step for r in recorder.reports if r.skipped] for _, _, recorder in answers] == [[7], [7]]


def test_an_interrupted_run_skips_what_an_uninterrupted_one_does(pool: RankPool, tmp_path: Path, text: Path) -> None:
    """The window is part of a checkpoint: a run that began again at step 8 would have none to compare with."""
    run, spikes = anomalous(SPIKES), {5: 100.0, 9: 100.0}
    run_ranks(pool, run, tmp_path / "straight", text, spikes)
    run_ranks(pool, run, tmp_path / "broken", text, spikes, die_after=8)
    ((outcome, _, resumed), *_) = run_ranks(pool, run, tmp_path / "broken", text, spikes)
    assert outcome is Outcome.COMPLETE
    assert [report.step for report in resumed.reports if report.skipped][-1] == 9
    assert manifest_of(tmp_path / "broken", 10).state == manifest_of(tmp_path / "straight", 10).state
    want, got = tensors_of(tmp_path / "straight", 10), tensors_of(tmp_path / "broken", 10)
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_a_healthy_run_has_no_anomaly(pool: RankPool, tmp_path: Path, text: Path, seed: int) -> None:
    """From random weights, with the default threshold: warm-up, fast progress at the beginning, then a plateau."""
    spec = AnomaliesSpec(spike=AnomalyAction.FAIL, window=64)
    run = small_run(steps=300, every=300, seed=seed, training={"anomalies": spec}, optimizer={"warmup_steps": 20})
    ((outcome, message, recorder),) = run_ranks(pool, run, tmp_path, text, {})
    assert outcome is Outcome.COMPLETE, message
    assert not any(report.skipped for report in recorder.reports)


def test_too_many_skipped_steps_fail(pool: RankPool, tmp_path: Path, text: Path) -> None:
    spec = AnomaliesSpec(non_finite=AnomalyAction.SKIP, max_skipped=2)
    for kind, message, recorder in run_ranks(pool, anomalous(spec), tmp_path, text, dict.fromkeys((3, 4, 5), math.inf)):
        assert kind is FailureKind.ERROR
        assert "step 5: loss inf" in message
        assert "the 2 steps before were skipped" in message
        assert [report.step for report in recorder.reports] == [1, 2, 3, 4]


@pytest.mark.parametrize("layout", mostly_long(LAYOUTS, lambda layout: layout == "dp"))
def test_a_run_goes_back_and_takes_other_samples(pool: RankPool, tmp_path: Path, text: Path, layout: str) -> None:
    spec = AnomaliesSpec(spike=AnomalyAction.GO_BACK, window=8, spike_sigmas=20, go_back_steps=2)
    run = anomalous(spec, layout, every=2)
    for kind, message, _ in run_ranks(pool, run, tmp_path, text, {9: 100.0}):
        assert kind is FailureKind.WENT_BACK
        assert "went back to step 6, and continue" in message
    assert CheckpointDirectory(tmp_path).steps() == [6, 4, 2]
    for outcome, _, recorder in run_ranks(pool, run, tmp_path, text, {}):
        assert outcome is Outcome.COMPLETE
        assert recorder.began_at == 6
        assert [(r.step, r.samples) for r in recorder.reports] == [(s, (s + 3) * BATCH) for s in range(7, 11)]
    state = manifest_of(tmp_path, 10).state
    assert (state.step, state.samples) == (10, 13 * BATCH)
    assert state.anomalies is not None
    assert state.anomalies.went_back == 1
    assert state.digest == digest_of(run, text, range(6 * BATCH), range(9 * BATCH, 13 * BATCH))


def test_without_an_older_checkpoint_a_run_fails(pool: RankPool, tmp_path: Path, text: Path) -> None:
    spec = AnomaliesSpec(non_finite=AnomalyAction.GO_BACK)
    for kind, message, _ in run_ranks(pool, anomalous(spec, every=5), tmp_path, text, {3: math.nan}):
        assert kind is FailureKind.ERROR
        assert message.endswith("there is no checkpoint to go back to")
