"""For what an elastic job is planned anew: numbers of GPUs, and specs with open degrees."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.rules.replan import MAX_BUDGETS, budgets, open_specs, replanned_spec
from meshwright.rules.validation import check_spec
from tests.rules.test_elastic import spec


@pytest.mark.parametrize(
    ("elastic", "least_world_size", "expected"),
    [
        ({}, 8, [6, 4, 2]),
        ({"minGpus": 3}, 8, [6, 4]),
        ({"minGpus": 7}, 8, []),
        ({}, 2, []),
        ({}, 3, [2]),
    ],
)
def test_a_job_is_planned_for_entire_workers_below_its_smallest_size(
    elastic: dict[str, Any], least_world_size: int, expected: list[int]
) -> None:
    job = spec(elastic={"replan": True, **elastic})
    assert job.workers.gpus_per_worker == 2
    assert budgets(job, least_world_size, 0) == expected


@pytest.mark.parametrize("left", [0, 2, 154, 510, 512, 10_000])
def test_of_many_numbers_of_gpus_a_few_are_planned_for_and_those_that_are_left(left: int) -> None:
    found = budgets(spec(elastic={"replan": True}), 512, left)
    assert found == sorted(set(found), reverse=True)
    assert (found[0], found[-1]) == (510, 2)
    assert len(found) <= MAX_BUDGETS
    assert left in found or not 2 <= left <= 510


def test_stated_degrees_are_open_and_the_tensor_degree_is_kept_if_it_fits() -> None:
    job = spec(elastic={"replan": True}, parallelism__zeroStage=1, parallelism__tensorOverlap=True)
    kept, free = open_specs(job, 4)
    assert (kept.parallelism.tensor, free.parallelism.tensor) == (job.parallelism.tensor, None)
    for one in (kept, free):
        open_degrees = (one.parallelism.pipeline, one.parallelism.micro_batches, one.parallelism.zero_stage)
        assert open_degrees == (None, None, None)
        assert (one.replicas, one.gpus, one.elastic) == (1, 4, None)
        assert check_spec(one) == []
    assert not free.parallelism.tensor_overlap
    assert [one.parallelism.tensor for one in open_specs(job, 1)] == [None]


def test_what_depends_on_degrees_is_left_out_of_the_spec_that_runs() -> None:
    job = spec(
        elastic={"replan": True},
        parallelism__pipeline=2,
        parallelism__layerSplit=[1, 3],
        parallelism__dataParallel={"strategy": "HYBRID_SHARD", "shardSize": 2},
        parallelism__zeroStage=3,
    )
    runs = replanned_spec(job, 4, 1)
    assert (runs.replicas, runs.parallelism.micro_batches, runs.gpus, runs.elastic) == (4, 1, None, None)
    assert (runs.parallelism.layer_split, runs.parallelism.data_parallel.strategy) == (None, None)
    assert runs.training == job.training
    assert check_spec(runs) == []
