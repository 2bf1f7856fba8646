"""`spec.topology`: required levels are met exactly if a placement exists, and preferred ones as far as possible."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api.topology import FabricLevel, TopologySpec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.pod_resources import Resources
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.errors import DoesNotFitError, PlanError
from meshwright.planner.placement import (
    Placement,
    PlacingOptions,
    PreviousPlacement,
    nodes_to_free,
    place,
    place_near_previous,
)
from meshwright.planner.placement.fit_error import fits
from meshwright.planner.placement.group_levels import GroupLevels, LevelRule, components
from meshwright.planner.placement.rank_blocks import RankBlocks
from meshwright.planner.placement.resize import workers_on_resize
from meshwright.planner.plan import Plan, make_plan
from meshwright.planner.topology.levels import LEVELS
from tests.planner.builders import inventory, node, pod, racks, spec_of

LARGE = {"layers": 4, "hiddenSize": 256, "intermediateSize": 512, "vocabSize": 512}
QUICK = PlacingOptions(effort=2_000)
DIMENSIONS = ("tensor", "context", "pipeline", "expert", "data", "job")
NAMED = ("node", "domain", "rack", "zone")


def plan_with(topology: Mapping[str, Any], gpus: int = 1, **degrees: int) -> Plan:
    """A plan by its degrees, with levels."""
    strategy = Strategy(
        degrees.get("tensor", 1),
        degrees.get("pipeline", 1),
        degrees.get("data", 1),
        degrees.get("context", 1),
        expert=degrees.get("expert", 1),
    )
    spec = TopologySpec.model_validate(topology)
    return Plan(strategy, gpus, Resources(gpus=gpus, pods=1), topology=spec)


def required(**levels: str) -> dict[str, Any]:
    return {dimension: {"required": level} for dimension, level in levels.items()}


def preferred(**levels: str) -> dict[str, Any]:
    return {dimension: {"preferred": level} for dimension, level in levels.items()}


def groups_of(plan: Plan, dimension: str) -> list[list[int]]:
    """The ranks of each group, from the definition of the rank order: tensor, context, pipeline, data.

    A group of another dimension includes the tensor-parallel groups of its ranks.
    """
    layout = plan.layout
    found: defaultdict[Any, list[int]] = defaultdict(list)
    for rank in range(layout.world_size):
        rest, tensor = divmod(rank, layout.tensor)
        rest, context = divmod(rest, layout.context)
        data, pipeline = divmod(rest, layout.pipeline)
        key = {
            "tensor": (context, pipeline, data),
            "context": (pipeline, data),
            "pipeline": (context, data),
            "expert": (pipeline, (data * layout.context + context) // layout.expert),
            "data": (pipeline,),
            "job": (),
        }[dimension]
        found[key].append(rank)
    return list(found.values())


def degree_of(plan: Plan, dimension: str) -> int:
    """Number of ranks of a group."""
    layout = plan.layout
    sizes = {"data": layout.data * layout.context, "job": layout.world_size}
    return sizes.get(dimension) or int(getattr(layout, dimension))


def rules_of(plan: Plan, found: Inventory, *, of: str = "required") -> list[tuple[list[list[int]], str]]:
    """The groups of workers, and the level that they must not leave. Tensor-parallel groups stay in their domain."""
    assert plan.topology is not None
    stated = {dimension: getattr(levels, of) for dimension, levels in plan.topology.stated()}
    if of == "required":
        stated["tensor"] = stated.get("tensor") or "domain"
    known = ["node", *found.levels]
    rules = []
    for dimension, level in stated.items():
        if level is None or (dimension not in ("tensor", "job") and degree_of(plan, dimension) == 1):
            continue
        order = ["node", *LEVELS]
        used = [name for name in known if order.index(name) <= order.index(level)][-1]
        workers = [sorted({rank // plan.gpus_per_worker for rank in group}) for group in groups_of(plan, dimension)]
        rules.append((workers, used))
    return rules


def location(found: Inventory, name: str, level: str) -> str:
    return name if level == "node" else found.nodes[name].place.at(level)


def excess(plan: Plan, found: Inventory, nodes: Mapping[int, str], of: str) -> int:
    """How many locations beyond the first the groups have together."""
    return sum(
        len({location(found, nodes[worker], level) for worker in group}) - 1
        for groups, level in rules_of(plan, found, of=of)
        for group in groups
    )


def all_placements(plan: Plan, found: Inventory, keep: Mapping[int, str] | None = None) -> Iterator[dict[int, str]]:
    """Every placement that meets the required levels, by trying all."""
    rules = [(group, level) for groups, level in rules_of(plan, found) for group in groups]
    free = {n.name: n.free.gpus // plan.gpus_per_worker for n in found.usable}
    for name in (keep or {}).values():
        free[name] = free.get(name, 1) - 1
    nodes: dict[int, str] = {}

    def allowed(worker: int) -> bool:
        return all(
            len({location(found, nodes[w], level) for w in group if w in nodes}) <= 1
            for group, level in rules
            if worker in group
        )

    def extend(worker: int) -> Iterator[dict[int, str]]:
        if worker == len(plan.workers):
            yield dict(nodes)
            return
        options = [keep[worker]] if keep and worker in keep else [name for name, count in free.items() if count > 0]
        for name in options:
            nodes[worker] = name
            taken = 0 if keep and worker in keep else 1
            free[name] -= taken
            if allowed(worker):
                yield from extend(worker + 1)
            free[name] += taken
            del nodes[worker]

    yield from extend(0)


def tried(plan: Plan, found: Inventory, keep: Mapping[int, str] | None = None) -> Placement | None:
    try:
        return place(plan, found, keep, QUICK)
    except DoesNotFitError:
        return None


@st.composite
def clusters(draw: st.DrawFn) -> Inventory:
    """Up to 6 nodes with 1 to 4 GPUs, in domains, racks and zones, some of them without labels."""
    zoned = draw(st.booleans())
    nodes = []
    for index in range(draw(st.integers(1, 6))):
        rack = draw(st.integers(0, 2))
        labeled = draw(st.integers(0, 9)) > 0
        nodes.append(
            node(
                f"n{index}",
                gpus=draw(st.integers(1, 4)),
                rack=f"r{rack}" if labeled else None,
                domain=f"r{rack}d{draw(st.integers(0, 1))}" if labeled else None,
                zone=f"z{rack // 2}" if zoned else None,
            )
        )
    return inventory(*nodes)


DEGREES: list[dict[str, int]] = [
    {"data": 2},
    {"data": 4},
    {"pipeline": 2, "data": 2},
    {"pipeline": 3, "data": 2},
    {"context": 2, "data": 2},
    {"context": 2, "pipeline": 2, "data": 1},
    {"data": 4, "expert": 2},
    {"context": 2, "data": 2, "expert": 4},
    {"data": 6, "expert": 3},
    {"tensor": 2, "pipeline": 2, "data": 1},
    {"tensor": 2, "data": 3},
    {"tensor": 2, "data": 3, "gpus": 2},
    {"pipeline": 3, "data": 2, "gpus": 2},
    {"pipeline": 3, "data": 4, "gpus": 2},
    {"tensor": 2, "pipeline": 2, "data": 2, "gpus": 2},
]


@st.composite
def plans(draw: st.DrawFn, kinds: Sequence[str] = ("required", "preferred")) -> Plan:
    topology: dict[str, dict[str, str]] = {}
    for dimension in draw(st.sets(st.sampled_from(DIMENSIONS), min_size=1, max_size=3)):
        topology[dimension] = {
            kind: draw(st.sampled_from(NAMED)) for kind in kinds if kind == kinds[0] or draw(st.booleans())
        }
    return plan_with(topology, **draw(st.sampled_from(DEGREES)))


@given(clusters(), plans())
@settings(max_examples=150, deadline=None)
def test_a_placement_is_found_exactly_if_one_exists(found: Inventory, plan: Plan) -> None:
    exists = next(all_placements(plan, found), None) is not None
    placement = tried(plan, found)
    assert (placement is not None) == exists
    assert fits(plan, found) == exists
    if placement is not None:
        assert excess(plan, found, placement.nodes, "required") == 0
        counts = Counter(placement.nodes.values())
        assert all(count * plan.gpus_per_worker <= found.nodes[name].free.gpus for name, count in counts.items())


@given(clusters(), plans(("required",)), st.data())
@settings(max_examples=100, deadline=None)
def test_a_lost_worker_is_replaced_exactly_if_the_levels_can_be_kept(
    found: Inventory, plan: Plan, data: st.DataObject
) -> None:
    first = tried(plan, found)
    if first is None:
        return
    lost = data.draw(st.sets(st.sampled_from(sorted(first.nodes)), min_size=1, max_size=2))
    gone = data.draw(st.sampled_from(sorted(first.nodes[worker] for worker in lost)))
    left = replace(
        found, nodes={n: replace(v, unusable="cordoned" if n == gone else "") for n, v in found.nodes.items()}
    )
    keep = {worker: name for worker, name in first.nodes.items() if worker not in lost}
    exists = next(all_placements(plan, left, keep), None) is not None
    again = tried(plan, left, keep)
    assert (again is not None) == exists
    if again is not None:
        assert keep.items() <= again.nodes.items()
        assert excess(plan, left, again.nodes, "required") == 0
    else:
        with pytest.raises(DoesNotFitError) as error:
            place(plan, left, keep, QUICK)
        assert error.value.blocked_by_kept_workers == (next(all_placements(plan, left), None) is not None)


@given(clusters(), plans(("preferred",)))
@settings(max_examples=60, deadline=None)
def test_preferred_levels_are_left_as_rarely_as_possible(found: Inventory, plan: Plan) -> None:
    placement = tried(plan, found)
    if placement is None or plan.layout.tensor > plan.gpus_per_worker:
        return
    fewest = min(excess(plan, found, nodes, "preferred") for nodes in all_placements(plan, found))
    if excess(plan, found, placement.nodes, "preferred") > fewest:
        placement = place(plan, found)  # a short search may miss what the usual one finds
    assert excess(plan, found, placement.nodes, "preferred") == fewest


def test_a_gang_that_fits_on_nodes_of_one_worker_each_may_be_closer_together_elsewhere() -> None:
    """A domain has a node for each of three workers; a node outside it takes two."""
    small = [node(f"n{index}", gpus=2, rack="r1", domain="d1") for index in range(1, 4)]
    found = inventory(node("n0", gpus=4, rack=None, domain=None), *small)
    plan = plan_with(preferred(pipeline="node"), pipeline=3, data=2, gpus=2)
    placement = place(plan, found)
    assert excess(plan, found, placement.nodes, "preferred") == 1
    assert (placement.nodes[0], placement.nodes[1]) == ("n0", "n0")


@given(clusters(), plans())
@settings(max_examples=75, deadline=None)
def test_status_has_the_closest_level_that_no_group_leaves(found: Inventory, plan: Plan) -> None:
    placement = tried(plan, found)
    if placement is None:
        return
    expected = {}
    for dimension in DIMENSIONS:
        groups = [sorted({rank // plan.gpus_per_worker for rank in group}) for group in groups_of(plan, dimension)]
        if degree_of(plan, dimension) == 1:
            continue
        expected[dimension] = next(
            (
                level
                for level in ("node", *found.levels)
                if all(len({location(found, placement.nodes[w], level) for w in group}) == 1 for group in groups)
            ),
            "cluster",
        )
    assert (placement.to_status("job", {}).topology or {}) == expected


def test_units_of_a_level_have_equally_many_members() -> None:
    """The count of capacity relies on it: every layout with whole blocks is regular."""
    checked = 0
    for tensor, context, pipeline, data, gpus in product(
        (1, 2, 4), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 6), range(1, 9)
    ):
        for expert in (1, 2, 3, 4, 6):
            if data * context % expert or (expert % context and context % expert) or (tensor % gpus and gpus % tensor):
                continue
            if tensor * context * pipeline * data % max(tensor, gpus):
                continue
            mesh = RankBlocks(tensor, context, pipeline, data, expert, gpus)
            found: dict[str, list[tuple[int, ...]]] = {}
            for group in mesh.groups():
                found.setdefault(group.dimension.value, []).append(group.blocks)
            rules = [LevelRule(name, "rack", "rack", tuple(groups)) for name, groups in found.items()]
            for mask in range(1, 1 << len(rules)):
                chosen = [rule for bit, rule in enumerate(rules) if mask >> bit & 1]
                sizes = set(Counter(components(chosen, mesh.blocks)).values())
                assert len(sizes) == 1, (mesh, chosen)
                checked += 1
    assert checked > 1000


def test_the_levels_of_the_api_are_those_of_the_fabric() -> None:
    assert tuple(FabricLevel) == ("node", *LEVELS)


def test_the_message_names_dimension_level_and_what_is_needed() -> None:
    found = inventory(*racks(2, 2, 8))
    with pytest.raises(DoesNotFitError) as error:
        place(plan_with(required(pipeline="rack"), 8, tensor=8, pipeline=3, data=1), found)
    assert str(error.value) == (
        "`topology.pipeline.required: rack` needs 3 workers with 8 GPUs each in one rack: the most that fit in one are "
        "2. It would not fit on the empty nodes either: set `topology.pipeline.required` to a wider level, or lower "
        "the degree"
    )
    with pytest.raises(DoesNotFitError, match=r"lower the degree\. Set `spec\.replicas: 2` to start now$"):
        place(plan_with(required(data="rack"), 8, tensor=8, pipeline=1, data=3), found)
    busy = replace(found, nodes={**found.nodes, "rack0-node0": replace(found.nodes["rack0-node0"], free=Resources())})
    with pytest.raises(DoesNotFitError) as error:
        place(plan_with(required(pipeline="rack"), 8, tensor=8, pipeline=2, data=2), busy)
    assert "8 GPUs missing" in str(error.value)
    wide = inventory(*racks(3, 3, 8))
    first = {**wide.nodes, "rack0-node0": replace(wide.nodes["rack0-node0"], free=Resources())}
    first["rack1-node0"] = replace(wide.nodes["rack1-node0"], free=Resources())
    with pytest.raises(DoesNotFitError) as error:
        place(plan_with(required(pipeline="rack"), 8, tensor=8, pipeline=3, data=2), replace(wide, nodes=first))
    assert (
        "`topology.pipeline.required: rack` needs 2 times 3 workers with 8 GPUs each in one rack: 1 of these fit"
        in (str(error.value))
    )
    assert error.value.replicas_that_fit == 1


def test_a_level_without_labels_is_met_by_the_next_closer_one() -> None:
    found = inventory(*racks(2, 2, 8, zone=None))
    with pytest.raises(DoesNotFitError, match=r"`topology.job.required: zone` \(no node has a label of this level"):
        place(plan_with(required(job="zone"), 8, tensor=8, data=3), found)
    placement = place(plan_with(required(job="zone"), 8, tensor=8, data=2), found)
    assert (placement.to_status("job", {}).topology or {})["job"] == "rack"


def test_a_wider_required_level_lets_tensor_parallel_groups_cross_domains() -> None:
    found = inventory(*racks(2, 2, 4))
    plan = plan_with(required(tensor="rack"), 4, tensor=8, data=2)
    placement = place(plan, found)
    assert placement.crossings.straddling_tensor_groups == 2
    assert (placement.to_status("job", {}).topology or {})["tensor"] == "rack"
    with pytest.raises(DoesNotFitError):
        place(plan_with({}, 4, tensor=8, data=2), found)


def test_a_replica_that_is_added_stays_within_the_required_level() -> None:
    found = inventory(*racks(2, 3, 8))
    two = plan_with(required(data="rack"), 8, tensor=8, data=2)
    first = place(two, found)
    rack = {first.places[w].rack for w in range(2)}
    grown = place(plan_with(required(data="rack"), 8, tensor=8, data=3), found, first.nodes)
    assert {grown.places[w].rack for w in range(3)} == rack
    with pytest.raises(DoesNotFitError):
        place(plan_with(required(data="rack"), 8, tensor=8, data=4), found, first.nodes)


def test_after_a_loss_workers_do_not_fill_gaps_of_other_replicas_that_they_must_be_close_to() -> None:
    topology = required(pipeline="rack")
    old = plan_with(topology, 8, tensor=8, pipeline=2, data=2)
    new = plan_with(topology, 8, tensor=8, pipeline=2, data=1)
    # Worker 1 of replica 0 and worker 2 of replica 1 are lost: they are in different racks.
    assert workers_on_resize(old, new, {0: 0, 3: 3}) == {0: 0}
    # A replica that is complete takes the place of one that is not.
    assert workers_on_resize(old, new, {0: 0, 2: 2, 3: 3}) == {2: 0, 3: 1}


def test_a_placement_from_before_that_leaves_a_required_level_is_not_used_again() -> None:
    found = inventory(*racks(2, 2, 8))
    before = {0: "rack0-node0", 1: "rack1-node0"}
    plan = plan_with(required(job="rack"), 8, tensor=8, data=2)
    placement = place_near_previous(plan, found, before=PreviousPlacement(8, 1, 2, 8, before), options=QUICK)
    assert (placement.to_status("job", {}).topology or {})["job"] == "rack"


def test_a_tensor_degree_wider_than_a_node_is_rejected_with_the_field() -> None:
    found = inventory(*[node(f"n{i}", gpus=8, domain="d0") for i in range(4)])
    spec = spec_of(
        replicas=1,
        parallelism={"tensor": 16, "pipeline": 1, "microBatches": 1},
        workers={"image": "worker", "gpusPerWorker": 8},
        topology=required(tensor="node"),
        model={**LARGE, "heads": 16},
    )
    with pytest.raises(PlanError, match=r"`topology.tensor.required` is `node`, `parallelism.tensor` is 16, .* 8 GPUs"):
        make_plan(spec, found)


def test_without_the_field_placements_are_as_before() -> None:
    found = inventory(*racks(2, 3, 8))
    plan = plan_with({}, 8, tensor=8, pipeline=2, data=2)
    bare = replace(plan, topology=None)
    assert place(bare, found).nodes == place(plan, found).nodes
    assert place(bare, found).topology == {}
    assert GroupLevels.of(bare, found.levels) == GroupLevels()


def test_the_gap_is_empty_if_a_level_costs_what_the_bound_does_not_know() -> None:
    """Two racks with three free nodes: the data-parallel groups stay inside, so both pipelines cross instead."""
    found = inventory(*racks(2, 4, 8), pods=tuple(pod(f"p{n}", gpus=8, on=f"rack{n}-node0") for n in range(2)))
    plan = plan_with(required(data="rack"), gpus=8, tensor=8, pipeline=2, data=2)
    unbound = place(replace(plan, topology=None), found, options=QUICK)
    assert (unbound.gap, unbound.to_status("job", {}).gap) == (0.0, "0")
    placed = place(plan, found, options=QUICK)
    assert placed.cost > unbound.cost == placed.bound
    assert (placed.gap, placed.to_status("job", {}).gap) == (None, "")
    proved = place(plan_with(required(data="rack"), gpus=8, tensor=8, data=2), found, options=QUICK)
    assert (proved.cost, proved.gap, proved.to_status("job", {}).gap) == (0.0, 0.0, "0")


def test_the_nodes_to_free_are_in_one_rack_if_the_level_needs_that() -> None:
    """The nodes with fewest GPUs in use are in different racks: freeing them does not help."""
    uses = {"rack0-node0": 1, "rack1-node0": 1, "rack0-node1": 4, "rack1-node1": 8}
    found = inventory(*racks(2, 3, 8), pods=tuple(pod(f"on-{at}", gpus=gpus, on=at) for at, gpus in uses.items()))
    plan = plan_with(required(data="rack"), gpus=8, tensor=8, data=3)
    asked = nodes_to_free(plan, found)
    assert asked is not None
    assert (asked.nodes, asked.gpus, asked.workers) == (["rack0-node0", "rack0-node1"], 5, 2)
    assert nodes_to_free(plan_with(required(data="rack"), gpus=8, tensor=8, data=4), found) is None
    assert nodes_to_free(plan_with(required(data="rack"), gpus=8, tensor=8, data=1), found) is None


@given(
    st.lists(st.integers(0, 8), min_size=6, max_size=6), st.sampled_from(("node", "rack", "zone")), st.integers(1, 7)
)
@settings(max_examples=50, deadline=None)
def test_freeing_the_nodes_is_enough_and_none_is_named_in_vain(uses: list[int], level: str, replicas: int) -> None:
    nodes = racks(2, 3, 8)
    names = [one["metadata"]["name"] for one in nodes]
    busy = {name: pod(f"on-{name}", gpus=used, on=name) for name, used in zip(names, uses, strict=True) if used}
    plan = plan_with(required(data=level), gpus=4, tensor=4, data=replicas)
    asked = nodes_to_free(plan, inventory(*nodes, pods=tuple(busy.values())))
    possible = fits(plan, inventory(*nodes))
    assert (asked is not None) == (possible and not fits(plan, inventory(*nodes, pods=tuple(busy.values()))))
    if asked is None:
        return

    def without_pods_on(freed: Sequence[str]) -> Inventory:
        return inventory(*nodes, pods=tuple(one for name, one in busy.items() if name not in freed))

    assert fits(plan, without_pods_on(asked.nodes))
    assert asked.gpus == sum(uses[names.index(name)] for name in asked.nodes)
    assert not any(fits(plan, without_pods_on([n for n in asked.nodes if n != name])) for name in asked.nodes)
