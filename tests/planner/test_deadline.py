"""Planning ends at its deadline, whatever the spec, and the error names what to change."""

from __future__ import annotations

import time

import pytest

from meshwright.api.parsing import parse_spec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.deadline import DEADLINE_EXCEEDED, PlanningDeadlineError, planning_deadline
from meshwright.planner.plan import make_plan, make_plans
from tests.operator.support import job, node

SLOW = {
    "model": {"layers": 720, "hiddenSize": 64, "intermediateSize": 128, "heads": 4, "kvHeads": 2, "vocabSize": 320},
    "training": {"steps": 50, "globalBatchSize": 14414400, "sequenceLength": 16777216},
    "parallelism": {},
}


def inventory() -> Inventory:
    nodes = [node(f"n{number}", "r0") for number in range(4)]
    for one in nodes:
        one["metadata"]["labels"]["nvidia.com/gpu.product"] = "NVIDIA-H100-80GB-HBM3"
    return Inventory.from_objects(nodes, ())


def test_a_search_stops_at_its_deadline() -> None:
    spec = parse_spec(job("slow", **SLOW))
    nodes = inventory()
    before = time.thread_time()
    with planning_deadline(spec, 0.3), pytest.raises(PlanningDeadlineError) as error:
        make_plans(spec, nodes)
    assert time.thread_time() - before < 3.0, "the CPU time of this thread, which other processes do not change"
    assert error.value.reason == DEADLINE_EXCEEDED
    assert "set `parallelism.tensor` and `parallelism.context` and `parallelism.pipeline`" in str(error.value)


def test_only_fields_that_are_left_out_are_named() -> None:
    spec = parse_spec(job("slow", **{**SLOW, "parallelism": {"tensor": 2, "context": 1, "pipeline": 1}}))
    with planning_deadline(spec, -1.0), pytest.raises(PlanningDeadlineError, match=r"set `parallelism\.microBatches`,"):
        make_plans(spec, inventory())


def test_no_deadline_outlives_its_block() -> None:
    spec = parse_spec(job("honest"))
    with planning_deadline(spec, -1.0):
        pass
    assert make_plan(spec, inventory()).layout.tensor == 2
