"""The rule book decides what the worker runs, and the API's fields bound it."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.mixture import MixtureSpec
from meshwright.api.parallelism import ContextMethod, ParallelismSpec, PipelineSchedule
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload
from meshwright.models.architecture import Architecture
from meshwright.models.presets import resolve
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.search.runtime_rules import (
    allowed_offload,
    allowed_schedules,
    allowed_zero_stages,
    allows_shared_sequences,
    allows_split_experts,
    largest_value,
    parallelism_of,
    rules_of_worker,
)
from meshwright.planner.workload import TrainingJob
from tests.planner.builders import spec_of

MODEL = Architecture(layers=24, hidden_size=2048, intermediate_size=8192, heads=16, kv_heads=8, vocab_size=32000)
EXPERTS = MixtureSpec(experts=8, per_token=2, intermediate_size=1024, shared_intermediate_size=1024)
MIXTURE = MODEL.model_copy(update={"mixture": EXPERTS})
TIED = MODEL.model_copy(update={"tie_embeddings": True})


def job(**changes: Any) -> TrainingJob:
    """A job with a small dense model."""
    spec = spec_of(**changes)
    assert spec.model is not None
    return TrainingJob.of(spec, resolve(spec.model))


@pytest.mark.parametrize(
    ("model", "strategy", "expected"),
    [
        (MODEL, Strategy(tensor=8, pipeline=2, data=2, micro_batches=4), True),
        (MODEL, Strategy(tensor=16), False),
        (MODEL, Strategy(pipeline=4, micro_batches=3), False),
        (MODEL, Strategy(expert=2, data=2), False),
        (MIXTURE, Strategy(expert=2, data=2), True),
        (MIXTURE, Strategy(expert=2, data=2, zero_stage=1), False),
        (MIXTURE, Strategy(expert=2, data=2, zero_stage=2), True),
        (MIXTURE, Strategy(tensor=2, expert_tensor=False, sequence_parallel=False), False),
        (TIED, Strategy(pipeline=2, data=2, micro_batches=2, zero_stage=1), False),
        (TIED, Strategy(pipeline=2, data=2, micro_batches=2, zero_stage=3), True),
        (
            MODEL,
            Strategy(data=2, pipeline=2, micro_batches=4, zero_stage=1, schedule=PipelineSchedule.DUAL_PIPE),
            False,
        ),
        (MODEL, Strategy(pipeline=2, micro_batches=2, layer_split=(12, 12)), True),
        (MODEL, Strategy(pipeline=2, micro_batches=2, layer_split=(24, 0)), False),
        (MODEL, Strategy(micro_batches=65536), True),
        (MODEL, Strategy(micro_batches=65537), False),
        (MODEL, Strategy(context=2048), False),
        (MODEL, Strategy(context=4, context_method=ContextMethod.RING_ULYSSES, ulysses=2), True),
    ],
)
def test_a_strategy_is_checked_as_the_spec_that_it_becomes(
    model: Architecture, strategy: Strategy, expected: bool
) -> None:
    allows = rules_of_worker()
    assert allows(Workload(model, 8192, 64), strategy) is expected
    assert allows(Workload(model, 8192, 64), strategy) is expected, "the cached answer is the same"


def test_the_training_of_the_job_is_checked_for_each_way_to_save_memory() -> None:
    asked = job(training={"steps": 1, "globalBatchSize": 16, "sequenceLength": 128, "compile": True})
    allows = rules_of_worker(asked.parallelism, asked.training)
    selective = ActivationCheckpointing.SELECTIVE
    assert allows(asked.work, Strategy(tensor=2, data=2, checkpointing=ActivationCheckpointing.FULL))
    assert not allows(asked.work, Strategy(tensor=2, data=2, checkpointing=selective))
    assert allows(asked.work, Strategy(data=2, checkpointing=selective))


def test_the_largest_values_are_those_of_the_api() -> None:
    assert (largest_value("microBatches"), largest_value("context")) == (65536, 1024)


def test_fields_that_have_no_effect_are_left_out() -> None:
    plain = parallelism_of(Strategy(schedule=PipelineSchedule.ZB_H1, virtual_stages=2), ParallelismSpec(sequence=False))
    assert (plain.schedule, plain.virtual_stages, plain.sequence, plain.ulysses) == (None, None, False, None)


BASE = {"steps": 1, "globalBatchSize": 16, "sequenceLength": 128}


@pytest.mark.parametrize(
    ("training", "stages", "offload"),
    [
        ({}, (0, 1, 2, 3), 2),
        ({"optimizer": {"name": "Muon"}}, (0, 2, 3), 1),
        ({"masterWeights": False, "precision": "bf16"}, (0, 2, 3), 1),
        ({"outer": {"method": "DiLoCo"}}, (0, 1, 2, 3), 1),
        ({"parameterOffload": True}, (2, 3), 2),
    ],
)
def test_techniques_that_no_layout_allows_are_not_tried(
    training: dict[str, Any], stages: tuple[int, ...], offload: int
) -> None:
    asked = job(training={**BASE, **training})
    assert allowed_zero_stages(asked, range(4)) == stages
    assert len(allowed_offload(asked, (OptimizerOffload.NONE, OptimizerOffload.CPU))) == offload


def test_experts_are_not_split_over_islands() -> None:
    model = {"model": {"preset": "mixtral-8x7b"}}
    assert allows_split_experts(job(**model))
    assert not allows_split_experts(job(**model, training={**BASE, "outer": {"method": "DiLoCo"}}))
    assert not allows_split_experts(job())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"training": {**BASE, "attentionDropout": 0.1}}, False),
        ({"parallelism": {"contextMethod": "RingUlysses", "ulysses": 2, "context": 2}}, True),
    ],
)
def test_sequences_are_shared_where_the_job_allows_it(changes: dict[str, Any], expected: bool) -> None:
    asked = job(**changes)
    assert allows_shared_sequences(asked, asked.parallelism) is expected


def test_a_layer_split_allows_only_schedules_with_as_many_stages() -> None:
    asked = job(
        model={"preset": "llama-3-8b"},
        parallelism={"tensor": 1, "pipeline": 4, "layerSplit": [9, 8, 8, 7]},
    )
    layout = Strategy(pipeline=4, data=2).layout
    schedules = (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED, PipelineSchedule.ZB_V)
    assert allowed_schedules(asked, layout, schedules) == [PipelineSchedule.ONE_F_ONE_B]
    flat = job(model={"preset": "llama-3-8b"}, parallelism={"zeroStage": 1})
    both = (PipelineSchedule.ZB_H1, PipelineSchedule.DUAL_PIPE)
    assert allowed_schedules(flat, layout, both) == [PipelineSchedule.ZB_H1]
