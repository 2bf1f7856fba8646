"""Placements of given layouts on drawn clusters: racks, domains of several nodes, spines, holes, and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.placement import (
    Placement,
    PlacingOptions,
    PreviousPlacement,
    cost_of_fragmentation,
    place,
    place_near_previous,
    remap_ranks,
    with_spares,
)
from meshwright.planner.plan import Plan, make_plan
from meshwright.planner.render import render_placement, summary_line
from tests.golden.files import check
from tests.golden.planner.clusters import CLIQUE, LEAF, SPINE, ZONE, Draws, raw_node, raw_pod
from tests.golden.planner.jobs import job
from tests.golden.planner.records import attempt, placement_record, spec_of

CASES = 80
QUICK = PlacingOptions(effort=20_000)


def cluster(draws: Draws) -> Inventory:
    """Racks of unequal size, some nodes unlabeled, some partly taken, some not usable."""
    wide, spines = draws.below(3) == 0, draws.below(3) == 0
    objects: list[dict[str, Any]] = []
    pods: list[dict[str, Any]] = []
    for rack in range(1 + draws.below(5)):
        for number in range(1 + draws.below(9)):
            labels = {LEAF: f"rack{rack}"} if draws.below(20) else {}
            labels |= {CLIQUE: f"domain{rack}.{number // 3}"} if wide else {}
            labels |= {SPINE: f"spine{rack // 2}", ZONE: f"zone{rack // 4}"} if spines else {}
            name = f"node-{draws.below(1000):03d}-{rack}-{number}"
            objects.append(raw_node(name, labels=labels, spec={} if draws.below(12) else {"unschedulable": True}))
            taken = draws.choice((0, 0, 0, 1, 2, 4, 6, 8))
            pods += [raw_pod(f"pod-{name}", name, taken)] if taken else []
    return Inventory.from_objects(objects, pods)


def plan(draws: Draws) -> Plan:
    """The plan of a command: its layout is its spec's, and groups weigh what such groups usually send."""
    without = {"model": None, "data": None, "training": None, "runtime": {"command": ["train"]}}
    while True:
        gpus, tensor = draws.choice((1, 2, 4, 8)), draws.choice((1, 2, 4, 8))
        pipeline, context = draws.choice((1, 1, 2, 3, 4, 6)), draws.choice((1, 1, 1, 2))
        replicas = draws.choice((1, 2, 3, 4, 6, 8))
        degrees = {"tensor": tensor, "pipeline": pipeline, "context": context}
        world = replicas * tensor * pipeline * context
        if world % gpus == 0 and world <= 160 and max(gpus, tensor) % min(gpus, tensor) == 0:
            wanted = job("", replicas=replicas, parallelism=degrees, workers={"gpusPerWorker": gpus}, **without)
            return make_plan(spec_of(wanted), Inventory())


def cases(number: int) -> dict[str, tuple[Any, Any]]:
    """What is asked of one cluster: (decisions, text) by name."""
    draws = Draws(f"placement {number}")
    inventory, wanted = cluster(draws), plan(draws)
    name = f"{number:03d}"
    held: list[Placement] = []

    def first() -> tuple[Any, Any]:
        held.append(place(wanted, inventory, options=QUICK))
        return _both(with_spares(held[0], inventory, 2))

    layout = wanted.layout
    degrees = [layout.tensor, layout.context, layout.pipeline, layout.data, wanted.gpus_per_worker]
    found = {f"{name} of TP, CP, PP, DP, GPUs a worker": (degrees, None), name: attempt(first)}
    if not held:
        wide = PlacingOptions(effort=20_000, tensor_within="rack")
        return {**found, f"{name}, groups of a rack": attempt(lambda: _both(place(wanted, inventory, options=wide)))}
    placed = held[0]
    before = PreviousPlacement.of_status(placed.to_status("job", {}))
    lost = draws.choice(sorted(set(placed.nodes.values())))
    nodes = {key: node for key, node in inventory.nodes.items() if key != lost}
    left = Inventory(nodes, inventory.warnings, inventory.levels)
    keep = {worker: node for worker, node in placed.nodes.items() if node != lost and draws.below(8)}
    given = dict(zip(placed.nodes, sorted(placed.nodes.values(), key=lambda _: draws.below(1000)), strict=True))
    return {
        **found,
        f"{name}, one node lost": attempt(lambda: _both(place_near_previous(wanted, left, keep, before, QUICK))),
        f"{name}, anew without a node": attempt(lambda: _both(place_near_previous(wanted, left, None, before, QUICK))),
        f"{name}, nodes given": attempt(lambda: _both(remap_ranks(wanted, inventory, given, QUICK))),
        f"{name}, of others": ([cost_of_fragmentation(placed, inventory, QUICK)], None),
    }


def _both(placement: Placement) -> tuple[Any, Any]:
    plan, status = placement.plan.to_status(), placement.to_status("job", {})
    drawing = [summary_line(plan, status), *render_placement(plan, status)] if len(placement.nodes) <= 8 else []
    return placement_record(placement), [*placement.notes, *drawing]


def test_placements() -> None:
    found = {name: pair for number in range(CASES) for name, pair in cases(number).items()}
    check("planner/placements.jsonl", {name: pair[0] for name, pair in found.items()})
    check("planner/placements-text.jsonl", {name: pair[1] for name, pair in found.items() if pair[1]})


@pytest.mark.long
def test_large_placements() -> None:
    """So many tensor-parallel groups that they are placed in parts."""
    found: dict[str, Any] = {}
    for number, (racks, replicas, pipeline) in enumerate(((40, 50, 8), (24, 12, 12), (60, 60, 6))):
        draws = Draws(f"large placement {number}")
        free = [(rack, node) for rack in range(racks) for node in range(16) if draws.below(10)]
        nodes = [raw_node(f"r{rack:02d}-{node:02d}", labels={LEAF: f"rack{rack}"}) for rack, node in free]
        without = {"model": None, "data": None, "training": None, "runtime": {"command": ["train"]}}
        wanted = job("", replicas=replicas, parallelism={"tensor": 8, "pipeline": pipeline}, **without)
        inventory = Inventory.from_objects(nodes, [])
        placed = place(make_plan(spec_of(wanted), inventory), inventory)
        found[f"{replicas} x {pipeline} on {racks} racks"] = placement_record(placed)
    check("planner/placements-long.jsonl", found)


def test_what_was_strange_about_nodes() -> None:
    found = {f"{number:03d}": cluster(Draws(f"placement {number}")) for number in range(CASES)}
    places = {
        name: {node.name: [*node.place.names, node.free.gpus, node.unusable != ""] for node in one.nodes.values()}
        for name, one in found.items()
    }
    check("planner/inventories.jsonl", {name: places[name] for name in sorted(places)[:20]})
    texts = {name: [list(one.warnings), dict(sorted(one.unusable.items()))] for name, one in found.items()}
    check("planner/inventories-text.jsonl", texts)
