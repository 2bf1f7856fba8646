"""Plan, place, estimate again: free GPUs decide between layouts of similar speed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.layout import Layout
from meshwright.models.presets import resolve
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost.accelerators import ACCELERATORS
from meshwright.planner.cost.fabric import Fabric
from meshwright.planner.cost_model import cost_model_for
from meshwright.planner.placement.placed_cost import estimate_placed, placed_group_spans
from meshwright.planner.plan import make_plan, make_plans
from meshwright.planner.topology.location import Location
from tests.planner.builders import choose_plan


def spec(replicas: int = 4, **changes: Any) -> ParallelTrainingJobSpec:
    return ParallelTrainingJobSpec.model_validate(
        {
            "replicas": replicas,
            "model": {"preset": "llama-3-70b"},
            "data": {"source": "PythonStdlib"},
            "training": {"steps": 10, "globalBatchSize": 64, "sequenceLength": 4096, "precision": "bf16"},
            "parallelism": {"zeroStage": 2},
            "workers": {"image": "worker", "gpusPerWorker": 4},
            **changes,
        }
    )


def cluster(free: dict[str, int], racks: dict[str, str]) -> Inventory:
    """Nodes of 8 H100 of which `free` are free."""
    nodes, pods = [], []
    for name, gpus in free.items():
        labels = {
            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
            "topology.meshwright.dev/rack": racks[name],
            "network.topology.nvidia.com/leaf": racks[name],
        }
        status = {
            "allocatable": {"nvidia.com/gpu": "8", "cpu": "96", "memory": "2Ti", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        nodes.append({"metadata": {"name": name, "labels": labels}, "status": status})
        if gpus < 8:
            limits = {"requests": {"nvidia.com/gpu": str(8 - gpus)}}
            pods.append(
                {
                    "metadata": {"name": f"other-{name}", "namespace": "x", "uid": name},
                    "spec": {"nodeName": name, "containers": [{"name": "c", "resources": limits}]},
                    "status": {"phase": "Running"},
                }
            )
    return Inventory.from_objects(nodes, pods)


def whole(nodes: int) -> Inventory:
    return cluster({f"n{i}": 8 for i in range(nodes)}, {f"n{i}": f"r{i // 4}" for i in range(nodes)})


def test_on_a_free_cluster_the_plan_is_the_one_without_placing() -> None:
    inventory = whole(32)
    plan, placement = choose_plan(spec(), inventory)
    assert plan.layout == make_plan(spec(), inventory).layout
    assert placement is not None


def test_where_single_gpus_are_free_a_layout_that_fits_them_is_taken() -> None:
    length = {"steps": 10, "globalBatchSize": 64, "sequenceLength": 2048}
    short = {**length, "precision": "bf16", "activationCheckpointing": "None"}
    small = spec(
        model={"preset": "llama-3-8b"},
        training=short,
        workers={"image": "worker", "gpusPerWorker": 1},
        parallelism={"zeroStage": 2, "schedule": "1F1B"},
    )
    singles = cluster({f"n{i}": 1 for i in range(64)}, {f"n{i}": f"r{i // 4}" for i in range(64)})
    at_large = make_plan(small, singles)
    plan, placement = choose_plan(small, singles)
    assert at_large.layout.tensor == 2
    assert placement is not None
    assert plan.layout == Layout(1, 2, 4)
    assert "TP 2 x PP 1 x DP 4 would be faster, but does not fit on the GPUs that are free now" in plan.reasons[-2]
    assert plan.reasons[-1].startswith("placement: ")


def test_nothing_free_still_gives_a_plan() -> None:
    none = cluster({f"n{i}": 0 for i in range(32)}, {f"n{i}": "r" for i in range(32)})
    plan, placement = choose_plan(spec(), none)
    assert placement is None
    assert plan.layout == make_plans(spec(), none)[0].layout


def test_a_broken_placement_costs_more_than_a_whole_one() -> None:
    inventory = whole(32)
    cost_model = cost_model_for(spec(), resolve(spec().model), inventory)  # type: ignore[arg-type]
    assert cost_model is not None
    plan, placement = choose_plan(spec(), inventory)
    assert placement is not None
    here = estimate_placed(placement, cost_model)
    workers = len(plan.workers)
    scattered = {w: inventory.nodes[f"n{(w * 9) % 32}"].place for w in range(workers)}
    there = estimate_placed(replace(placement, places=scattered), cost_model)
    assert there.seconds > here.seconds
    assert there.memory == here.memory


@pytest.mark.parametrize(
    ("where", "tensor", "replicas", "hop"),
    [
        ("aaaa", (2, 2), (2, 2), 0),
        ("abab", (2, 2), (2, 2), 1),
        ("aabb", (2, 2), (1, 2), 0),
        ("abcd", (2, 2), (1, 2), 1),
    ],
)
def test_spans_are_those_of_the_worst_group(
    where: str, tensor: tuple[int, int], replicas: tuple[int, int], hop: int
) -> None:
    fabric = Fabric.of(ACCELERATORS["H100-SXM5-80GB"])
    places = {w: Location((name, "rack"), ("domain", "rack")) for w, name in enumerate(where)}
    groups = placed_group_spans(Layout(2, 2, 2), 2, places, fabric)
    assert groups.tensor.members == tensor
    assert groups.shard_ranks.members == replicas
    assert groups.pipeline_level == hop
