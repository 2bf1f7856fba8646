"""Running jobs teach the planner what this cluster's GPUs and links really do."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import PlacementStatus, WorkerPlacement
from meshwright.layout import Layout
from meshwright.models.presets import resolve
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost.constants import Constants
from meshwright.planner.cost_model import (
    MIN_STEPS,
    Calibration,
    CostModel,
    StepMeasurement,
    cost_model_for,
    machine_of_cluster,
    recalibrate,
)
from meshwright.planner.frameworks.planning import cost_model_of_target
from meshwright.planner.frameworks.registry import TARGETS
from meshwright.planner.placement.placed_cost import group_spans_of_status
from meshwright.planner.plan import make_plan


def spec(**changes: Any) -> ParallelTrainingJobSpec:
    return ParallelTrainingJobSpec.model_validate(
        {
            "replicas": 4,
            "model": {"preset": "llama-3-8b"},
            "data": {"source": "PythonStdlib"},
            "training": {"steps": 10, "globalBatchSize": 64, "sequenceLength": 8192, "precision": "bf16"},
            "parallelism": {"zeroStage": 2},
            "workers": {"image": "worker", "gpusPerWorker": 8},
            **changes,
        }
    )


def cluster(*products: str) -> Inventory:
    nodes = [
        {
            "metadata": {"name": f"node-{i}", "labels": {"nvidia.com/gpu.product": product}},
            "status": {
                "allocatable": {"nvidia.com/gpu": "8", "cpu": "64", "memory": "1Ti", "pods": "110"},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
        for i, product in enumerate(products)
    ]
    return Inventory.from_objects(nodes, [])


H100S = cluster(*["NVIDIA-H100-80GB-HBM3"] * 8)


def cost_model() -> CostModel:
    found = cost_model_for(spec(), resolve(spec().model), H100S)  # type: ignore[arg-type]
    assert found is not None
    return found


def measured(
    truth: Constants, layout: Layout, micro_batches: int, steps: int = 200, noise: float = 1.0
) -> StepMeasurement:
    """A job whose steps take what they would with `truth`."""
    shipped = cost_model()
    real = replace(shipped, machine=replace(shipped.machine, constants=truth))
    strategy = shipped.job.strategy(layout, micro_batches)
    seconds = real.estimate(strategy).seconds * noise
    return StepMeasurement(shipped, strategy, seconds, steps)


def test_the_next_plan_reflects_what_a_job_measures() -> None:
    before = make_plan(spec(), H100S)
    assert before.estimate is not None
    slow = StepMeasurement(cost_model(), before.strategy, 2 * before.estimate.seconds, 500)
    learned = recalibrate(Calibration(), [slow])
    after = make_plan(spec(), H100S, calibration=learned)
    assert after.estimate is not None
    assert after.estimate.seconds == pytest.approx(2 * before.estimate.seconds, rel=0.1)
    assert after.to_status().estimated_step_milliseconds != before.to_status().estimated_step_milliseconds


def test_a_scattered_job_does_not_make_links_slow() -> None:
    """Eight ranks in one domain each: what its rings take is its place's doing, and known."""
    asked, layout = cost_model(), Layout(1, 1, 8)
    status = PlacementStatus(
        workers=[
            WorkerPlacement(worker=w, incarnation=0, pod="p", node=f"n{w}", ranks=f"{w}", domain=f"d{w}", rack="r")
            for w in range(8)
        ]
    )
    groups = group_spans_of_status(layout, 1, status, asked.machine.fabric, joined=True)
    assert groups is not None
    strategy = asked.job.strategy(layout, 1)
    seconds = asked.estimate(strategy, groups).seconds
    close = asked.estimate(strategy).seconds
    assert seconds > 1.03 * close

    def next_estimate(one: StepMeasurement) -> float:
        machine = recalibrate(Calibration(), [one]).on(asked.machine)
        return replace(asked, machine=machine).estimate(strategy).seconds

    assert next_estimate(StepMeasurement(asked, strategy, seconds, 500, groups)) == pytest.approx(close, rel=1e-3)
    assert next_estimate(StepMeasurement(asked, strategy, seconds, 500)) > 1.02 * close
    assert group_spans_of_status(layout, 8, status, asked.machine.fabric, joined=True) is None
    assert group_spans_of_status(layout, 1, None, asked.machine.fabric, joined=True) is None


def test_several_layouts_tell_slow_links_from_slow_kernels() -> None:
    start = cost_model().machine.constants
    truth = Constants(start.compute, 3 * start.communication, start.host)
    layouts = ((8, 1, 4, 1), (8, 1, 4, 4), (8, 2, 4, 4), (4, 1, 4, 2), (2, 4, 4, 8), (1, 8, 4, 8), (1, 1, 4, 16))
    jobs = [
        replace(measured(truth, Layout(t, p, d), m), namespace=namespace)
        for t, p, d, m in layouts
        for namespace in ("one", "two")  # one namespace does not move a constant so far
    ]
    learned = recalibrate(Calibration(), jobs).constants["H100-SXM5-80GB"]
    assert learned.communication / start.communication > 2.5
    assert learned.compute / start.compute == pytest.approx(1, rel=0.1)


def test_a_job_as_estimated_changes_nothing() -> None:
    start = cost_model().machine.constants
    learned = recalibrate(Calibration(), [measured(start, Layout(8, 1, 4), 2)]).constants["H100-SXM5-80GB"]
    assert learned.compute == pytest.approx(start.compute, rel=1e-6)


def test_warming_up_counts_for_nothing() -> None:
    early = measured(Constants(9, 9, 9), Layout(8, 1, 4), 2, steps=MIN_STEPS - 1)
    assert recalibrate(Calibration(), [early]) == Calibration()


def test_one_broken_measurement_among_many_moves_little() -> None:
    truth = cost_model().machine.constants
    random = Random(3)
    good = [measured(truth, Layout(8, 1, 4), m, noise=random.uniform(0.98, 1.02)) for m in (1, 2, 4, 8, 16)]
    odd = measured(truth, Layout(8, 1, 4), 2, noise=20.0)
    learned = recalibrate(Calibration(), [*good, odd]).constants["H100-SXM5-80GB"]
    assert learned.compute / truth.compute < 1.25


def test_the_order_of_jobs_does_not_matter() -> None:
    jobs = [measured(Constants(2, 1, 1), Layout(t, 1, 4), 2) for t in (1, 2, 4, 8)]
    assert recalibrate(Calibration(), jobs) == recalibrate(Calibration(), jobs[::-1])


def test_a_mixed_cluster_runs_at_its_slowest_gpus_pace_and_with_its_smallest_memory() -> None:
    mixed = machine_of_cluster(cluster(*["NVIDIA-H100-80GB-HBM3"] * 3, "NVIDIA-A100-SXM4-40GB"), 8)
    assert mixed is not None
    assert mixed.gpu.name == "H100-SXM5-80GB"
    assert mixed.slowest == pytest.approx(312 / 989)
    assert mixed.gpu.memory < 41 * 2**30


def test_unknown_gpus_have_no_estimate() -> None:
    assert machine_of_cluster(cluster("Home-Made"), 8) is None
    assert make_plan(spec(parallelism={"tensor": 8, "pipeline": 1}), cluster("Home-Made")).estimate is None


def test_a_deterministic_job_does_not_sum_in_nvlink_switches() -> None:
    """torch turns NVLS off for deterministic kernels. Groups inside a domain then take a ring, over twice the bytes."""

    def data_seconds(deterministic: bool) -> float:
        training = {**spec().training.model_dump(exclude_none=True), "deterministic": deterministic}  # type: ignore[union-attr]
        changed = spec(replicas=8, training=training, parallelism={"zeroStage": 0, "tensor": 1, "pipeline": 1})
        found = cost_model_for(changed, resolve(changed.model), H100S)  # type: ignore[arg-type]
        assert found is not None
        strategy = found.job.strategy(Layout(1, 1, 8), micro_batches=1)
        return found.estimate(strategy).time.data

    assert data_seconds(True) > 1.3 * data_seconds(False)


def test_another_framework_sums_in_nvlink_switches_whatever_the_job_says() -> None:
    """Its kernels are not those that `training.deterministic` chooses."""
    found = cost_model_for(spec(), resolve(spec().model), H100S)  # type: ignore[arg-type]
    plain = machine_of_cluster(H100S, 8)
    assert found is not None
    assert plain is not None
    assert plain.fabric.levels[0].in_network
    assert not found.machine.fabric.levels[0].in_network
    of_target = cost_model_of_target(found, TARGETS["megatron-lm"], plain)
    assert of_target is not None
    assert of_target.machine.fabric.levels[0].in_network
