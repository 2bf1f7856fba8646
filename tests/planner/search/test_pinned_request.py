"""A pinned request keeps what the job states, and decides what its spec leaves out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.models.presets import resolve
from meshwright.planner.cluster.limits import ClusterLimits
from meshwright.planner.cost.accelerators import ACCELERATORS
from meshwright.planner.cost.estimate import machine_for
from meshwright.planner.search.best_first import ranked_layouts, search
from meshwright.planner.search.errors import plan_error
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.spec_request import pinned_request
from meshwright.planner.workload import TrainingJob
from tests.planner.builders import spec_of

MACHINE = machine_for(ACCELERATORS["H100-SXM5-80GB"])
TRAINING = {"steps": 10, "globalBatchSize": 32, "sequenceLength": 2048, "precision": "bf16"}


def spec(**changes: Any) -> ParallelTrainingJobSpec:
    """A job with a model of a billion parameters and four replicas."""
    base = {"model": {"preset": "llama-3.2-1b"}, "replicas": 4, "training": TRAINING}
    return spec_of(**{**base, "workers": {"image": "w", "gpusPerWorker": 4}, **changes})


def request(
    asked: ParallelTrainingJobSpec, *, machine: bool = True, limits: ClusterLimits | None = None
) -> SearchRequest:
    """The pinned request of a job."""
    assert asked.model is not None
    return pinned_request(asked, TrainingJob.of(asked, resolve(asked.model)), MACHINE if machine else None, limits)


def test_replicas_are_kept_and_stated_degrees_too() -> None:
    stated = {"tensor": 2, "pipeline": 2, "microBatches": 8, "schedule": "1F1B", "zeroStage": 3}
    best = search(request(spec(parallelism=stated))).best.strategy
    assert (best.tensor, best.pipeline, best.data, best.micro_batches) == (2, 2, 4, 8)
    assert (best.schedule, best.zero_stage) == (PipelineSchedule.ONE_F_ONE_B, 3)


def test_the_first_layout_that_fits_determines_the_gpus() -> None:
    result = search(request(spec()))
    best = result.best.strategy
    assert (best.data, best.pipeline, best.tensor) == (4, 1, 1), "the model fits on one GPU"
    assert {one.strategy.world_size for one in result.ranked} == {4}


def test_workers_are_filled() -> None:
    best = search(request(spec(replicas=2))).best.strategy
    assert best.world_size % 4 == 0


def test_without_a_machine_the_first_that_fits_is_taken() -> None:
    limits = ClusterLimits(8, 8, {80_000 << 20: 64})
    found = ranked_layouts(request(spec(), machine=False, limits=limits))
    assert len(found) == 1
    assert found[0].strategy.data == 4
    assert found[0].memory.total <= limits.memory_for(4)


def test_too_few_gpus_give_the_layout_that_fits_on_one_of_them() -> None:
    limits = ClusterLimits(2, 2, {80_000 << 20: 2})
    found = ranked_layouts(request(spec(), limits=limits))
    assert [one.strategy.world_size for one in found] == [4]
    tiny = ClusterLimits(8, 8, {1 << 30: 64})
    assert ranked_layouts(request(spec(), limits=tiny)) == []


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({}, None),
        ({"parallelism": {"context": 2}}, 2),
        ({"training": {**TRAINING, "attentionDropout": 0.1}}, 1),
        ({"parallelism": {"schedule": "PipeDream2BW", "pipeline": 2}}, 1),
    ],
    ids=["open", "stated", "attention dropout", "asynchronous"],
)
def test_the_context_degree_is_fixed_where_sequences_are_not_shared(
    changes: dict[str, Any], context: int | None
) -> None:
    assert request(spec(**changes)).pins.context == context


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"microBatches": 4}, r"Raise `replicas`, .*It fits with `parallelism.microBatches: 1`"),
        (
            {"batch": 1024},
            "with 1 micro-batch needs .*It fits with `parallelism.dataParallel.reduceEveryMicroBatch: true`",
        ),
    ],
)
def test_what_full_gradients_do_not_leave_room_for_is_told(changes: dict[str, int], told: str) -> None:
    degrees = {name: value for name, value in changes.items() if name != "batch"}
    asked = spec(
        model={"preset": "qwen3-32b"},
        replicas=64,
        training={**TRAINING, "globalBatchSize": changes.get("batch", 256), "activationCheckpointing": "Full"},
        parallelism={"tensor": 1, "pipeline": 1, "context": 1, "zeroStage": 3, **degrees},
    )
    assert re.search(told, str(plan_error(request(asked))))


@pytest.mark.parametrize("size", [{"replicas": 64}, {"replicas": 1, "gpus": 64}])
def test_a_step_of_one_micro_batch_may_be_the_only_one_that_fits(size: dict[str, int]) -> None:
    """FSDP has full gradients between micro-batches: here 122 GiB."""
    asked = spec(
        model={"preset": "qwen3-32b"},
        training={**TRAINING, "globalBatchSize": 256},
        parallelism={"tensor": 1, "pipeline": 1, "context": 1, "zeroStage": 3},
        **size,
    )
    best = search(request(asked)).best
    assert (best.strategy.data, best.strategy.micro_batches) == (64, 1)
    assert best.estimate.memory.total < MACHINE.gpu.memory
