"""The gradient norm counts each element of each parameter once, in every layout. Ranks are simulated one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from meshwright.api.parallelism import PipelineSchedule
from meshwright.rules.validation import run_problems
from meshwright_worker.trainer.train import build_trainer
from meshwright_worker.trainer.trainer import Trainer
from tests.distributed.configs import small_run
from tests.worker.simulated import simulated_mesh

SETS_OF_TWO = {"replicas": {"shard_size": 2}}
TWO_ISLANDS = {"outer": {"method": "DiLoCo", "every_steps": 2, "islands": 2}, "every": 2}
MIXTURE = {"mixture": "Mixtral"}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"data": 2, "tensor": 2}, id="ddp"),
        pytest.param({"data": 4, "zero": 3, **SETS_OF_TWO}, id="hsdp"),
        pytest.param({"data": 4, "zero": 1, **SETS_OF_TWO}, id="zero-1 in sets"),
        pytest.param({"data": 2, "pipeline": 2, "tie_embeddings": True}, id="tied"),
        pytest.param(
            {"pipeline": 2, "micro_batches": 4, "parallelism": {"schedule": PipelineSchedule.DUAL_PIPE}, "layers": 4},
            id="two directions",
        ),
        pytest.param({"data": 2, "context": 2, "zero": 2}, id="context"),
        pytest.param({"data": 4, "expert": 2, **MIXTURE}, id="experts"),
        pytest.param({"data": 4, "expert": 2, "zero": 3, **MIXTURE}, id="experts, fsdp"),
        pytest.param({"data": 4, "expert": 2, "tensor": 2, "zero": 2, **MIXTURE}, id="experts, widths"),
        pytest.param({"data": 4, "zero": 3, **TWO_ISLANDS}, id="islands"),
    ],
)
def test_each_element_is_counted_once(options: dict[str, Any]) -> None:
    run = small_run(**options)
    assert not run_problems(run)
    islands = run.islands
    elements: dict[str, int] = {}
    counted: Counter[str] = Counter()
    for rank in range(run.layout.world_size):
        with simulated_mesh(run, rank) as mesh, torch.random.fork_rng():
            trainer = build_trainer(run, mesh, draw=False)
            assert isinstance(trainer, Trainer)
            for shard in trainer.shards:
                elements[shard.name] = shard.shape.numel()
                counted[shard.name] += shard.local.numel() * shard.counted
    # Each island has a norm of its own.
    assert dict(counted) == {name: count * islands for name, count in elements.items()}
