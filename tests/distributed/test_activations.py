"""The most activations that every rank of every schedule holds, in bytes of live tensors, against the closed forms."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.cost.activations import layer_activations
from meshwright.planner.cost.halves import left_by_layer, left_by_output
from meshwright.planner.cost.memory import every_stage
from meshwright.planner.cost.stages import stages_of
from meshwright.planner.job import Job
from meshwright.protocol import RunConfig
from meshwright.schedules.division import divide
from meshwright.schedules.held import Kept, peaks
from tests.distributed.configs import small_run
from tests.distributed.held import most_activations
from tests.distributed.pool import RankPool
from tests.parity.cases.pipeline import SCHEDULES
from tests.tiers import mostly_long

FP32 = 4
ROUGH = ("automatic zero bubble", "DualPipe")
"""Schedules whose plan tells the fullest rank alone: a search's order has no closed form, and DualPipe's first rank,
which has the model's end too, is counted as the last."""


def job_of(run: RunConfig) -> Job:
    assert run.architecture is not None
    assert run.training is not None
    return Job.made(run.architecture, run.training, run.parallelism, run.data_parallel)


def kept_in_stages(run: RunConfig) -> list[Kept]:
    """Bytes of one micro-batch, from the closed forms that the planner has."""
    job = job_of(run)
    assert run.training is not None
    length = run.training.sequence_length
    tokens = run.training.global_batch_size // run.micro_batches * length
    model, numbers = job.work.model, job.numbers
    layer = layer_activations(model, False, length, 1, False, numbers, job.runtime).kept
    left = left_by_layer(model, False, 1, numbers)
    stages = divide(run.parallelism, run.pipeline, run.micro_batches, job.architecture, length).layers
    kept = [Kept(tokens * len(own) * layer, tokens * len(own) * left) for own in stages]
    # The final norm keeps its input, what it normed and a number a token, the product behind it its own input, and the
    # loss the logarithms of probabilities.
    output = FP32 * (3 * model.hidden + 1 + model.vocab)
    last = kept[-1]
    kept[-1] = Kept(last.forward + tokens * output, last.halfway + tokens * left_by_output(model, 1, numbers, None))
    return kept


def planned(run: RunConfig) -> list[float]:
    """Bytes of each rank in a plan, which counts one micro-batch's probabilities among the logits."""
    job = job_of(run)
    work, choices = job.work, job.choices(run.layout, run.micro_batches)
    logits = FP32 * work.sequence_length * work.model.vocab
    stages = stages_of(work.model, choices).every
    memories = every_stage(work, choices, job.runtime)
    return [memory.activations + logits * stage.output for memory, stage in zip(memories, stages, strict=True)]


def four_ranks(name: str, **more: Any) -> RunConfig:
    fields, _ = SCHEDULES[name]
    return small_run(pipeline=4, micro_batches=8, layers=8, hidden_size=64, parallelism=fields, **more)


@pytest.mark.parametrize("name", mostly_long(SCHEDULES, lambda name: name in ("ZB-H2", "DualPipe")))
def test_every_rank_holds_as_many_activations_as_its_schedule_says(pool: RankPool, name: str) -> None:
    run = four_ranks(name)
    job, kept = job_of(run), kept_in_stages(run)
    assert run.training is not None
    division = divide(run.parallelism, 4, run.micro_batches, job.architecture, run.training.sequence_length)
    measured = pool.run(most_activations, run)
    assert measured == pytest.approx(peaks(division.schedule, kept), rel=0.01)
    plan = planned(run)
    if name in ROUGH:
        assert max(measured) == pytest.approx(max(plan), rel=0.05)
    else:
        assert measured == pytest.approx(plan, rel=0.01)
