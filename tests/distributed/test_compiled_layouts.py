"""Compiled layers in parallel layouts: what goes around torch's graphs (stores, tallies, hooks) must be as without.

Layers run through torch's tracing and its split of forward and backward passes, but not through a code generator, which
takes many times as long and knows nothing of layouts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from meshwright.api.precision import Precision
from meshwright_worker.parallel import parallelize
from meshwright_worker.parallel.parallelize import compile_layers
from meshwright_worker.rank.task import RankTask
from tests.distributed.cases import Trained, trained
from tests.distributed.configs import small_run
from tests.distributed.mesh_cache import kept_mesh, uses_kept_mesh
from tests.distributed.rank_pool import RankPool
from tests.tiers import mostly_long

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "tensor without sequence": {"tensor": 2, "sequence": False},
    "tensor, chunked loss": {"tensor": 2, "training": {"loss_chunk_tokens": 12}},
    "asynchronous tensor": {"tensor": 2, "parallelism": {"tensor_overlap": True}},
    "1F1B": {"pipeline": 2},
    "ZB-H1": {"pipeline": 2, "parallelism": {"schedule": "ZBH1"}},
    "ZB-V": {"pipeline": 2, "layers": 4, "parallelism": {"schedule": "ZBV"}},
    "DualPipe": {"pipeline": 2, "micro_batches": 4, "parallelism": {"schedule": "DualPipe"}},
    "PipeDream-2BW": {"pipeline": 2, "clip": 0.0, "parallelism": {"schedule": "PipeDream2BW"}},
    "DDP": {"data": 2},
    "ZeRO-2": {"data": 2, "zero": 2, "replicas": {"strategy": "ZeRO"}},
    "ZeRO-3": {"data": 2, "zero": 3},
    "ring": {"context": 2},
    "Ulysses": {"context": 2, "method": "Ulysses"},
    "all-gather": {"context": 2, "method": "AllGather"},
    "mixture": {"mixture": "DeepSeek-V3"},
    "experts": {"data": 2, "expert": 2, "mixture": "Mixtral"},
    "experts, tensor": {"tensor": 2, "mixture": "DeepSeek-V2"},
    "experts, ZB-H1": {"pipeline": 2, "mixture": "DeepSeek-V3", "parallelism": {"schedule": "ZBH1"}},
    "dropout": {"training": {"dropout": 0.1, "attention_dropout": 0.1}},
    "documents": {"packing": "Documents"},
    "LoRA": {"training": {"lora": {"rank": 3, "targets": ["Query", "Down"]}}},
    "full checkpointing": {"training": {"activation_checkpointing": "Full"}},
    "selective checkpointing": {"training": {"activation_checkpointing": "Selective"}},
    "activation offload": {"training": {"activation_offload": True}},
    "re-materialization": {"pipeline": 2, "parallelism": {"rematerialize": True}},
    "islands": {"data": 2, "outer": {"method": "DiLoCo", "every_steps": 1}},
}


@uses_kept_mesh
def train_traced(task: RankTask, steps: int) -> Trained:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    whole = parallelize.compile_layers
    parallelize.compile_layers = partial(compile_layers, backend="aot_eager")
    try:
        with kept_mesh(task) as mesh:
            told = trained(task.run, mesh, steps)
        traced = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert (traced > 0) == task.run.training.compile, traced
        return told
    finally:
        parallelize.compile_layers = whole
        torch.compiler.reset()


@pytest.mark.parametrize("name", mostly_long(list(LAYOUTS), lambda name: name == "ZeRO-3"))
def test_compiled_layers_train_in_the_same_way(pool: RankPool, name: str) -> None:
    options = {"precision": Precision.FP64, "layers": 2, **LAYOUTS[name]}
    training = options.pop("training", {})
    plain = small_run(**options, training=training)
    compiled = small_run(**options, training={**training, "compile": True})
    steps = 2
    for got, want in zip(
        pool.run(train_traced, compiled, steps, timeout=600), pool.run(train_traced, plain, steps), strict=True
    ):
        assert [result.loss for result in got.results] == pytest.approx([r.loss for r in want.results], rel=1e-7)
        assert set(got.gradients) == set(want.gradients)
        for part in ("gradients", "parameters"):
            for tensor, value in getattr(want, part).items():
                error = float((getattr(got, part)[tensor] - value).abs().max() / (value.abs().max() or 1.0))
                assert error < 1e-6, (part, tensor, error)
