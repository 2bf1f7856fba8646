"""Several pods of one host: their GPUs communicate over the network, unless a claim joins the pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.api.parsing import parse_spec
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import PlacementStatus
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.limits import ClusterLimits
from meshwright.planner.cost.step_time import StepTime
from meshwright.planner.cost_model import cost_model_for
from meshwright.planner.hardware import Hardware
from meshwright.planner.placement.placed_cost import group_spans_of_status, spans_of_placement
from meshwright.planner.placement.stable_placement import PreviousPlacement, place_near_previous
from meshwright.planner.plan import make_plan, running_plan
from meshwright.planner.plan_and_place import choose_plan
from tests.planner.builders import node

H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
HOSTS = [node(f"h{i}", gpus=8, rack="r0", memory_mib=81559, labels=H100) for i in range(4)]
WIDE: dict[str, Any] = {"tensor": 8, "pipeline": 1, "microBatches": 4}


def job(worker: int = 4, **spec: Any) -> ParallelTrainingJobSpec:
    return parse_spec(
        {
            "spec": {
                "model": {"preset": "llama-3-8b"},
                "data": {"source": "PythonStdlib"},
                "training": {"steps": 10, "globalBatchSize": 64, "sequenceLength": 4096},
                "workers": {"image": "i", "gpusPerWorker": worker},
                **spec,
            }
        }
    )


def inventory(*, joined: bool = False, product: str | None = None) -> Inventory:
    nodes = HOSTS if product is None else [_of_product(one, product) for one in HOSTS]
    return Inventory.from_objects(nodes, [], channel=False, pods_joined=joined)


def _of_product(one: dict[str, Any], product: str) -> dict[str, Any]:
    labels = {**one["metadata"]["labels"], "nvidia.com/gpu.product": product}
    return {**one, "metadata": {**one["metadata"], "labels": labels}}


def step_time(spec: ParallelTrainingJobSpec, *, joined: bool = False) -> StepTime:
    plan, placement = choose_plan(spec, inventory(joined=joined))
    assert placement is not None
    assert plan.estimate is not None
    return plan.estimate.time


def test_a_tensor_group_over_two_pods_of_a_host_costs_the_network() -> None:
    two_pods, one_pod = job(parallelism=WIDE), job(8, parallelism=WIDE)
    whole, joined, apart = step_time(one_pod), step_time(two_pods, joined=True), step_time(two_pods)
    assert joined == whole, "a claim makes two pods as fast as one"
    assert apart.tensor > 1.5 * whole.tensor
    assert apart.total > whole.total


def test_the_plan_and_the_placement_say_so_and_count_the_groups() -> None:
    spec = job(replicas=2, parallelism=WIDE)
    plan, placement = choose_plan(spec, inventory())
    assert placement is not None
    (reason,) = (text for text in plan.reasons if "NVLink ends at each pod" in text)
    assert "each tensor-parallel group of 8 spans 2 pods" in reason
    assert "Raise `workers.gpusPerWorker`" in reason
    assert placement.crossings.straddling_tensor_groups == 2
    assert any("span several pods of a host" in note for note in placement.notes)
    by_host = {placement.nodes[worker] for worker in (0, 1)}, {placement.nodes[worker] for worker in (2, 3)}
    assert [len(hosts) for hosts in by_host] == [1, 1], "each group stays on one host"
    assert placement.places[0].domain == placement.places[1].domain, "the status names the host's domain"


@pytest.mark.parametrize(("gpus", "joined"), [(4, True), (8, False)], ids=["a claim", "one pod a host"])
def test_nothing_is_said_where_nvlink_joins_the_group(gpus: int, joined: bool) -> None:
    plan, placement = choose_plan(job(gpus, replicas=2, parallelism=WIDE), inventory(joined=joined))
    assert placement is not None
    assert not any("NVLink" in reason for reason in (*plan.reasons, *placement.notes))
    assert placement.crossings.straddling_tensor_groups == 0


@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("product", [None, "Home-Made"], ids=["known GPU", "unknown GPU"])
def test_chosen_tensor_groups_stay_inside_a_pod(gpus: int, product: str | None) -> None:
    spec = job(gpus, gpus=32, model={"preset": "llama-2-13b"})
    plan = make_plan(spec, inventory(product=product))
    assert plan.layout.tensor <= gpus
    assert ClusterLimits.of(inventory(), gpus).linked_gpus == gpus


def test_a_group_spans_pods_if_nothing_else_fits() -> None:
    """One layer cannot be split into stages, and its states need more than one GPU has."""
    large = {"hiddenSize": 32768, "layers": 1, "heads": 256, "vocabSize": 32768, "intermediateSize": 131072}
    spec = job(1, model=large, training={"steps": 1, "globalBatchSize": 8, "sequenceLength": 128})
    plan = make_plan(spec, inventory())
    assert plan.layout.tensor > 1
    assert any(f"each tensor-parallel group of {plan.layout.tensor} spans" in reason for reason in plan.reasons)


def test_a_pod_alone_on_its_host_keeps_the_domain_of_the_host() -> None:
    taken = Inventory.from_objects(HOSTS, [], channel=False)
    nodes = {name: replace(one, free=replace(one.free, gpus=4)) for name, one in taken.nodes.items()}
    labeled = replace(taken, nodes=nodes)
    plan, placement = choose_plan(job(replicas=4, parallelism={"tensor": 4, "pipeline": 1}), labeled)
    assert placement is not None
    assert len(set(placement.nodes.values())) == 4
    assert placement.crossings.straddling_tensor_groups == 0
    assert plan.estimate is not None


def test_the_spans_of_a_running_job_are_those_of_its_placement() -> None:
    spec = job(replicas=2, parallelism=WIDE)
    for joined in (True, False):
        found = inventory(joined=joined)
        _, placement = choose_plan(spec, found)
        cost_model = cost_model_for(spec, placement.plan.architecture, found) if placement is not None else None
        assert placement is not None
        assert cost_model is not None
        fabric, status = cost_model.machine.fabric, placement.to_status("job", {})
        spans = spans_of_placement(placement, fabric)
        assert spans.tensor.inner == (8 if joined else 4)
        assert group_spans_of_status(placement.plan.layout, 4, status, fabric, joined=joined) == spans


def test_a_job_that_runs_so_keeps_its_plan_and_its_nodes() -> None:
    """Of version 0.1.0: nothing of it depends on what is known about pods of a host."""
    spec = job(replicas=2)
    old = inventory(joined=True)
    plan, placement = choose_plan(job(replicas=2, parallelism=WIDE), old)
    assert placement is not None
    status = plan.to_status()
    kept = running_plan(spec, Hardware.of(inventory(), 4), status)
    assert kept.layout == plan.layout
    assert list(kept.reasons) == list(status.reasons)
    before = PreviousPlacement.of_status(PlacementStatus.model_validate(placement.to_status("job", {}).model_dump()))
    again = place_near_previous(kept, inventory(), {}, before)
    assert again.nodes == placement.nodes
    replaced = place_near_previous(kept, inventory(), {w: n for w, n in placement.nodes.items() if w != 1}, before)
    assert replaced.nodes == placement.nodes
