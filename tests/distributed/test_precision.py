"""Number formats that round, in several layouts: what all ranks decide alike, how close they stay to one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.precision import Precision
from tests.distributed.cases import Trained, train_fully, train_on_random_tokens
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_parity import largest_error
from tests.tiers import mostly_long

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp-sp": {"tensor": 2},
    "pp-dp": {"pipeline": 2, "data": 2},
    "zero3": {"data": 2, "zero": 3},
    "tp-pp-zero2": {"tensor": 2, "pipeline": 2, "data": 2, "zero": 2},
}
# Gradients of the first losses overflow at this scale, and no longer after it was halved a few times.
OVERFLOWS = {"precision": Precision.FP16, "training": {"loss_scale": {"initial": 2**24, "growth_interval": 3}}}


def one_process(pool: RankPool, steps: int, **options: Any) -> Trained:
    (trained,) = pool.run(train_on_random_tokens, small_run(**options), steps)
    return trained


@pytest.mark.parametrize("name", mostly_long(LAYOUTS, lambda name: name == "pp-dp"))
def test_fp16_skips_the_same_steps_in_every_layout(pool: RankPool, name: str) -> None:
    want = one_process(pool, 6, **OVERFLOWS)
    skipped = [result.skipped for result in want.results]
    assert skipped[0]
    assert not all(skipped)
    for rank in pool.run(train_on_random_tokens, small_run(**LAYOUTS[name], **OVERFLOWS), 6):
        assert [result.skipped for result in rank.results] == skipped
        assert largest_error(rank.gradients, want.gradients) <= 2e-2
        for got, expected in zip(rank.results, want.results, strict=True):
            assert got.loss == pytest.approx(expected.loss, rel=2e-3)


def test_a_skipped_step_changes_nothing(pool: RankPool) -> None:
    before = one_process(pool, 0, **OVERFLOWS)
    after = one_process(pool, 1, **OVERFLOWS)
    assert after.results[0].skipped
    assert all(torch.equal(before.parameters[name], after.parameters[name]) for name in before.parameters)


FEEDBACK: list[dict[str, Any]] = [
    {"compression": "Int8"},
    {"compression": "TopK", "compression_density": 0.5},
    {"compression": "PowerSGD", "compression_rank": 8},
]


@pytest.mark.parametrize("replicas", mostly_long(FEEDBACK, lambda replicas: replicas["compression"] == "TopK"), ids=str)
def test_an_overflow_leaves_what_compression_left_out_as_it_was(pool: RankPool, replicas: dict[str, Any]) -> None:
    plain = pool.run(train_on_random_tokens, small_run(data=2, **OVERFLOWS), 8)
    ranks = pool.run(train_on_random_tokens, small_run(data=2, replicas=replicas, **OVERFLOWS), 8)
    skipped = [result.skipped for result in plain[0].results]
    assert skipped[0]
    for rank in ranks:
        assert [result.skipped for result in rank.results] == skipped


def test_what_compression_left_out_follows_the_loss_scale(pool: RankPool) -> None:
    losses = []
    for interval in (1, 1000):
        # Powers of two round nothing, so only a residue in an old scale's unit tells the two apart.
        scale = {"loss_scale": {"initial": 2**6, "growth_interval": interval}}
        replicas = {"compression": "TopK", "compression_density": 0.05}
        run = small_run(data=2, precision=Precision.FP16, replicas=replicas, training=scale)
        losses.append([result.loss for result in pool.run(train_on_random_tokens, run, 6)[0].results])
    # Products of CPUs with fp16 instructions round at other places: 1e-5. Residuals in an old unit make 3e-4.
    assert losses[0] == pytest.approx(losses[1], rel=5e-5)


def test_fp16_resumes_with_its_scale(pool: RankPool, tmp_path: Path, text: Path) -> None:
    run = small_run(tensor=2, steps=5, every=2, **OVERFLOWS)
    losses = []
    for directory, deaths in (("straight", [None]), ("broken", [5, None])):
        for die_after in deaths:
            answers = pool.run(
                train_fully, run, -1, None, die_after, checkpoint_dir=tmp_path / directory, data_dir=text
            )
        losses.append({report.step: report.loss for report in answers[0][1].reports})
    assert {step: losses[0][step] for step in losses[1]} == losses[1]


@pytest.mark.parametrize("name", mostly_long(["tp-sp", "zero3", "tp-pp-zero2"], lambda name: name == "tp-sp"))
def test_bf16_without_masters_follows_one_process(pool: RankPool, name: str) -> None:
    options: dict[str, Any] = {"precision": Precision.BF16, "training": {"master_weights": False}}
    want = one_process(pool, 5, **options)
    assert {tensor.dtype for tensor in want.parameters.values()} == {torch.bfloat16}
    for rank in pool.run(train_on_random_tokens, small_run(**LAYOUTS[name], **options), 5):
        assert largest_error(rank.gradients, want.gradients) <= 5e-2
        for got, expected in zip(rank.results, want.results, strict=True):
            assert got.loss == pytest.approx(expected.loss, rel=3e-3)
