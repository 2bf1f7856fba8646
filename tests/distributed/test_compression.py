"""Compressed gradients: each method against what is written about it, and against training without it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.data import DataFormat
from meshwright.api.precision import Precision
from tests.distributed.cases import train_fully
from tests.distributed.compression_cases import compress, gradients_and_rest, power_sgd, sum_of, top_k, true_sums
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_recovery import complete, losses, tensors_of
from tests.tiers import mostly_long

RANKS, STEPS = 3, 6
RUN = small_run(data=RANKS, batch=12)
SFT = DataFormat.PROMPT_COMPLETION


def compressed(pool: RankPool, dtype: torch.dtype = torch.float64, **options: Any) -> list[torch.Tensor]:
    first, *others = pool.run(compress, RUN, options, STEPS, dtype, timeout=240)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    return first


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("density", mostly_long([0.01, 0.2, 1.0], lambda density: density == 0.2))
def test_top_k_sends_the_largest_and_keeps_the_rest(pool: RankPool, density: float) -> None:
    got = compressed(pool, compression="TopK", compression_density=density)
    for one, want in zip(got, top_k(RANKS, STEPS, density), strict=True):
        assert relative(one, want) < 1e-12


@pytest.mark.parametrize("rank", mostly_long([1, 3], lambda rank: rank == 3))
def test_power_sgd_follows_its_paper(pool: RankPool, rank: int) -> None:
    got = compressed(pool, compression="PowerSGD", compression_rank=rank)
    for one, want in zip(got, power_sgd(RANKS, STEPS, rank), strict=True):
        assert relative(one, want) < 1e-10


def test_power_sgd_of_full_rank_loses_nothing(pool: RankPool) -> None:
    got = compressed(pool, compression="PowerSGD", compression_rank=64)
    for one, want in zip(got, true_sums(RANKS, STEPS), strict=True):
        assert relative(one, want) < 1e-12


@pytest.mark.parametrize("options", [{"compression": "PowerSGD", "compression_rank": 64}, {"compression": "Int8"}])
def test_bf16_gradients_lose_what_bf16_does(pool: RankPool, options: dict[str, Any]) -> None:
    """Without master weights gradients are bf16, which has no QR decomposition and rounds scales to too little."""
    got = compressed(pool, torch.bfloat16, **options)
    for one, want in zip(got, true_sums(RANKS, STEPS), strict=True):
        assert 0 < relative(one.double(), want) < 3e-2


@pytest.mark.parametrize(
    ("name", "limit"), mostly_long([("FP16", 2e-3), ("BF16", 1e-2), ("Int8", 2e-2)], lambda case: case[0] != "FP16")
)
def test_short_formats_round_little_even_where_gradients_are_tiny(pool: RankPool, name: str, limit: float) -> None:
    """Gradients are about 1e-9 here, below the smallest number of fp16."""
    for one, want in zip(compressed(pool, torch.float32, compression=name), true_sums(RANKS, STEPS), strict=True):
        assert 0 < relative(one.double(), want) < limit


def test_gradients_at_the_end_of_fp32_stay_numbers(pool: RankPool) -> None:
    for rank in pool.run(compress, RUN, {"compression": "FP16"}, 1, torch.float32, 1e-27):
        assert relative(rank[0].double(), true_sums(RANKS, 1)[0] * 1e-27) < 1e-2


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "Int8"},
        {"compression": "TopK", "compression_density": 0.3},
        {"compression": "PowerSGD", "compression_rank": 2},
    ],
    ids=str,
)
def test_what_is_left_out_comes_later(pool: RankPool, options: dict[str, Any]) -> None:
    """With error feedback the sum of all steps is off by what one step leaves out, not by that of all steps."""
    got, want = compressed(pool, **options), true_sums(RANKS, STEPS)
    single = max(float((one - true).norm()) for one, true in zip(got, want, strict=True))
    assert float((sum_of(got) - sum_of(want)).norm()) < 2 * single


@pytest.mark.parametrize(
    ("name", "layout"),
    mostly_long(
        [
            ("TopK", {}),
            ("PowerSGD", {}),
            ("TopK", {"pipeline": 2, "micro_batches": 1, "parallelism": {"schedule": "PipeDream"}}),
        ],
        lambda case: not case[1],
    ),
    ids=str,
)
def test_steps_with_few_targets_neither_multiply_nor_lose_what_was_left_out(
    pool: RankPool, name: str, layout: dict[str, Any]
) -> None:
    """Losses are means over a step's targets, and so is what comes later: all that was left out is in the end there."""
    still = {"learning_rate": 1e-30, "weight_decay": 0.0}
    options: dict[str, Any] = {"data": 2, "precision": Precision.FP64, "clip": 0.0, "optimizer": still, **layout}
    replicas = {"bucket_elements": 1 << 20, "compression_rank": 2}
    runs = [small_run(**options, replicas={**replicas, "compression": one}) for one in ("None", name)]
    padded = [run.model_copy(update={"data": run.data.model_copy(update={"format": SFT})}) for run in runs]
    true, got = (pool.run(gradients_and_rest, run, 3) for run in padded)
    for rank, (sums, _) in enumerate(true):
        # Ranks of a stage have the same gradients, and each has left out a part of them.
        of_stage = [rest for other, rest in got if other.keys() == sums.keys()]
        assert len(of_stage) == 2
        assert all(rest[one].any() for rest in of_stage for one in ["layers.0.attention.query.weight"] if one in rest)
        for one, want in sums.items():
            assert relative(got[rank][0][one] + sum_of([rest[one] for rest in of_stage]), want) < 1e-12


@pytest.mark.parametrize("name", mostly_long(["Int8", "TopK", "PowerSGD"], lambda name: name == "PowerSGD"))
def test_a_resume_continues_with_the_error_feedback_bit_for_bit(
    pool: RankPool, tmp_path: Path, text: Path, name: str
) -> None:
    replicas = {"compression": name, "compression_density": 0.1, "bucket_elements": 4000}
    run = small_run(data=2, steps=6, every=3, micro_batches=1, replicas=replicas)
    (_, straight), *_ = complete(pool, run, tmp_path / "straight", text)
    complete(pool, run, tmp_path / "broken", text, stop_rank=0, stop_after=3)
    (_, resumed), *_ = complete(pool, run, tmp_path / "broken", text)
    assert resumed.began_at == 3
    assert losses(resumed) == {step: loss for step, loss in losses(straight).items() if step > 3}
    want, got = tensors_of(tmp_path / "straight", 6), tensors_of(tmp_path / "broken", 6)
    assert want.keys() == got.keys()
    assert all(torch.equal(tensor, got[key]) for key, tensor in want.items())
    left = [tensor for key, tensor in want.items() if key.startswith("compression.")]
    assert any(bool(tensor.any()) for tensor in left)


def test_another_layout_begins_with_nothing_left_out(pool: RankPool, tmp_path: Path, text: Path) -> None:
    replicas = {"compression": "TopK", "compression_density": 0.1}
    complete(pool, small_run(data=2, steps=6, every=3, replicas=replicas), tmp_path, text, stop_rank=0, stop_after=3)
    ranks = complete(pool, small_run(data=2, tensor=2, steps=6, every=3, replicas=replicas), tmp_path, text)
    assert [recorder.began_at for _, recorder in ranks] == [3] * 4
    names = {key.split(".")[1] for key in tensors_of(tmp_path, 6) if key.startswith("compression.")}
    # Of each tensor-parallel rank's buckets a digest of its own, none of them the old layout's.
    assert names
    assert not names & {key.split(".")[1] for key in tensors_of(tmp_path, 3) if key.startswith("compression.")}


@pytest.mark.long
@pytest.mark.slow
def test_short_formats_learn_as_fast_and_sparse_or_low_rank_gradients_nearly(pool: RankPool, text: Path) -> None:
    ends = {}
    for name in ("None", "FP16", "BF16", "Int8", "TopK", "PowerSGD"):
        replicas = {"compression": name, "compression_density": 0.1, "bucket_elements": 10000}
        run = small_run(data=2, steps=60, micro_batches=1, replicas=replicas)
        ((_, recorder), *_) = pool.run(train_fully, run, data_dir=text, timeout=280)
        last = losses(recorder)
        ends[name] = sum(last[step] for step in range(51, 61)) / 10
    assert ends["None"] < 4.0
    for name, allowed in {"FP16": 0.01, "BF16": 0.01, "Int8": 0.03}.items():
        assert ends[name] == pytest.approx(ends["None"], rel=allowed), ends
    # What is left out comes with later steps, so at first these lag: most of the way is enough.
    untrained = math.log(260)
    for name in ("TopK", "PowerSGD"):
        assert untrained - ends[name] > 0.7 * (untrained - ends["None"]), ends
