"""Training steps on the device: the same bits twice, and the losses of the CPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from benchmarks._contests import OurLoop, random_tokens
from meshwright.api.data import Packing
from meshwright.api.precision import Precision
from meshwright.data.tokenizers import BYTE_SEPARATOR
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.data.batch import make_batch
from meshwright_worker.data.prefetch import pin_batch
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.warm_up import warm_up
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool

RUNS: dict[str, dict[str, Any]] = {
    "dense": {},
    "mixture": {"mixture": "Mixtral"},
    "compiled": {"training": {"compile": True}},
    "compiled, chunked loss": {"training": {"compile": True, "loss_chunk_tokens": 24}},
    "compiled, early updates": {"training": {"compile": True}, "optimizer": {"early_launch": True}},
    "fp8": {"training": {"fp8": {}}},
    "compiled fp8": {"training": {"fp8": {}, "compile": True}},
    "bf16 without master weights": {"training": {"master_weights": False}},
    "offloaded activations": {"training": {"activation_offload": True}},
    "packed documents in one kernel": {"training": {"varlen_attention": True}, "packing": Packing.DOCUMENTS},
}


def run_of(name: str, **changes: Any) -> NativeRun:
    options = {**RUNS[name], **changes}
    return small_run(micro_batches=2, precision=Precision.BF16, hidden_size=64, intermediate_size=96, **options)


def losses_of(task: RankTask, steps: int) -> list[float]:
    """The losses of some steps, each once the kernels have been used."""
    with join_mesh(task) as mesh:
        warm_up(task.run, mesh)
        loop = OurLoop(task.run, mesh)
        text = random_tokens(task.run.architecture, task.run.training, 0)
        return [loop.step(number, text) for number in range(1, steps + 1)]


@pytest.mark.parametrize("name", RUNS)
def test_the_same_steps_twice_give_the_same_bits(pool: RankPool, name: str) -> None:
    first, second = (pool.run(losses_of, run_of(name), 3, timeout=300)[0] for _ in range(2))
    assert [loss.hex() for loss in first] == [loss.hex() for loss in second]
    assert first[-1] < first[0]


@pytest.mark.parametrize("name", ["compiled", "compiled, chunked loss", "compiled, early updates", "compiled fp8"])
def test_compiled_steps_have_the_losses_of_others(pool: RankPool, name: str) -> None:
    """Also of steps after the first: what is compiled has all gradients."""
    training = {**RUNS[name]["training"], "compile": False}
    run, plain = run_of(name), run_of(name, training=training)
    got, want = (pool.run(losses_of, each, 5, timeout=300)[0] for each in (run, plain))
    assert got == pytest.approx(want, rel=5e-3)


@pytest.mark.parametrize("name", ["dense", "packed documents in one kernel"])
def test_a_step_waits_for_the_device_once(pool: RankPool, name: str) -> None:
    """When the sums of its results are read."""
    (waits,) = pool.run(waits_of_a_step, run_of(name), timeout=300)
    assert len(waits) == 1, waits


def waits_of_a_step(task: RankTask) -> list[str]:
    """What waited: file and line. To ask for such warnings gives one, too, which is not counted."""
    with join_mesh(task) as mesh:
        warm_up(task.run, mesh)
        trainer = OurLoop(task.run, mesh).trainer
        text = random_tokens(task.run.architecture, task.run.training, 0)
        batches = [pin_batch(make_batch(text, task.run.data, BYTE_SEPARATOR), mesh.device) for _ in range(2)]
        trainer.step(1, batches[0])
        torch.cuda.synchronize(mesh.device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            trainer.step(2, batches[1])
            torch.cuda.set_sync_debug_mode("default")
        return [f"{each.filename}:{each.lineno}" for each in caught if "called a synchronizing" in str(each.message)]
