"""What a further place costs a group is what it sends there, and placements follow it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.training import TrainingSpec
from meshwright.layout import Layout
from meshwright.models.presets import PRESETS, published
from meshwright.planner.cost.accelerators import accelerator
from meshwright.planner.cost.estimate import machine_for
from meshwright.planner.cost_model import CostModel
from meshwright.planner.placement import PlacingOptions, place
from meshwright.planner.placement.rank_blocks import Dimension
from meshwright.planner.placement.traffic_weights import HIDDEN_WEIGHT, group_traffic, weights_for
from meshwright.planner.placement.weights import GroupTraffic, Weights
from meshwright.planner.topology.links import MIN_EXTRA, Links
from meshwright.planner.workload import TrainingJob
from tests.planner.builders import inventory, plan_of, racks

LEVELS = ("domain", "rack", "zone")


def traffic(cost_model: CostModel, layout: Layout, micro_batches: int, gpus_per_worker: int) -> GroupTraffic:
    return group_traffic(cost_model, cost_model.job.strategy(layout, micro_batches), gpus_per_worker)


def weights_of(cost_model: CostModel, layout: Layout, micro_batches: int) -> Weights:
    return weights_for(cost_model, cost_model.job.strategy(layout, micro_batches), 8, LEVELS)


def cost_model(model: str = "llama-3-70b", batch: int = 64, zero: int = 0, gpu: str = "H100-SXM5-80GB") -> CostModel:
    found = accelerator(gpu)
    assert found is not None
    training = TrainingSpec(steps=1, global_batch_size=batch, sequence_length=4096, precision="bf16")
    return CostModel(
        TrainingJob.from_parts(PRESETS[model], training, ParallelismSpec(zero_stage=zero), 1), machine_for(found)
    )


def test_a_boundary_between_stages_carries_activations_and_their_gradients() -> None:
    found = traffic(cost_model(), Layout(8, 2, 4), 16, 8)
    slice_bytes = 4096 * 8192 * 2 / 8
    assert found.pipeline == pytest.approx((2 + 2 * 16) * slice_bytes)
    longer = traffic(cost_model(), Layout(8, 5, 4), 16, 8)
    assert longer.pipeline == pytest.approx((2 + 2 * 16 / 4) * slice_bytes)
    assert traffic(cost_model(), Layout(8, 1, 4), 16, 8).pipeline == 0


def test_a_ring_pays_for_all_its_gradients_when_it_is_wholly_scattered() -> None:
    """fp32 gradients of a rank's part of the model, around the ring twice."""
    asked = cost_model("llama-3-8b")
    whole = 2 * 4 * published("llama-3-8b").parameters / 8 * 3 / 4
    scattered = 3 * traffic(asked, Layout(8, 1, 4), 1, 8).data
    assert HIDDEN_WEIGHT * whole < scattered < 1.02 * whole
    # Without computation to hide behind, all of it shows.
    exposed = replace(asked.machine, runtime=replace(asked.machine.runtime, name="apart", overlap_gradients=0.0))
    alone = replace(asked, machine=exposed)
    assert 3 * traffic(alone, Layout(8, 1, 4), 1, 8).data == pytest.approx(whole, rel=0.01)


def test_replicas_that_share_a_node_share_its_network_cards() -> None:
    one = traffic(cost_model("llama-3-8b"), Layout(1, 1, 64), 1, 8).data
    other = traffic(cost_model("llama-3-8b"), Layout(1, 1, 64), 1, 1).data
    assert one * 8 * 7 == pytest.approx(other * 63)


def test_weights_grow_with_the_level_and_with_what_is_sent() -> None:
    plain = weights_of(cost_model(), Layout(8, 4, 4), 16)
    sharded = weights_of(cost_model(zero=3), Layout(8, 4, 4), 16)
    for dimension in (Dimension.PIPELINE, Dimension.DATA):
        assert 0 < plain.of(dimension, "rack") < plain.of(dimension, "zone")
    assert sharded.of(Dimension.DATA, "rack") > plain.of(Dimension.DATA, "rack")
    assert sharded.of(Dimension.PIPELINE, "rack") == plain.of(Dimension.PIPELINE, "rack")


def test_every_level_costs_something_even_on_hosts_whose_cards_outrun_their_bus() -> None:
    weights = weights_of(cost_model("llama-3-8b", gpu="A100-PCIE-80GB"), Layout(1, 2, 8), 8)
    assert weights.of(Dimension.PIPELINE, "rack") > 0
    links = Links(LEVELS, inside=24e9, nic=400e9)
    assert links.extra_seconds_per_byte("domain") == 0
    assert links.extra_seconds_per_byte("rack") == pytest.approx(MIN_EXTRA / 24e9)


def test_the_groups_that_send_most_stay_together() -> None:
    """Four pipelines of four stages on two racks of eight nodes: either both racks hold whole pipelines or whole rings.

    Parameters that are gathered for every micro-batch make rings heavy; many small micro-batches make stages heavy.
    """
    plan, found = plan_of(8, 4, 4, 8), inventory(*racks(2, 8, 8))
    heavy_rings = weights_of(cost_model(zero=3), plan.layout, 16)
    rings = place(plan, found, options=PlacingOptions(heavy_rings)).crossings.extra_places
    assert rings[Dimension.DATA]["rack"] < rings[Dimension.PIPELINE]["rack"]
    heavy_stages = weights_of(cost_model("qwen2.5-0.5b", batch=4096), plan.layout, 1024)
    stages = place(plan, found, options=PlacingOptions(heavy_stages)).crossings.extra_places
    assert stages[Dimension.PIPELINE]["rack"] < stages[Dimension.DATA]["rack"]
