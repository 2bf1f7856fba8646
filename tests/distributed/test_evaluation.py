"""Evaluation while training: the same held-out loss in every layout, and no trace of it in training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.data import DataFormat, DataSpec, Packing
from meshwright.api.precision import Precision
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.data.corpus import CorpusError, split_held_out
from meshwright_worker.data.open_corpus import open_corpus
from meshwright_worker.rank.task import StepReport
from tests.distributed.cases import evaluate_first, train_fully
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.tiers import mostly_long

EVERY = {"evaluation": {"every_steps": 2, "samples": 10}}


def run_of(evaluated: bool = True, training: Mapping[str, Any] | None = None, **layout: Any) -> NativeRun:
    run = small_run(**layout, steps=5, training={**(EVERY if evaluated else {}), **(training or {})})
    return run.model_copy(update={"data": run.data.model_copy(update={"held_out": 0.2})})


def reports(pool: RankPool, run: NativeRun, text: Path) -> list[StepReport]:
    ranks = pool.run(train_fully, run, data_dir=text)
    found: list[StepReport] = ranks[0][1].reports
    for _, recorder in ranks:
        assert [r.evaluation_loss for r in recorder.reports] == [r.evaluation_loss for r in found]
    return found


@pytest.mark.parametrize(("stop_after", "evaluated"), [(4, [2]), (5, [2, 4, 5])])
def test_a_job_that_is_asked_to_stop_does_not_evaluate_first(
    pool: RankPool, text: Path, tmp_path: Path, stop_after: int, evaluated: list[int]
) -> None:
    """An evaluation may take longer than the pod is given. The last step's belongs to the result of the run."""
    ((_, recorder),) = pool.run(train_fully, run_of(), 0, stop_after, data_dir=text, checkpoint_dir=tmp_path)
    assert [report.step for report in recorder.reports] == list(range(1, stop_after + 1))
    assert [report.step for report in recorder.reports if report.evaluation_loss is not None] == evaluated
    assert recorder.checkpoints[-1] == stop_after


@pytest.fixture(scope="module")
def alone(pool: RankPool, text: Path) -> list[StepReport]:
    return reports(pool, run_of(), text)


@pytest.mark.parametrize(
    "layout",
    mostly_long(
        [
            {"data": 2, "zero": 2},
            {"tensor": 2, "data": 2, "zero": 3},
            {"tensor": 2, "pipeline": 2},
            {"pipeline": 2, "sequence": False},
        ],
        lambda layout: layout == {"tensor": 2, "pipeline": 2},
    ),
    ids=str,
)
def test_every_layout_has_the_same_evaluation(
    pool: RankPool, text: Path, alone: list[StepReport], layout: dict[str, Any]
) -> None:
    assert [report.step for report in alone if report.evaluation_loss is not None] == [2, 4, 5]
    for got, want in zip(reports(pool, run_of(**layout), text), alone, strict=True):
        assert (got.evaluation_loss is None) == (want.evaluation_loss is None)
        if want.evaluation_loss is not None:
            assert got.evaluation_loss == pytest.approx(want.evaluation_loss, rel=1e-5)
        assert got.loss == pytest.approx(want.loss, rel=1e-5)


def initial_loss(pool: RankPool, text: Path, fields: Mapping[str, Any], samples: int = 10, **layout: Any) -> float:
    evaluation = {"evaluation": {"every_steps": 2, "samples": samples}}
    run = small_run(**layout, precision=Precision.FP64, training=evaluation)
    run = run.model_copy(update={"data": run.data.model_copy(update={"held_out": 0.2, **fields})})
    losses: set[float] = {*pool.run(evaluate_first, run, data_dir=text)}
    (loss,) = losses
    return loss


SIZES = [
    {"data": 2, "batch": 8},
    {"data": 3, "batch": 12},
    {"data": 4, "batch": 16},
    {"data": 4, "batch": 32, "zero": 2},
    {"data": 3, "batch": 24, "micro_batches": 4},
    {"pipeline": 2, "data": 2, "batch": 24},
    {"tensor": 2, "context": 2, "batch": 6},
]


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("layout", mostly_long(SIZES, lambda layout: layout.get("batch") in (12, 32)), ids=str)
def test_no_size_and_no_batch_changes_what_is_evaluated(
    pool: RankPool, text: Path, layout: dict[str, Any], packing: Packing
) -> None:
    """An elastic job with `scaledBatch` has another batch at each size. 10 samples fill none of them."""
    data = {"packing": packing}
    alone = initial_loss(pool, text, data, batch=2)
    assert initial_loss(pool, text, data, **layout) == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("layout", [{"data": 3, "batch": 12}, {"data": 4, "batch": 32, "micro_batches": 4}], ids=str)
def test_neither_does_it_if_records_are_padded(pool: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    records = [{"prompt": "?" * (n % 5), "completion": "yes" * (1 + n % 4)} for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = {"format": DataFormat.PROMPT_COMPLETION, "pattern": "*.jsonl", "packing": Packing.TEXT}
    alone = initial_loss(pool, tmp_path, data, batch=2)
    assert initial_loss(pool, tmp_path, data, **layout) == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("batch", mostly_long([4, 8, 24], lambda batch: batch == 24))
def test_neither_does_it_with_a_corpus_for_each_island(pool: RankPool, tmp_path: Path, text: Path, batch: int) -> None:
    for island in range(2):
        shutil.copytree(text, tmp_path / f"island-{island}")
        (tmp_path / f"island-{island}" / f"z{island}.py").write_text(f"x{island} = {'1234567890' * 40}\n")
    federated = {"outer": {"method": "FedAvg", "every_steps": 2}, "data": 2, "micro_batches": 1}
    alone = initial_loss(pool, tmp_path, {}, samples=7, batch=2, **federated)
    assert initial_loss(pool, tmp_path, {}, samples=7, batch=batch, **federated) == pytest.approx(alone, rel=1e-12)


def test_a_pipeline_without_a_flush_drains_and_evaluates(pool: RankPool, text: Path) -> None:
    run = run_of(pipeline=2, clip=0.0, parallelism={"schedule": "PipeDream2BW"})
    found = reports(pool, run, text)
    assert [report.step for report in found] == [1, 2, 3, 4, 5]
    assert [report.step for report in found if report.evaluation_loss is not None] == [2, 4, 5]


def test_evaluation_leaves_no_trace_in_training(pool: RankPool, text: Path, alone: list[StepReport]) -> None:
    without = reports(pool, run_of(evaluated=False), text)
    assert [report.loss for report in without] == [report.loss for report in alone]
    sharded = {"data": 2, "zero": 2}
    evaluated = reports(pool, run_of(**sharded), text)
    without = reports(pool, run_of(evaluated=False, **sharded), text)
    assert [report.loss for report in without] == [report.loss for report in evaluated]


def test_evaluation_leaves_no_trace_in_delayed_scales(pool: RankPool, text: Path) -> None:
    fp8 = {"fp8": {"update": "Delayed", "history": 2}}
    evaluated = reports(pool, run_of(training=fp8), text)
    without = reports(pool, run_of(evaluated=False, training=fp8), text)
    assert [report.loss for report in without] == [report.loss for report in evaluated]


def test_the_last_documents_are_held_out(text: Path) -> None:
    corpus = open_corpus(DataSpec(claim_name="text", pattern="**/*.py"), str(text))
    trained, held = split_held_out(corpus, 0.3)
    assert len(trained) + len(held) == len(corpus)
    assert 0 < len(held) <= 0.3 * len(corpus) + 1
    assert trained.tokens(len(trained) - 1, len(trained))[0] == corpus.separator
    assert bytes(held.tokens(0, 14).astype("uint8")) == b"def function_6"
    with pytest.raises(CorpusError, match="`data.heldOut: 0.0001` holds out no document"):
        split_held_out(corpus, 0.0001)
