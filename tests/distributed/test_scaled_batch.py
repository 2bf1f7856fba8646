"""`elastic.scaledBatch`: resizes with another batch lose and repeat no sample, and equal one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.protocol.run_config import NativeRun
from meshwright.rules.elastic import resized
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.manifest import TrainingState, read_manifest
from meshwright_worker.rank.task import Outcome, StepReport
from tests.distributed.cases import train_fully
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.tiers import mostly_long

STEPS = 8
SIZES = [(2, 3), (3, 6), (1, STEPS)]
"""Replicas, and the step after which they stop."""


def scaled_run(replicas: int, rule: str, processes: int) -> NativeRun:
    """The run at a size, of two replicas with 8 sequences, on this many data-parallel processes."""
    base = small_run(data=2, steps=STEPS, every=100, batch=8, micro_batches=2)
    spec = ParallelTrainingJobSpec.model_validate(
        {
            "replicas": 2,
            "elastic": {"maxReplicas": 3, "scaledBatch": {"replicas": 2, "learningRate": rule}},
            "model": {"preset": "tiny"},
            "data": base.data.wire(),
            "training": base.training.wire(),
            "parallelism": {"tensor": 1, "pipeline": 1, "microBatches": 2},
            "workers": {"image": "worker", "gpusPerWorker": 1},
            "checkpoint": {"claimName": "c"},
        }
    )
    size = resized(spec, replicas)
    assert size is not None
    micro_batches = 2 * replicas // processes
    run = small_run(data=processes, steps=STEPS, every=100, batch=4 * replicas, micro_batches=micro_batches)
    return run.model_copy(update={"training": size.training})


def phases(pool: RankPool, root: Path, text: Path, rule: str, *, alone: bool) -> tuple[list[StepReport], TrainingState]:
    """The steps of a run that is resized twice, and its last checkpoint; `alone`: on one process throughout."""
    reports: list[StepReport] = []
    for replicas, last in SIZES:
        run = scaled_run(replicas, rule, 1 if alone else replicas)
        stop = {"stop_rank": 0, "stop_after": last} if last < STEPS else {}
        answers = pool.run(train_fully, run, *stop.values(), checkpoint_dir=root, data_dir=text)
        assert {outcome for outcome, _ in answers} == {Outcome.STOPPED if last < STEPS else Outcome.COMPLETE}
        reports += answers[0][1].reports
    return reports, read_manifest(CheckpointDirectory(root).path(STEPS)).state


@pytest.mark.parametrize(
    ("rule", "factors"),
    mostly_long(
        [("Linear", (1.0, 1.5, 0.5)), ("SquareRoot", (1.0, 1.5**0.5, 0.5**0.5))], lambda case: case[0] == "SquareRoot"
    ),
)
def test_a_resized_run_equals_one_process_with_the_same_batches_and_rates(
    pool: RankPool, tmp_path: Path, text: Path, rule: str, factors: tuple[float, ...]
) -> None:
    resized_reports, state = phases(pool, tmp_path / "resized", text, rule, alone=False)
    alone_reports, alone_state = phases(pool, tmp_path / "alone", text, rule, alone=True)
    assert [report.step for report in resized_reports] == list(range(1, STEPS + 1))
    assert [report.samples for report in resized_reports] == [8, 16, 24, 36, 48, 60, 64, 68]
    for one, other in zip(resized_reports, alone_reports, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-5)
        assert one.learning_rate == other.learning_rate
    # The samples are those of an uninterrupted run with another batch: consecutive, and each used once.
    straight = small_run(data=1, steps=17, every=100, batch=4, micro_batches=1)
    pool.run(train_fully, straight, checkpoint_dir=tmp_path / "straight", data_dir=text)
    digest = read_manifest(CheckpointDirectory(tmp_path / "straight").path(17)).state.digest
    assert (state.samples, state.digest) == (alone_state.samples, alone_state.digest) == (68, digest)
    constant = scaled_run(2, "Constant", 2).training.optimizer.learning_rate
    rates = [scaled_run(replicas, rule, 1).training.optimizer.learning_rate / constant for replicas, _ in SIZES]
    assert rates == pytest.approx(factors)
