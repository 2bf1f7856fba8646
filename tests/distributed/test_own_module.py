"""A module from outside the package, split by its plan, trains as in one process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from meshwright.api.training import OptimizerSpec
from meshwright_worker.mesh import joined
from meshwright_worker.own.plan import ParallelPlan
from meshwright_worker.own.trainer import OwnTrainer
from meshwright_worker.task import RankTask
from tests.distributed.cases import whole_of
from tests.distributed.configs import small_run
from tests.distributed.pool import RankFailedError, RankPool

EXAMPLE = Path(__file__).parents[2] / "examples/own_module/encoder.py"
STEPS, ROWS = 4, 8


def example() -> ModuleType:
    if "own_encoder" not in sys.modules:
        spec = importlib.util.spec_from_file_location("own_encoder", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["own_encoder"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["own_encoder"])
    return sys.modules["own_encoder"]


def train_encoder(
    task: RankTask, zero: int, plan: ParallelPlan | None = None
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    encoder = example()
    with joined(task) as mesh:
        torch.manual_seed(0)
        module = encoder.Encoder(width=32).double()
        trainer = OwnTrainer(
            module,
            plan or encoder.PLAN,
            encoder.masked_loss,
            mesh,
            steps=STEPS,
            optimizer=OptimizerSpec(learning_rate=1e-3),
            zero_stage=zero,
        )
        rows = ROWS // mesh.layout.data
        first = mesh.coordinates.data * rows
        losses = []
        for step in range(1, STEPS + 1):
            tokens, targets = (tensor[first : first + rows] for tensor in encoder.batch_of(step, ROWS))
            losses.append(trainer.step(step, list(zip(tokens.chunk(2), targets.chunk(2), strict=True))))
        parameters = {shard.name: whole_of(shard, shard.local) for shard in trainer.shards}
        return losses, parameters, sum(shard.local.numel() for shard in trainer.shards)


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> Any:
    (trained,) = pool.run(train_encoder, small_run(), 0)
    return trained


@pytest.mark.parametrize(("layout", "zero"), [({"tensor": 2, "data": 2}, 0), ({"tensor": 2}, 0)], ids=str)
def test_a_split_module_trains_as_in_one_process(pool: RankPool, alone: Any, layout: dict[str, int], zero: int) -> None:
    losses, parameters, elements = alone
    assert losses[-1] < losses[0]
    for got_losses, got, held in pool.run(train_encoder, small_run(**layout), zero):
        assert got_losses == pytest.approx(losses, rel=1e-12)
        assert set(got) == set(parameters)
        for name, tensor in got.items():
            # The bias of keys has no gradient but rounding, of which Adam makes steps of full size.
            if "key.bias" not in name:
                torch.testing.assert_close(tensor, parameters[name], rtol=1e-9, atol=1e-12)
        assert held < 0.8 * elements


def test_zero_shards_a_module_of_ones_own(pool: RankPool, alone: Any) -> None:
    losses, _, elements = alone
    for got, _, held in pool.run(train_encoder, small_run(tensor=2, data=2), 3):
        # FSDP casts to the format that is asked for, which is fp32.
        assert got == pytest.approx(losses, rel=1e-5)
        assert held < 0.4 * elements


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (ParallelPlan(column=("layers.*.nothing",)), "`column`: no module is called `layers.*.nothing`"),
        (ParallelPlan(row=("layers.0.first_norm",)), "`row`: `layers.0.first_norm` is a LayerNorm, not a Linear"),
    ],
)
def test_a_plan_that_does_not_fit_says_so(pool: RankPool, plan: ParallelPlan, named: str) -> None:
    with pytest.raises(RankFailedError) as error:
        pool.run(train_encoder, small_run(tensor=2), 0, plan)
    assert named in str(error.value)
