"""Clusters with several GPU products: a job is planned, placed and estimated for those that it gets."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.limits import ClusterLimits
from meshwright.planner.cost_model import cost_model_for, machine_of_cluster
from meshwright.planner.placement import place
from meshwright.planner.plan import make_plan
from tests.planner.builders import choose_plan, inventory, node, plan_of, spec_of

H100, A100 = "NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-40GB"
LLAMA_TRAINING = {"steps": 10, "globalBatchSize": 512, "sequenceLength": 4096, "precision": "bf16"}
MEMORY = {H100: 81559, A100: 40960}


def llama(**changes: Any) -> ParallelTrainingJobSpec:
    workers = {"image": "worker", "gpusPerWorker": 8}
    return spec_of(
        **{"replicas": 1, "model": {"preset": "llama-3-8b"}, "training": LLAMA_TRAINING, "workers": workers, **changes}
    )


def nodes(product: str, count: int, gpus: int = 8, *, rack: str | None = None) -> list[dict[str, Any]]:
    labels = {"nvidia.com/gpu.product": product}
    name = product.split("-")[1].lower()
    memory = MEMORY[product]
    return [
        node(f"{name}-{i}", gpus=gpus, rack=rack or f"{name}-{i}", memory_mib=memory, labels=labels)
        for i in range(count)
    ]


MIXED = inventory(*nodes(H100, 2), *nodes(A100, 8))


@pytest.mark.parametrize("size", [{"gpus": 16}, {"replicas": 8}], ids=["a budget", "replicas"])
def test_a_job_has_the_plan_and_the_estimate_of_the_fastest_gpus_that_are_enough(size: dict[str, int]) -> None:
    """As on a cluster without the others: those are most of the GPUs, have a third of the speed and half the memory."""
    spec = llama(**size)
    mixed, placement = choose_plan(spec, MIXED)
    alone, _ = choose_plan(spec, inventory(*nodes(H100, 2)))
    assert (mixed.strategy, mixed.estimate) == (alone.strategy, alone.estimate)
    assert mixed.reasons == alone.reasons
    assert placement is not None
    assert set(placement.nodes.values()) == {"h100-0", "h100-1"}


def test_a_budget_beyond_the_fastest_gpus_takes_the_others_too() -> None:
    plan, placement = choose_plan(llama(gpus=80), MIXED)
    assert placement is not None
    assert plan.layout.world_size == 80
    assert "different GPU products" in placement.notes[0]


def test_a_job_starts_on_slower_gpus_if_the_faster_ones_are_in_use_with_their_plan_and_estimate() -> None:
    spec = llama(gpus=16)
    busy = MIXED.holding({name: one.free for name, one in MIXED.nodes.items() if name.startswith("h100")})
    slow, placement = choose_plan(spec, busy)
    assert placement is not None
    assert all(name.startswith("a100") for name in placement.nodes.values())
    alone, _ = choose_plan(spec, inventory(*nodes(A100, 8)))
    assert (slow.layout, slow.memory) == (alone.layout, alone.memory)
    fast, _ = choose_plan(spec, MIXED)
    assert fast.estimate is not None
    assert slow.estimate is not None
    assert slow.estimate.seconds > 2 * fast.estimate.seconds


def test_the_faster_gpus_are_worth_a_longer_way() -> None:
    """The slower ones are in one rack, the faster ones are not: the network adds less than their speed saves."""
    mixed = inventory(*nodes(H100, 2), *nodes(A100, 2, rack="r"))
    assert set(place(plan_of(8, 2, 1, 8), mixed).nodes.values()) == {"h100-0", "h100-1"}
    a100_first = place(plan_of(8, 2, 1, 8), mixed, {0: "a100-0"})
    assert set(a100_first.nodes.values()) == {"a100-0", "a100-1"}, "a worker that stays decides"


def test_nodes_without_the_gpus_of_a_worker_do_not_count() -> None:
    small = inventory(*nodes(H100, 4), *nodes(A100, 8, gpus=4))
    only = inventory(*nodes(H100, 4))
    assert machine_of_cluster(small, 8) == machine_of_cluster(only, 8)
    assert ClusterLimits.of(small, 8).gpus == 32
    assert ClusterLimits.of(small, 4).gpus == 64
    assert make_plan(llama(gpus=32), small).estimate == make_plan(llama(gpus=32), only).estimate


def test_the_cost_model_of_nodes_with_one_product_has_its_gpu() -> None:
    spec = llama(gpus=16)

    def gpu(found: Inventory, *names: str) -> str:
        model = cost_model_for(spec, make_plan(spec, found).architecture, found)
        assert model is not None
        return model.on_nodes(found, names).machine.gpu.name

    assert gpu(MIXED, "h100-0", "h100-1") == "H100-SXM5-80GB"
    assert gpu(MIXED, "a100-0") == "A100-SXM4-40GB"
    assert gpu(MIXED, "a100-0", "h100-0") == "A100-SXM4-40GB", "the most common of all, which is the slowest here"
    assert gpu(inventory(*nodes(H100, 2)), "h100-0") == "H100-SXM5-80GB"
