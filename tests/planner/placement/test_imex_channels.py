"""NVL72: NVLink joins hosts of a clique only for jobs whose pods have an IMEX channel."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.parsing import parse_spec
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import PlacementStatus
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.errors import DoesNotFitError, PlanError
from meshwright.planner.placement.place import place
from meshwright.planner.placement.stable_placement import PreviousPlacement, place_near_previous
from meshwright.planner.plan import make_plan
from meshwright.planner.plan_and_place import choose_plan
from tests.planner.builders import node

CLIQUE = "nvidia.com/gpu.clique"
GB200 = {CLIQUE: "u.1", "nvidia.com/gpu.product": "NVIDIA-GB200"}
NVL72 = [node(f"t{i:02d}", gpus=4, rack=None, memory_mib=189471, labels=GB200) for i in range(18)]


def job(channel: bool | None = None, **spec: Any) -> ParallelTrainingJobSpec:
    return parse_spec(
        {
            "spec": {
                "model": {"preset": "llama-3-8b"},
                "data": {"source": "PythonStdlib"},
                "training": {"steps": 10, "globalBatchSize": 72, "sequenceLength": 4096},
                "workers": {"image": "i", "gpusPerWorker": 4},
                **({} if channel is None else {"topology": {"multiNodeNVLink": channel}}),
                **spec,
            }
        }
    )


def inventory(spec: ParallelTrainingJobSpec, nodes: list[dict[str, Any]] = NVL72) -> Inventory:
    return Inventory.from_objects(nodes, [], channel=spec.has_channel, pods_joined=spec.joins_pods)


WIDE: dict[str, Any] = {"parallelism": {"tensor": 8, "pipeline": 1, "microBatches": 1}, "replicas": 9}


def test_with_a_channel_the_clique_is_one_domain() -> None:
    spec = job(True, **WIDE)
    plan, placement = choose_plan(spec, inventory(spec))
    assert placement is not None
    assert set(placement.nodes.values()) == {one["metadata"]["name"] for one in NVL72}
    assert {one.domain for one in placement.places.values()} == {"u.1"}
    assert placement.crossings.straddling_tensor_groups == 0
    assert not any("multiNodeNVLink" in reason for reason in plan.reasons)


@pytest.mark.parametrize("channel", [None, False])
def test_without_a_channel_no_group_leaves_its_host_and_the_error_says_why(channel: bool | None) -> None:
    spec = job(channel, **WIDE)
    with pytest.raises(PlanError) as caught:
        make_plan(spec, inventory(spec))
    message = str(caught.value)
    assert "the widest NVLink domain has 4 GPUs" in message
    assert "18 nodes have the label nvidia.com/gpu.clique" in message
    assert "`topology.multiNodeNVLink: true` gives the job one" in message


def test_without_a_channel_the_plan_stays_inside_hosts_and_says_why() -> None:
    spec = job(gpus=72)
    plan, placement = choose_plan(spec, inventory(spec))
    assert placement is not None
    assert plan.layout.tensor <= 4
    assert len({one.domain for one in placement.places.values()}) == 18
    assert {one.rack for one in placement.places.values()} == {"u.1"}, "the clique is still one rack"
    assert any("each host is its own NVLink domain" in reason for reason in plan.to_status().reasons)
    single = job(gpus=4)
    assert not any("NVLink domain" in reason for reason in make_plan(single, inventory(single)).reasons)


def test_estimates_know_whether_nvlink_joins_the_hosts() -> None:
    degrees = {"parallelism": {"tensor": 4, "pipeline": 1, "microBatches": 1}, "replicas": 18}
    times = []
    for channel in (True, False):
        spec = job(channel, **degrees)
        plan, _ = choose_plan(spec, inventory(spec))
        assert plan.estimate is not None
        times.append(plan.estimate.seconds)
    assert times[0] < times[1]


def test_other_labels_name_the_rack_and_nodes_without_a_clique_are_as_before() -> None:
    labeled = [node(f"a{i}", gpus=4, rack=f"leaf{i}", labels=GB200) for i in range(2)]
    others = [node(f"b{i}", gpus=4, rack="leaf9", domain="d") for i in range(2)]
    found = Inventory.from_objects([*labeled, *others], [], channel=False)
    assert {name for name, one in found.nodes.items() if one.separate_host} == {"a0", "a1"}
    assert {name: (one.place.domain, one.place.rack) for name, one in found.nodes.items()} == {
        "a0": ("host/a0", "leaf0"),
        "a1": ("host/a1", "leaf1"),
        "b0": ("d", "leaf9"),
        "b1": ("d", "leaf9"),
    }


def test_a_job_that_spans_hosts_of_a_clique_keeps_what_it_spans() -> None:
    """Jobs of 0.1.0 were placed so. Their plan does not depend on nodes; a lost worker must find a place."""
    spec = job(None, **{**WIDE, "replicas": 2})
    old = Inventory.from_objects(NVL72, [])
    plan = make_plan(spec, old)
    first = place(plan, old)
    before = PreviousPlacement.of_status(PlacementStatus.model_validate(first.to_status("job", {}).model_dump()))
    assert before is not None
    now = inventory(spec)
    with pytest.raises(DoesNotFitError):
        place(plan, now)
    keep = {worker: name for worker, name in first.nodes.items() if worker != 1}
    replaced = place_near_previous(plan, now, keep, before)
    assert {worker: replaced.nodes[worker] for worker in keep} == keep
    assert replaced.nodes == first.nodes
    without = Inventory.from_objects(
        [one for one in NVL72 if one["metadata"]["name"] != first.nodes[1]], [], channel=False
    )
    moved = place_near_previous(plan, without, keep, before)
    assert {worker: moved.nodes[worker] for worker in keep} == keep
    assert place_near_previous(plan, now, {}, before).nodes == first.nodes, "after a suspension too"
