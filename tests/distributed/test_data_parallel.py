"""What each way of keeping replicas equal sends and holds, and that checkpoints pass between all of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.precision import Precision
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.rank.task import Outcome
from tests.distributed.cases import count_a_step, load_only, train_fully
from tests.distributed.comm_counter import Traffic
from tests.distributed.configs import small_run
from tests.distributed.data_parallel_cases import (
    Held,
    measure_memory,
    reductions_under_way,
    train_by_fsdp1,
)
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_recovery import tensors_of
from tests.tiers import mostly_long

WIDE: dict[str, Any] = {"layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512, "heads": 4}
ENGINES: dict[str, dict[str, Any]] = {
    "DDP": {"zero": 0},
    "ZeRO-1": {"zero": 1},
    "ZeRO-2": {"zero": 2, "replicas": {"strategy": "ZeRO"}},
    "FSDP2, ZeRO-2": {"zero": 2},
    "FSDP2, ZeRO-3": {"zero": 3},
    "HSDP": {"zero": 3, "replicas": {"shard_size": 2}},
}


def wide_run(ranks: int, micro_batches: int = 1, **options: Any) -> NativeRun:
    return small_run(data=ranks, micro_batches=micro_batches, batch=16, **WIDE, **options)


def parameters_of(run: NativeRun) -> int:
    return run.architecture.parameters


@pytest.mark.parametrize(
    ("engine", "micro_batches", "reduced", "scattered", "gathered"),
    [
        pytest.param("DDP", 1, 1, 0, 0, marks=pytest.mark.long),
        ("DDP", 4, 1, 0, 0),
        ("ZeRO-1", 4, 0, 1, 1),
        pytest.param("ZeRO-2", 1, 0, 1, 1, marks=pytest.mark.long),
        ("ZeRO-2", 4, 0, 4, 1),
        pytest.param("FSDP2, ZeRO-2", 1, 0, 1, 1, marks=pytest.mark.long),
        ("FSDP2, ZeRO-3", 1, 0, 1, 2),
        ("HSDP", 1, 0.5, 1, 2),
    ],
)
def test_a_step_sends_what_the_papers_say(
    pool: RankPool, engine: str, micro_batches: int, reduced: float, scattered: float, gathered: float
) -> None:
    """In units of the model's elements: an all-reduce counts as two in the ring's traffic, the others as one each.

    So DDP and ZeRO-1 send 2 (N - 1) / N of the model, ZeRO-3 sends 3 (N - 1) / N: 1.5 times as much.
    """
    run = wide_run(4, micro_batches, **ENGINES[engine])
    whole = parameters_of(run)
    traffic: Traffic = pool.run(count_a_step, run, timeout=240)[0]
    elements: Counter[str] = Counter()
    for (kind, _), size in traffic.payload.items():
        elements[kind] += size // 4
    # The step's agreement on a few numbers is an all-reduce too.
    assert elements["all-reduce"] == pytest.approx(reduced * whole, rel=0.02, abs=16)
    assert elements["reduce-scatter"] == pytest.approx(scattered * whole, rel=0.02)
    assert elements["all-gather"] == pytest.approx(gathered * whole, rel=0.02)


@pytest.mark.parametrize(
    ("engine", "whole", "shared"),
    [
        # Bytes a parameter in fp32: parameters 4, gradients 4, moments 8. Held whole, and split over N ranks.
        ("DDP", 16, 0),
        ("ZeRO-1", 4, 12),
        ("ZeRO-2", 4, 12),
        ("FSDP2, ZeRO-2", 0, 16),
        ("FSDP2, ZeRO-3", 0, 16),
    ],
)
@pytest.mark.parametrize("ranks", mostly_long([2, 4], lambda ranks: ranks == 2))
def test_memory_of_a_rank_follows_the_closed_form(
    pool: RankPool, engine: str, whole: int, shared: int, ranks: int
) -> None:
    """Live bytes as the optimizer begins (arXiv 1910.02054, figure 1)."""
    run = wide_run(ranks, **ENGINES[engine])
    held: Held = pool.run(measure_memory, run, timeout=240)[0]
    want = parameters_of(run) * (whole + shared / ranks)
    assert held.at_update == pytest.approx(want, rel=0.05)


@pytest.mark.parametrize("layout", [{"data": 2}, {"data": 2, "pipeline": 2}, {"data": 2, "micro_batches": 4}], ids=str)
def test_buckets_are_summed_while_backward_runs(pool: RankPool, layout: dict[str, Any]) -> None:
    for early, calls in pool.run(reductions_under_way, small_run(**layout, replicas={"bucket_elements": 4000})):
        assert early == calls > 2
    late = {"bucket_elements": 4000, "overlap": False}
    for early, calls in pool.run(reductions_under_way, small_run(**layout, replicas=late)):
        assert early == 0 < calls


def test_stage_2_frees_gradients_between_micro_batches(pool: RankPool) -> None:
    """Stage 1 has all gradients after the first micro-batch, stage 2 its part and the bucket under way."""
    peaks = {}
    for engine in ("ZeRO-1", "ZeRO-2"):
        options = ENGINES[engine]
        options = {**options, "replicas": {**options.get("replicas", {}), "bucket_elements": 8192}}
        run = wide_run(2, 4, **options)
        peaks[engine] = pool.run(measure_memory, run, timeout=240)[0].between
    whole = parameters_of(wide_run(2))
    assert peaks["ZeRO-1"] == pytest.approx(whole * (4 + 4 + 4), rel=0.05)
    assert peaks["ZeRO-2"] < whole * (4 + 4 + 2) * 1.2


@pytest.mark.parametrize(
    ("strategy", "zero", "precision", "clip", "limit"),
    mostly_long(
        [
            (*strategy, *numbers)
            for strategy in (("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 0))
            # FSDP1's own clipping takes norms in fp32 alone.
            for numbers in ((Precision.FP64, 0.0, 1e-10), (Precision.FP32, 0.1, 1e-5))
        ],
        lambda case: (case[0] == "FULL_SHARD") == (case[2] is Precision.FP32),
    ),
)
def test_names_of_fsdp1_mean_what_fsdp1_does(
    pool: RankPool, strategy: str, zero: int, precision: Precision, clip: float, limit: float
) -> None:
    run = small_run(data=2, zero=zero, replicas={"strategy": strategy}, clip=clip, precision=precision)
    for ours, theirs in pool.run(train_by_fsdp1, run, strategy, timeout=240):
        assert set(ours) == set(theirs)
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=limit)


@pytest.mark.long
def test_checkpoints_pass_from_each_way_to_every_other(pool: RankPool, tmp_path: Path, text: Path) -> None:
    """ZeRO-1 over tensor parallelism, ZeRO-3, ZeRO-2 in a pipeline, DDP, HSDP: each goes on where the last stopped."""
    chain: list[dict[str, Any]] = [
        {"data": 2, "tensor": 2, **ENGINES["ZeRO-1"]},
        {"data": 4, **ENGINES["FSDP2, ZeRO-3"]},
        {"data": 2, "pipeline": 2, **ENGINES["ZeRO-2"]},
        {"data": 2, **ENGINES["DDP"]},
        {"data": 3, "batch": 12, **ENGINES["ZeRO-1"]},
        {"data": 4, **ENGINES["HSDP"]},
    ]
    for number, options in enumerate(chain, start=1):
        run = small_run(**options, steps=number, every=1, keep=9, optimizer={"warmup_steps": 1})
        if number > 1:
            want = tensors_of(tmp_path, number - 1)
            for step, tensors in pool.run(load_only, run, checkpoint_dir=tmp_path, data_dir=text, timeout=240):
                assert step == number - 1
                assert all(torch.equal(tensor, want[name]) for name, tensor in tensors.items())
        ((outcome, recorder), *_) = pool.run(train_fully, run, checkpoint_dir=tmp_path, data_dir=text, timeout=240)
        assert (outcome, recorder.began_at) == (Outcome.COMPLETE, number - 1)
