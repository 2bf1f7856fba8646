"""ZeRO-1 and -2 as published: bf16 parameters, fp32 master weights of own rows. What they compute, hold and send."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.precision import Precision
from meshwright.planner.cost.memory import worst_stage
from meshwright.planner.workload import TrainingJob
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.rank.task import Outcome
from tests.distributed.cases import Trained, count_a_step, load_only, train_fully, train_on_random_tokens
from tests.distributed.comm_counter import Traffic
from tests.distributed.configs import small_run
from tests.distributed.data_parallel_cases import Held, measure_memory
from tests.distributed.rank_pool import RankPool
from tests.distributed.sharded_masters_cases import Gathering, gathers_of_a_step
from tests.distributed.test_recovery import tensors_of
from tests.tiers import mostly_long

DEEP: dict[str, Any] = {"layers": 6, "hidden_size": 128, "intermediate_size": 256, "length": 8}
SMALL_BUCKETS = 4096


def masters(zero: int = 1, gradients: str = "bf16", **options: Any) -> NativeRun:
    replicas = {"strategy": "ZeRO", "bucket_elements": SMALL_BUCKETS, **options.pop("replicas", {})}
    training = {"sharded_masters": {"gradients": gradients}, **options.pop("training", {})}
    return small_run(zero=zero, precision=Precision.BF16, replicas=replicas, training=training, **options)


def train(pool: RankPool, run: NativeRun) -> Trained:
    return pool.run(train_on_random_tokens, run, 3, timeout=240)[0]


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """The tensors that are not equal bit by bit, with their error relative to the largest element."""
    assert one.keys() == other.keys()
    return {
        name: float((value - other[name]).abs().max() / other[name].abs().max())
        for name, value in one.items()
        if not torch.equal(value, other[name])
    }


ADAPTERS = {"lora": {"rank": 3, "targets": ["Query", "Gate"]}}


@pytest.mark.parametrize(
    ("zero", "training"),
    [
        (1, {}),
        pytest.param(2, {}, marks=pytest.mark.long),
        pytest.param(1, ADAPTERS, marks=pytest.mark.long, id="1-adapters"),
    ],
)
def test_fp32_gradients_give_the_bits_of_zero_3(pool: RankPool, zero: int, training: dict[str, Any]) -> None:
    """FSDP has fp32 masters of own rows too, and gathers bf16 parameters layer by layer."""
    ours = train(pool, masters(zero, "fp32", data=2, training=training))
    theirs = train(pool, small_run(data=2, zero=3, precision=Precision.BF16, training=training))
    # Stage 2 sums over replicas before it sums over micro-batches, so its sums are rounded otherwise.
    if zero == 1:
        assert different(ours.parameters, theirs.parameters) == {}
        assert [result.loss for result in ours.results] == [result.loss for result in theirs.results]
    assert max(different(ours.parameters, theirs.parameters).values(), default=0.0) < 1e-4


def test_fp32_gradients_give_the_bits_of_one_process(pool: RankPool) -> None:
    """Two replicas of one micro-batch against one process of two: the same sums. But one process casts what it looks up
    in its fp32 embedding, so it sums the embedding's gradient over tokens in fp32."""
    ours = train(pool, masters(1, "fp32", data=2, micro_batches=1, clip=0.0))
    one = train(pool, small_run(micro_batches=2, precision=Precision.BF16, clip=0.0))
    found = different(ours.gradients, one.gradients)
    assert set(found) == {"embedding.weight"}
    assert found["embedding.weight"] < 1e-2
    # What bf16 makes of the embedding's difference: 1e-4 on most CPUs, 3e-3 if they have products of bf16.
    assert max(different(ours.parameters, one.parameters).values()) < 1e-2


def test_gathers_that_overlap_the_next_step_change_no_bit(pool: RankPool) -> None:
    """Two buckets are under way when a step returns. An evaluation waits for them too."""
    overlapped: Gathering = pool.run(gathers_of_a_step, masters(data=2))[0]
    waited: Gathering = pool.run(gathers_of_a_step, masters(data=2, replicas={"overlap": False}))[0]
    assert overlapped.buckets == waited.buckets > 4
    assert (overlapped.left, waited.left) == (overlapped.buckets, 0)
    assert overlapped.most_under_way == waited.most_under_way == 2
    assert overlapped.losses == waited.losses
    assert different(overlapped.parameters, waited.parameters) == {}


def test_early_updates_change_no_bit(pool: RankPool) -> None:
    """Also of the losses and norms that are reported."""
    early, read_first = (train(pool, masters(data=2, optimizer={"early_launch": early})) for early in (True, False))
    assert early.results == read_first.results
    assert different(early.parameters, read_first.parameters) == {}


@pytest.mark.parametrize("ranks", mostly_long([2, 4], lambda ranks: ranks == 2))
@pytest.mark.parametrize(
    ("zero", "gradients", "whole", "shared"),
    [
        (1, "bf16", 4, 12),
        (2, "bf16", 2, 14),
        pytest.param(1, "fp32", 6, 12, marks=pytest.mark.long),
        pytest.param(2, "fp32", 2, 16, marks=pytest.mark.long),
    ],
)
def test_memory_follows_the_closed_form(
    pool: RankPool, zero: int, gradients: str, whole: int, shared: int, ranks: int
) -> None:
    """Live bytes between two micro-batches: arXiv 1910.02054, figure 1, and the planner's account of this runtime."""
    run = masters(zero, gradients, data=ranks, batch=16, **DEEP)
    held: Held = pool.run(measure_memory, run, timeout=240)[0]
    form = run.architecture.parameters * (whole + shared / ranks)
    assert held.between == pytest.approx(form, rel=0.05)
    assert held.at_update <= held.between * 1.05
    job = TrainingJob.from_parts(run.architecture, run.training, run.parallelism, run.data_parallel)
    account = worst_stage(job.work, job.strategy(run.layout, run.micro_batches), job.runtime)
    assert account.states == pytest.approx(form, rel=0.05)


@pytest.mark.parametrize("zero", mostly_long([1, 2], lambda zero: zero == 2))
def test_a_step_sends_half_of_what_fp32_parameters_take(pool: RankPool, zero: int) -> None:
    options: dict[str, Any] = {"data": 4, "micro_batches": 1, "zero": zero}
    ours: Traffic = pool.run(count_a_step, masters(**options), timeout=240)[0]
    today: Traffic = pool.run(
        count_a_step, small_run(**options, precision=Precision.BF16, replicas={"strategy": "ZeRO"}), timeout=240
    )[0]
    sizes: list[Counter[str]] = []
    for traffic in (ours, today):
        sizes.append(Counter())
        for (kind, _), size in traffic.payload.items():
            sizes[-1][kind] += size
    for kind in ("reduce-scatter", "all-gather"):
        assert sizes[0][kind] == sizes[1][kind] / 2 > 0
    assert sizes[0]["all-reduce"] == sizes[1]["all-reduce"]


@pytest.mark.long
def test_checkpoints_pass_between_sharded_and_other_masters(pool: RankPool, tmp_path: Path, text: Path) -> None:
    """The masters are what a checkpoint contains, so it is that of fp32 parameters."""
    kept: dict[str, Any] = {"every": 1, "keep": 9, "optimizer": {"warmup_steps": 1}}
    chain = [
        small_run(data=2, zero=1, steps=1, precision=Precision.BF16, **kept),
        masters(2, data=2, tensor=2, steps=2, **kept),
        masters(1, data=4, steps=3, replicas={"shard_size": 2}, **kept),
        small_run(data=4, zero=3, steps=4, precision=Precision.BF16, **kept),
        masters(1, data=1, steps=5, **kept),
    ]
    for number, run in enumerate(chain, start=1):
        if number > 1:
            want = tensors_of(tmp_path, number - 1)
            assert {tensor.dtype for tensor in want.values()} == {torch.float32}
            for step, tensors in pool.run(load_only, run, checkpoint_dir=tmp_path, data_dir=text, timeout=240):
                assert step == number - 1
                assert all(torch.equal(tensor, want[name]) for name, tensor in tensors.items())
        ((outcome, recorder), *_) = pool.run(train_fully, run, checkpoint_dir=tmp_path, data_dir=text, timeout=240)
        assert (outcome, recorder.began_at) == (Outcome.COMPLETE, number - 1)
