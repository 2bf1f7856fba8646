"""The example of a module from outside the package, split by its plan, trains as in one process."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from meshwright.api.training import OptimizerSpec
from meshwright_worker.custom_module.trainer import CustomModuleTrainer
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.rank.task import RankTask
from meshwright_worker.rank.torchrun import task_from_environment
from tests.distributed.cases import whole_of
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool

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


def train_encoder(task: RankTask, zero: int) -> tuple[list[float], dict[str, torch.Tensor], int]:
    encoder = example()
    with join_mesh(task) as mesh:
        torch.manual_seed(0)
        module = encoder.Encoder(width=32).double()
        trainer = CustomModuleTrainer(
            module,
            encoder.PLAN,
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
            # Four in all, so that the same micro-batches drop the same numbers.
            parts = 4 // mesh.layout.data
            losses.append(trainer.step(step, list(zip(tokens.chunk(parts), targets.chunk(parts), strict=True))))
        parameters = {shard.name: whole_of(shard, shard.local) for shard in trainer.shards}
        return losses, parameters, sum(shard.local.numel() for shard in trainer.shards)


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> Any:
    (trained,) = pool.run(train_encoder, small_run(), 0)
    return trained


@pytest.mark.long  # as `test_custom_module_layouts` does with a module that has more of everything
@pytest.mark.parametrize(
    ("layout", "zero", "share"), [({"tensor": 2}, 0, 0.8), ({"tensor": 2, "data": 2}, 3, 0.4)], ids=str
)
def test_the_example_trains_as_in_one_process(
    pool: RankPool, alone: Any, layout: dict[str, int], zero: int, share: float
) -> None:
    losses, parameters, elements = alone
    assert min(losses) < losses[0]
    for got_losses, got, held in pool.run(train_encoder, small_run(**layout), zero):
        assert got_losses == pytest.approx(losses, rel=1e-12)
        assert set(got) == set(parameters)
        for name, tensor in got.items():
            # The bias of keys has no gradient but rounding, of which Adam makes steps of full size.
            if "key.bias" not in name:
                torch.testing.assert_close(tensor, parameters[name], rtol=1e-9, atol=1e-12)
        assert held < share * elements


def run_example(task: RankTask, *arguments: str) -> list[str]:
    """What the example's command logs on this rank, which is told of its place as torchrun tells it."""
    place = {"RANK": task.rank, "WORLD_SIZE": task.world_size, "MASTER_PORT": task.master_port}
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (place | {"MASTER_ADDR": task.master_address}).items():
                patch.setenv(name, str(value))
            patch.setattr(sys, "argv", ["encoder.py", *arguments])
            example().main()
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    return [line for line in lines if "loss" in line or "difference" in line]


def test_the_example_is_run_stopped_and_resumed(pool: RankPool, tmp_path: Path) -> None:
    more = ("--directory", str(tmp_path), "--steps", "12")
    split = ("--tensor", "2", "--data", "2", "--zero", "2", "--stop", "5")
    first, *others = pool.run(run_example, small_run(tensor=2, data=2), *split, *more)
    assert [line.split(":")[0] for line in first] == ["after step 5, held out"]
    assert others == [[], [], []]
    first, _ = pool.run(run_example, small_run(data=2), "--data", "2", "--zero", "1", *more)
    assert [line.split(" loss")[0] for line in first] == ["step 10", "after step 12, held out:"]


def test_the_example_checks_its_plan(pool: RankPool) -> None:
    first, _ = pool.run(run_example, small_run(tensor=2), "--tensor", "2", "--check")
    assert float(first[0].split()[3].rstrip(",")) < 1e-12


def test_a_script_that_no_launcher_started_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(data=2)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set: .*per-node 2`"):
        task_from_environment(run)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="needs 2 ranks, but there are 1: .*`replicas` 2"):
        task_from_environment(run)


@pytest.mark.parametrize(
    ("variables", "port"),
    [
        ({}, 2000),
        ({"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_USE_AGENT_STORE": "True"}, 2001),
        ({"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_USE_AGENT_STORE": "False"}, 2000),
    ],
    ids=["mpirun", "torchrun", "a job"],
)
def test_the_store_listens_on_a_port_that_is_its_own(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], port: int
) -> None:
    """In a job the agent keeps MASTER_PORT free for it, and no other port."""
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "2000"}
    for name, value in (place | variables).items():
        monkeypatch.setenv(name, value)
    assert task_from_environment(small_run()).master_port == port
