"""The most activations that every rank of every schedule holds, in bytes of live tensors, against the closed forms."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.cost.activations import (
    layer_activations,
    weight_half_bytes_of_layer,
    weight_half_bytes_of_output,
)
from meshwright.planner.cost.memory import memory_by_stage
from meshwright.planner.cost.stages import stages_of
from meshwright.planner.workload import TrainingJob
from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.peak_memory import SavedPerStage, peak_memory
from meshwright.schedules.pipeline_layout import pipeline_layout
from tests.distributed.activation_cases import most_activations
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.parity.cases.pipeline import SCHEDULES
from tests.tiers import mostly_long

FP32 = 4
ROUGH = ("automatic zero bubble", "DualPipe")
"""Schedules whose plan tells the fullest rank alone: a search's order has no closed form, and DualPipe's first rank,
which has the model's end too, is counted as the last."""


def job_of(run: NativeRun) -> TrainingJob:
    return TrainingJob.from_parts(run.architecture, run.training, run.parallelism, run.data_parallel)


def kept_in_stages(run: NativeRun) -> list[SavedPerStage]:
    """Bytes of one micro-batch, from the closed forms that the planner has."""
    job = job_of(run)
    length = run.training.sequence_length
    tokens = run.training.global_batch_size // run.micro_batches * length
    model, precision = job.work.model, job.training.precision
    layer = layer_activations(model, False, length, 1, False, precision, job.fixed.fp8, job.runtime).kept
    left = weight_half_bytes_of_layer(model, False, 1, precision)
    stages = pipeline_layout(run.parallelism, run.pipeline, run.micro_batches, job.architecture, length).layers
    kept = [SavedPerStage(tokens * len(own) * layer, tokens * len(own) * left) for own in stages]
    # The final norm keeps its input, what it normed and a number a token, the product behind it its own input, and the
    # loss the logarithms of probabilities.
    output = FP32 * (3 * model.hidden_size + 1 + model.vocab_size)
    last = kept[-1]
    kept[-1] = SavedPerStage(
        last.forward + tokens * output, last.halfway + tokens * weight_half_bytes_of_output(model, 1, precision, None)
    )
    return kept


def planned(run: NativeRun) -> list[float]:
    """Bytes of each rank in a plan, which counts one micro-batch's probabilities among the logits."""
    job = job_of(run)
    work, strategy = job.work, job.strategy(run.layout, run.micro_batches)
    logits = FP32 * work.sequence_length * work.model.vocab_size
    stages = stages_of(work.model, strategy).every
    memories = memory_by_stage(work, strategy, job.runtime)
    return [memory.activations + logits * stage.output for memory, stage in zip(memories, stages, strict=True)]


def four_ranks(name: str, **more: Any) -> NativeRun:
    fields, _ = SCHEDULES[name]
    return small_run(pipeline=4, micro_batches=8, layers=8, hidden_size=64, parallelism=fields, **more)


@pytest.mark.parametrize("name", mostly_long(SCHEDULES, lambda name: name == "DualPipe"))
def test_every_rank_holds_as_many_activations_as_its_schedule_says(pool: RankPool, name: str) -> None:
    run = four_ranks(name)
    job, kept = job_of(run), kept_in_stages(run)
    pipeline = pipeline_layout(run.parallelism, 4, run.micro_batches, job.architecture, run.training.sequence_length)
    measured = pool.run(most_activations, run)
    assert measured == pytest.approx(peak_memory(pipeline.schedule, kept), rel=0.01)
    plan = planned(run)
    if name in ROUGH:
        assert max(measured) == pytest.approx(max(plan), rel=0.05)
    else:
        assert measured == pytest.approx(plan, rel=0.01)
