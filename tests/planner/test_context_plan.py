"""The context degree in plan, memory, cost, placement and drawing."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.layout import Layout
from meshwright.models.presets import PRESETS
from meshwright.planner.cost.accelerators import ACCELERATORS
from meshwright.planner.cost.fabric import Fabric
from meshwright.planner.errors import PlanError
from meshwright.planner.placement import place
from meshwright.planner.placement.placed_cost import placed_group_spans
from meshwright.planner.plan import make_plan
from meshwright.planner.render import render_placement
from meshwright.planner.topology.location import Location
from meshwright_worker.trainer.train import validate_run
from tests.planner.builders import inventory, racks, spec_of
from tests.planner.test_memory import first

CLUSTER = inventory(*racks(4, 4, 8))
SHARED: dict[str, Any] = {"tensor": 2, "pipeline": 1, "context": 2, "microBatches": 2}


def test_the_degree_is_part_of_the_world_and_is_told_to_everyone() -> None:
    spec = spec_of(parallelism=SHARED)
    plan = make_plan(spec, CLUSTER)
    assert plan.layout == Layout(2, 1, 2, 2)
    assert plan.summary == "TP 2 x CP 2 x PP 1 x DP 2"
    assert plan.workers == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert "CP 2 (RingZigZag): set by `parallelism.context`" in plan.reasons
    status = plan.to_status()
    assert (status.context, status.world_size, status.workers) == (2, 8, 4)
    run = plan.run_config(spec)
    assert (run.context, run.layout.world_size) == (2, 8)
    validate_run(run)
    assert make_plan(spec, CLUSTER, status).layout == plan.layout


def test_a_command_gets_its_context_degree_in_the_world() -> None:
    spec = spec_of(
        model=None, data=None, training=None, runtime={"command": ["train"]}, parallelism={"context": 4}, replicas=1
    )
    assert make_plan(spec, CLUSTER).layout == Layout(1, 1, 1, 4)


def test_the_tensor_degree_leaves_heads_to_exchange() -> None:
    model = {"layers": 2, "hiddenSize": 128, "intermediateSize": 256, "heads": 8, "kvHeads": 2, "vocabSize": 320}
    asked = {"context": 4, "contextMethod": "Ulysses"}
    plan = make_plan(spec_of(model=model, parallelism=asked), CLUSTER)
    assert plan.layout.tensor * 4 <= 8
    with pytest.raises(PlanError, match="parallelism.context: times `parallelism.tensor` must divide `model.heads`"):
        make_plan(spec_of(model=model, parallelism={**asked, "tensor": 4}), CLUSTER)


def test_a_row_too_short_for_its_ranks_is_refused() -> None:
    with pytest.raises(
        PlanError, match="parallelism.context: must leave each rank at least two tokens of `training.sequenceLength`"
    ):
        make_plan(spec_of(parallelism={**SHARED, "context": 64}), CLUSTER)


def test_ranks_that_share_a_row_keep_their_part_of_activations_and_share_states() -> None:
    model = PRESETS["llama-3-8b"]
    asked: dict[str, Any] = {"sequence_length": 8192}
    whole = first(model, Layout(data=4), **asked, parallelism={"zero_stage": 3})
    shared = first(model, Layout(data=1, context=4), **asked, parallelism={"zero_stage": 3})
    assert (shared.states, shared.gathered) == (whole.states, whole.gathered)
    assert shared.logits == whole.logits / 4
    assert shared.activations == whole.activations / 4
    exchanged = 2 * 2048 * 2 * model.kv_heads * model.head_size * (4 + 4)
    assert shared.buffers - whole.buffers == exchanged
    ulysses = first(model, Layout(context=4), **asked, parallelism={"zero_stage": 3, "context_method": "Ulysses"})
    assert ulysses.buffers == whole.buffers


def test_the_drawing_names_the_context_coordinate() -> None:
    plan = make_plan(spec_of(parallelism={**SHARED, "pipeline": 2}, replicas=1), inventory(*racks(1, 1, 8)))
    lines = render_placement(plan.to_status(), place(plan, inventory(*racks(1, 1, 8))).to_status("lm", {}))
    assert "[2 d0p0c1t0]" in lines[1]
    assert "[5 d0p1c0t1]" in lines[1]


@pytest.mark.parametrize(
    ("where", "context_members", "replicas"),
    [("aabb", (2, 2), (2, 4)), ("abab", (1, 2), (2, 4)), ("abcd", (1, 2), (1, 4))],
)
def test_placed_groups_have_the_spans_they_got(
    where: str, context_members: tuple[int, int], replicas: tuple[int, int]
) -> None:
    fabric = Fabric.of(ACCELERATORS["H100-SXM5-80GB"])
    places = {worker: Location((name, "rack"), ("domain", "rack")) for worker, name in enumerate(where)}
    groups = placed_group_spans(Layout(tensor=2, data=2, context=2), 2, places, fabric)
    assert groups.tensor.members == (2, 2)
    assert groups.context.members == context_members
    assert groups.shard_ranks.members == replicas
