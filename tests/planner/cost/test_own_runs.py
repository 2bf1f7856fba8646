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

# One H200, torch 2.11, `benchmarks/gpu.py`: seconds of a step, and the most that the allocator held at a time.
RUNS = [("llama-3.2-1b", {"globalBatchSize": 8}, 1, 0.5617, 60.7)]


@pytest.mark.parametrize(("model", "training", "micro_batches", "seconds", "gibibytes"), RUNS)
def test_steps_on_one_h200(
    model: str, training: dict[str, Any], micro_batches: int, seconds: float, gibibytes: float
) -> None:
    spec = TrainingSpec.model_validate(
        {
            "steps": 8,
            "sequenceLength": 4096,
            "precision": "bf16",
            "activationCheckpointing": "None",
            "lossChunkTokens": 4096,
            "compile": True,
            "optimizer": OptimizerSpec(),
            **training,
        }
    )
    gpu = accelerator("NVIDIA H200")
    assert gpu is not None
    job = TrainingJob.from_parts(published(model), spec, ParallelismSpec(), 1)
    result = estimate(job.work, job.strategy(Layout(), micro_batches), machine_for(gpu, runtime=job.runtime))
    assert result.seconds == pytest.approx(seconds, rel=0.03)
    assert result.memory.counted / GIB == pytest.approx(gibibytes, rel=0.03)
