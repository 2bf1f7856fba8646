"""Steps of this runtime on a GPU against the estimates, whose constants were fitted to none of them."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.training import OptimizerSpec, TrainingSpec
from meshwright.layout import Layout
from meshwright.models.presets import published
from meshwright.planner.cost.accelerators import accelerator
from meshwright.planner.cost.estimate import estimate, machine_for
from meshwright.planner.units import GIB
from meshwright.planner.workload import TrainingJob

# `benchmarks/results/throughput-cuda.json`, one H200: tokens per second, and the most that the allocator held.
RUNS: list[tuple[str, int, int, dict[str, Any], float, float]] = [
    ("llama-3.2-1b", 8, 1, {}, 63_160, 60.7),
    ("llama-3.2-3b", 4, 2, {}, 25_319, 100.3),
    ("llama-3-8b", 2, 4, {"masterWeights": False}, 11_905, 100.1),
    ("llama-3-8b", 1, 8, {"activationCheckpointing": "Selective", "lossChunkTokens": 2048}, 10_318, 135.8),
]


@pytest.mark.parametrize(("model", "rows", "micro_batches", "training", "rate", "gibibytes"), RUNS)
def test_steps_on_one_h200(
    model: str, rows: int, micro_batches: int, training: dict[str, Any], rate: float, gibibytes: float
) -> None:
    spec = TrainingSpec.model_validate(
        {
            "steps": 8,
            "sequenceLength": 4096,
            "precision": "bf16",
            "activationCheckpointing": "None",
            "lossChunkTokens": 8192,
            "globalBatchSize": rows * micro_batches,
            "compile": True,
            "optimizer": OptimizerSpec(),
            **training,
        }
    )
    gpu = accelerator("NVIDIA H200")
    assert gpu is not None
    job = TrainingJob.from_parts(published(model), spec, ParallelismSpec(), 1)
    result = estimate(job.work, job.strategy(Layout(), micro_batches), machine_for(gpu, runtime=job.runtime))
    assert result.tokens_per_second == pytest.approx(rate, rel=0.03)
    assert result.memory.counted / GIB == pytest.approx(gibibytes, rel=0.03)
