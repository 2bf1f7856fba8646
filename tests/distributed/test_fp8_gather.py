"""`training.fp8.allGather`: the same numbers bit by bit, with half of the bytes, on 2 and 4 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.precision import Precision
from meshwright.planner.cost.stages import stages_of
from meshwright.planner.cost.update_time import gradient_sync_bytes
from meshwright.planner.workload import TrainingJob
from meshwright.protocol.run_config import NativeRun
from tests.distributed.cases import Trained, count_a_step, train_on_random_tokens
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_compiled_layouts import train_traced
from tests.distributed.test_recovery import complete, tensors_of
from tests.tiers import mostly_long

STEPS = 3
LAYERS = 3
BF16 = 2


def run_of(*, gather: bool, fp8: dict[str, Any] | None = None, **options: Any) -> NativeRun:
    chosen = {**(fp8 or {}), **({"all_gather": True} if gather else {})}
    training = {**options.pop("training", {}), "fp8": chosen}
    return small_run(**{"zero": 3, "precision": Precision.BF16, **options}, training=training)


LAYOUTS: dict[str, dict[str, Any]] = {
    "2 replicas": {"data": 2},
    "4 replicas": {"data": 4},
    "fp32": {"data": 2, "precision": Precision.FP32},
    "uneven rows": {"data": 4, "hidden_size": 36, "heads": 2, "kv_heads": 2, "intermediate_size": 50},
    "ZeRO-2": {"data": 2, "zero": 2},
    "copies of shards": {"data": 4, "replicas": {"shard_size": 2}},
    "static scales": {"data": 2, "fp8": {"update": "Static", "weight_amax": 0.1}},
    "no master weights": {"data": 2, "training": {"master_weights": False}},
    "full checkpointing": {"data": 2, "training": {"activation_checkpointing": "Full"}},
    "selective checkpointing": {"data": 2, "training": {"activation_checkpointing": "Selective"}},
    "activation offload": {"data": 2, "training": {"activation_offload": True}},
    "each micro-batch": {"data": 2, "replicas": {"reduce_every_micro_batch": True}},
    "tensor": {"data": 2, "tensor": 2},
    "tensor without sequence": {"data": 2, "tensor": 2, "sequence": False},
    "context": {"data": 2, "context": 2},
    "pipeline": {"data": 2, "pipeline": 2},
    "split backward": {"data": 2, "pipeline": 2, "zero": 2, "parallelism": {"schedule": "ZBH1"}},
    "experts": {"data": 4, "expert": 2, "mixture": "DeepSeek-V3", "micro_batches": 1},
    "compiled": {"data": 2, "layers": 1, "training": {"compile": True}},
    "compiled, tensor": {"data": 2, "tensor": 2, "layers": 1, "training": {"compile": True}},
}


@pytest.mark.parametrize("layout", mostly_long(LAYOUTS, lambda layout: layout == "2 replicas"))
def test_losses_and_gradients_are_the_same_bits(pool: RankPool, layout: str) -> None:
    train = train_traced if layout.startswith("compiled") else train_on_random_tokens
    results: list[list[Trained]] = [
        pool.run(train, run_of(gather=gather, **LAYOUTS[layout]), STEPS, timeout=480) for gather in (False, True)
    ]
    for want, got in zip(*results, strict=True):
        assert [result.loss for result in got.results] == [result.loss for result in want.results]
        assert [result.gradient_norm for result in got.results] == [result.gradient_norm for result in want.results]
        assert len(want.results) == STEPS
        for kind in ("gradients", "parameters"):
            one, other = getattr(want, kind), getattr(got, kind)
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one), kind


@pytest.mark.parametrize("ranks", mostly_long([2, 4], lambda ranks: ranks == 4))
def test_gathers_send_one_byte_for_each_weight_of_a_product(pool: RankPool, ranks: int) -> None:
    """Of norms and the tables two bytes; one all-reduce has the largest numbers of all weights."""
    before, after = (
        pool.run(count_a_step, run_of(gather=gather, data=ranks, micro_batches=1)) for gather in (False, True)
    )
    model = run_of(gather=True).architecture

    def planned(gather: bool) -> float:
        run = run_of(gather=gather, data=ranks, micro_batches=1)
        job = TrainingJob.from_parts(run.architecture, run.training, run.parallelism, run.data_parallel)
        strategy = job.strategy(run.layout, run.micro_batches)
        return gradient_sync_bytes(job.work, strategy, job.runtime, stages_of(model, strategy))

    weights = LAYERS * (model.attention_parameters + model.feed_forward_parameters)
    for plain, small in zip(before, after, strict=True):
        (calls, gathered), (same_calls, half) = (one.as_dict()[f"all-gather/{ranks}"] for one in (plain, small))
        assert (calls, gathered) == (2 * (LAYERS + 1), 2 * BF16 * model.parameters)
        assert (same_calls, gathered - half) == (calls, 2 * weights)
        assert plain.sent() - small.sent() == pytest.approx(planned(False) - planned(True), rel=0.02)
        (few, amount), (more, larger) = (one.as_dict()[f"all-reduce/{ranks}"] for one in (plain, small))
        assert (more - few, larger - amount) == (1, 7 * LAYERS * 4)
        assert plain.as_dict()[f"reduce-scatter/{ranks}"] == small.as_dict()[f"reduce-scatter/{ranks}"]


@pytest.mark.long
def test_a_run_goes_on_with_or_without_it(pool: RankPool, tmp_path: Path, text: Path) -> None:
    """Checkpoints have plain parameters, and a resumed run ends with the same bits."""
    runs = {gather: run_of(gather=gather, data=2, steps=6, every=10) for gather in (False, True)}
    complete(pool, runs[False], tmp_path / "straight", text)
    began = []
    for gather, stop_after in ((True, 2), (False, 4), (True, None)):
        stop = {"stop_rank": 0, "stop_after": stop_after} if stop_after is not None else {}
        answers = complete(pool, runs[gather], tmp_path / "resumed", text, **stop)
        began.append(answers[0][1].began_at)
    assert began == [0, 2, 4]
    want, got = tensors_of(tmp_path / "straight", 6), tensors_of(tmp_path / "resumed", 6)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
