"""A job that was placed before: who stays, who goes back, and when another placement is taken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api.status import PlacementStatus
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import Placement, PlacingOptions, PreviousPlacement, place, place_near_previous
from meshwright.planner.plan import Plan
from tests.planner.builders import inventory, node, plan_of, pod, racks
from tests.planner.placement.test_placement import check, clusters, plans

QUICK = PlacingOptions(effort=20_000)


def before(placement: Placement) -> PreviousPlacement:
    """What a job's status keeps of a placement."""
    found = PreviousPlacement.of_status(placement.to_status("job", {}))
    assert found is not None
    return found


def again(plan: Plan, nodes: list[Any], **how: Any) -> Placement:
    return place_near_previous(plan, inventory(*nodes), options=QUICK, **how)


@given(clusters(), plans)
@settings(max_examples=30, deadline=None)
def test_status_says_where_a_job_was(nodes: list[Any], plan: Plan) -> None:
    try:
        first = place(plan, inventory(*nodes), options=QUICK)
    except DoesNotFitError:
        return
    layout = plan.layout
    assert before(first) == PreviousPlacement(
        layout.tensor, layout.pipeline, layout.data, plan.gpus_per_worker, first.nodes
    )


@given(clusters(), plans, st.data())
@settings(max_examples=60, deadline=None)
def test_of_a_lost_node_and_a_crashed_worker_only_the_first_moves(
    nodes: list[Any], plan: Plan, data: st.DataObject
) -> None:
    """With whole tensor-parallel groups to a worker: a broken group may have to move as one."""
    if plan.gpus_per_worker % plan.layout.tensor:
        return
    try:
        first = place(plan, inventory(*nodes), options=QUICK)
    except DoesNotFitError:
        return
    gone = data.draw(st.sampled_from(sorted(set(first.nodes.values()))))
    crashed = data.draw(st.sampled_from(sorted(first.nodes)))
    keep = {w: name for w, name in first.nodes.items() if name != gone and w != crashed}
    left = [n for n in nodes if n["metadata"]["name"] != gone]
    if not keep:
        return
    try:
        after = again(plan, left, keep=keep, before=before(first))
    except DoesNotFitError:
        return
    assert {w for w, name in first.nodes.items() if after.nodes[w] != name} == {
        w for w, name in first.nodes.items() if name == gone
    }
    check(plan, inventory(*left), after)


@given(clusters(), plans, st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 8)), max_size=3))
@settings(max_examples=30, deadline=None)
def test_a_gang_that_starts_anew_never_costs_more_for_nodes_that_were_added(
    nodes: list[Any], plan: Plan, added: list[tuple[int, int, int]]
) -> None:
    try:
        first = place(plan, inventory(*nodes), options=QUICK)
    except DoesNotFitError:
        return
    more = [node(f"new{i}", gpus=g, rack=f"z{z}r{r}", zone=f"z{z}") for i, (z, r, g) in enumerate(added)]
    after = again(plan, [*nodes, *more], before=before(first))
    assert after.cost <= first.cost * (1 + 1e-9)
    assert after.cost < first.cost or after.nodes == first.nodes


def test_a_replica_more_moves_nobody() -> None:
    nodes = racks(4, 4, 8)
    first = place(plan_of(8, 2, 3, 8), inventory(*nodes))
    for replicas in (1, 2, 5, 8):
        plan = plan_of(8, 2, replicas, 8)
        after = again(plan, nodes, before=before(first))
        common = min(6, 2 * replicas)
        assert [after.nodes[w] for w in range(common)] == [first.nodes[w] for w in range(common)]


def test_a_replica_whose_node_is_lost_is_the_one_that_shrinking_takes_away() -> None:
    nodes = racks(1, 6, 8)
    first = place(plan_of(8, 2, 3, 8), inventory(*nodes))
    left = [n for n in nodes if n["metadata"]["name"] != first.nodes[0]]
    after = again(plan_of(8, 2, 2, 8), left, before=before(first))
    assert [after.nodes[w] for w in range(4)] == [first.nodes[w] for w in (4, 5, 2, 3)]


def test_a_gang_that_starts_anew_takes_what_has_become_better() -> None:
    nodes = racks(2, 4, 8)
    busy = tuple(pod(f"p{r}{n}", gpus=8, on=f"rack{r}-node{n}") for r in range(2) for n in range(2))
    plan = plan_of(8, 4, 1, 8)
    first = place(plan, inventory(*nodes, pods=busy))
    assert first.crossings.straddling_replicas == 1
    assert again(plan, nodes, before=before(first)).crossings.straddling_replicas == 0
    assert again(plan, nodes, keep={0: first.nodes[0]}, before=before(first)).nodes == first.nodes


def test_who_cannot_go_back_goes_elsewhere() -> None:
    nodes = racks(1, 3, 8)
    plan = plan_of(8, 1, 2, 8)
    first = place(plan, inventory(*nodes))
    taken = inventory(*nodes, pods=(pod("other", gpus=1, on=first.nodes[1]),))
    after = place_near_previous(plan, taken, before=before(first))
    assert after.nodes[0] == first.nodes[0]
    assert after.nodes[1] not in first.nodes.values()


def test_a_broken_tensor_group_moves_as_one_when_its_domain_is_full() -> None:
    nodes = [node(f"n{i}", gpus=4, domain=f"d{i // 2}") for i in range(6)]
    plan = plan_of(8, 1, 2, 4)
    first = place(plan, inventory(*nodes))
    lost = first.nodes[0]
    left = [n for n in nodes if n["metadata"]["name"] != lost]
    after = again(plan, left, before=before(first))
    assert [after.nodes[w] for w in (2, 3)] == [first.nodes[w] for w in (2, 3)]
    assert after.crossings.straddling_tensor_groups == 0


@pytest.mark.parametrize(
    "damage",
    [
        {"workers": []},
        {"tensor": 0},
        {"pipeline": 0},
        {"data": 0},
        {"data": 4},
        {"tensor": 3},
        {"workers": [{"worker": 1, "incarnation": 0, "pod": "p", "node": "n", "ranks": "0-7"}]},
        {"workers": [{"worker": 0, "incarnation": 0, "pod": "p", "node": "n", "ranks": "zero"}]},
        {"workers": [{"worker": 0, "incarnation": 0, "pod": "p", "node": "n", "ranks": "8-15"}]},
    ],
)
def test_a_damaged_status_says_nothing(damage: dict[str, Any]) -> None:
    whole = place(plan_of(8, 1, 2, 8), inventory(*racks(1, 2, 8))).to_status("job", {}).model_dump(by_alias=True)
    assert PreviousPlacement.of_status(PlacementStatus.model_validate(whole)) is not None
    assert PreviousPlacement.of_status(PlacementStatus.model_validate({**whole, **damage})) is None
    assert PreviousPlacement.of_status(None) is None


def test_other_degrees_are_placed_anew() -> None:
    nodes = racks(2, 4, 8)
    first = place(plan_of(8, 4, 1, 8), inventory(*nodes))
    scattered = {worker: f"rack{worker % 2}-node{worker // 2}" for worker in range(4)}
    for other in (
        PreviousPlacement(4, 8, 1, 8, scattered),
        PreviousPlacement(8, 2, 2, 8, scattered),
        PreviousPlacement(8, 4, 2, 8, scattered),
    ):
        assert again(plan_of(8, 4, 1, 8), nodes, before=other).nodes == first.nodes
