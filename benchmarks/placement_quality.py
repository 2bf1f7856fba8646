"""How good placements are: against the exact optimum, against published instances, and against other schedulers.

    .venv/bin/python benchmarks/placement_quality.py [--quick] [--only PART] [--minutes M] [--json FILE]

Costs are weighted crossings (`meshwright.planner.placement.objective`). Small clusters are proved with CP-SAT. At
2,048, 16,384 and 100,000 GPUs a counting bound is printed, and what annealing and large-neighborhood search find in
`--minutes`. Baselines run on the same free nodes. Needs `ortools` (the `benchmark` extra).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from _baselines import BASELINES
from _exact import solve
from _long import best_in_minutes
from _placing import cluster, fragmented, plan_of
from _report import table, write_json

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.placement import Placement, PlacingOptions, place
from meshwright.planner.placement.bins import DomainBins
from meshwright.planner.placement.capacity import FreeCapacity, GangShape
from meshwright.planner.placement.objective import crossings
from meshwright.planner.placement.options import DEFAULT_EFFORT
from meshwright.planner.placement.problem import Problem
from meshwright.planner.placement.rank_blocks import Dimension
from meshwright.planner.placement.weights import Weights
from meshwright.planner.plan import Plan

INSTANCES = (
    (4, 4, (6, 5, 4, 3), 13),
    (8, 4, (10, 9, 8, 7, 4), 15),
    (8, 8, (18, 15, 13, 11, 9, 8), 35),
    (16, 8, (30, 28, 24, 20, 18, 16), 43),
    (16, 16, (50, 46, 40, 38, 34, 30, 28), 89),
)
"""Replicas, stages, free nodes of each rack, least cost known before; a rack costs pipelines 3 and replicas 1."""
LARGE = {2_048: (16, 14), 16_384: (16, 110), 100_000: (16, 700)}
"""GPUs -> stages and replicas of the job; the nodes are fragmented and the job takes most of them."""
RACK_WEIGHTS = Weights(
    {Dimension.PIPELINE: {"domain": 0, "rack": 3, "spine": 0}, Dimension.DATA: {"rack": 1, "spine": 0}}
)


@dataclass(frozen=True, slots=True)
class Case:
    """One small cluster and what came out."""

    cost: float
    optimum: float
    proved: bool


def sites_of(plan: Plan, inventory: Inventory, options: PlacingOptions) -> DomainBins:
    """The arithmetic of a case, as `place` sees it."""
    return DomainBins(GangShape(plan).mesh, FreeCapacity(plan, inventory, {}), {}, inventory.levels, options.weights)


def bins_of(problem: Problem, domain_bins: DomainBins, placement: Placement) -> list[int]:
    """A placement as bins of its problem."""
    return [domain_bins.bin_at(placement.places[block]) for block in range(problem.size)]


def small_case(seed: int) -> tuple[Plan, Inventory]:
    """A job of at most 32 nodes on 2 to 6 fragmented racks of one or two spines."""
    draw = random.Random(seed)
    stages, replicas = draw.choice(
        [(2, 4), (2, 8), (4, 2), (4, 4), (4, 6), (4, 8), (8, 2), (8, 3), (8, 4), (3, 6), (5, 5)]
    )
    needed = stages * replicas
    while True:
        racks = [draw.randint(1, max(2, needed // 2)) for _ in range(draw.randint(2, 6))]
        if needed <= sum(racks) <= 1.5 * needed:
            return plan_of(stages, replicas), cluster(racks, draw.choice((2, 3, 8)), draw)


def exact_case(seed: int, seconds: float) -> Case:
    """Places a small cluster and proves, or looks for, the optimum."""
    plan, inventory = small_case(seed)
    placement = place(plan, inventory)
    if placement.cost <= placement.bound + 1e-6:
        return Case(placement.cost, placement.cost, proved=True)
    domain_bins = sites_of(plan, inventory, PlacingOptions())
    layout = plan.layout
    found = solve(
        domain_bins.problem,
        layout.data,
        layout.pipeline,
        seconds,
        placement.cost - domain_bins.constant,
        placement.bound - domain_bins.constant,
    )
    cost = placement.cost if found.cost is None else found.cost + domain_bins.constant
    return Case(placement.cost, cost, found.proved)


def small(count: int, seconds: float, numbers: dict[str, object]) -> None:
    """Many small clusters against the exact optimum."""
    cases = [exact_case(seed, seconds) for seed in range(count)]
    gaps = [(c.cost - c.optimum) / c.optimum if c.optimum else float(c.cost > 0) for c in cases]
    numbers |= {"gap_mean": mean(gaps), "gap_worst": max(gaps)}
    numbers |= {"small_cases": count, "small_proved": sum(c.proved for c in cases)}
    table(
        f"{count} fragmented clusters of at most 32 nodes against the exact optimum",
        ["", "found", "allowed"],
        [
            ["mean gap", f"{100 * mean(gaps):.2f}%", "0.5%"],
            ["worst gap", f"{100 * max(gaps):.2f}%", "5%"],
            ["optimum proved", f"{sum(c.proved for c in cases)} of {count}", ""],
        ],
    )


def instances(numbers: dict[str, object]) -> None:
    """The published two-sided instances."""
    rows = []
    for replicas, stages, racks, known in INSTANCES:
        effort = DEFAULT_EFFORT * (12 if replicas * stages > 128 else 1)
        started = time.perf_counter()
        placement = place(
            plan_of(stages, replicas), cluster(racks), options=PlacingOptions(RACK_WEIGHTS, effort=effort)
        )
        seconds = time.perf_counter() - started
        name = f"{replicas}x{stages}"
        numbers[f"instance_{name}"] = {"cost": placement.cost, "best_known": known, "seconds": seconds}
        rows.append([name, f"{placement.cost:g}", f"{known}", f"{placement.bound:g}", f"{seconds:.2f}"])
    table("Two-sided instances", ["replicas x stages", "cost", "best known", "bound", "seconds"], rows)


def large(minutes: float, sizes: Sequence[int], numbers: dict[str, object]) -> None:
    """Large fragmented clusters: the bound, and what other methods find in minutes."""
    rows, gaps = [], {}
    for gpus in sizes:
        stages, replicas = LARGE[gpus]
        inventory = cluster(fragmented(gpus // 8, 32, 0.06, seed=gpus), names=random.Random(gpus))
        plan = plan_of(stages, replicas)
        started = time.perf_counter()
        placement = place(plan, inventory)
        seconds = time.perf_counter() - started
        domain_bins = sites_of(plan, inventory, PlacingOptions())
        best, method = placement.cost, "not asked"
        if minutes:
            start = bins_of(domain_bins.problem, domain_bins, placement)
            best, method = best_in_minutes(domain_bins.problem, start, 45 * minutes, gpus)
            best += domain_bins.constant
            effort = int(DEFAULT_EFFORT * max(1.0, 15 * minutes / seconds))
            longer = place(plan, inventory, options=PlacingOptions(effort=effort), previous=placement.nodes).cost
            best, method = (longer, "the same search, longer") if longer < best else (best, method)
        gap = (placement.cost - best) / best if minutes else None
        gaps[str(gpus)] = gap
        numbers[f"large_{gpus}"] = {"cost": placement.cost, "bound": placement.bound, "seconds": seconds, "best": best}
        rows.append(
            [
                f"{gpus:,}",
                f"{placement.cost:g}",
                f"{seconds:.2f}",
                f"{placement.bound:.0f}",
                f"{100 * (placement.gap or 0.0):.1f}%",
                f"{best:g}",
                method,
                "" if gap is None else f"{100 * gap:.2f}%",
            ]
        )
    numbers["large_gap"] = gaps
    table(
        f"Large clusters; other methods in {minutes:g} minutes",
        ["GPUs", "cost", "seconds", "bound", "above bound at most", "best", "by", "gap to best (allowed 5%)"],
        rows,
    )


def baselines(count: int, numbers: dict[str, object]) -> None:
    """Other schedulers' choices on the small clusters and on one of 2,048 GPUs."""
    ratios: dict[str, list[float]] = {name: [] for name in BASELINES}
    stages, replicas = LARGE[2_048]
    wide = cluster(fragmented(256, 32, 0.06, seed=2_048), names=random.Random(2_048))
    for seed, (plan, inventory) in enumerate([*map(small_case, range(count)), (plan_of(stages, replicas), wide)]):
        ours = place(plan, inventory).cost
        for name, ratio in _ratios(plan, inventory, ours, seed).items():
            ratios[name].append(ratio)
    numbers |= {f"ratio_{name}": mean(found) for name, found in ratios.items()}
    rows = [[name, f"{mean(found):.2f}", f"{found[-1]:.2f}"] for name, found in ratios.items()]
    table("Cost of other schedulers, ours being 1", ["", "mean", "2,048 GPUs"], [["meshwright", "1.00", "1.00"], *rows])


def _ratios(plan: Plan, inventory: Inventory, ours: float, seed: int) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for name, choose in BASELINES.items():
        nodes = choose(plan.layout.world_size // 8, inventory, random.Random(seed))
        places = {worker: inventory.nodes[node].place for worker, node in enumerate(nodes)}
        found[name] = crossings(plan, places).cost / ours
    return found


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the same numbers")
    parser.add_argument("--quick", action="store_true", help="few clusters, short proofs, no other methods at scale")
    parser.add_argument("--only", choices=("instances", "baselines", "large", "small"), help="one part of it")
    parser.add_argument("--cases", type=int, default=200, help="small clusters")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for other methods at each large size")
    parser.add_argument("--exact-seconds", type=float, default=60.0, help="time for a proof")
    args = parser.parse_args()
    cases, seconds = (12, 5.0) if args.quick else (args.cases, args.exact_seconds)
    minutes = 0.0 if args.quick else args.minutes
    numbers: dict[str, object] = {"minutes": minutes, "exact_seconds": seconds}
    parts: dict[str, Callable[[], None]] = {
        "instances": lambda: instances(numbers),
        "baselines": lambda: baselines(cases, numbers),
        "large": lambda: large(minutes, list(LARGE), numbers),
        "small": lambda: small(cases, seconds, numbers),
    }
    for name, part in parts.items():
        if args.only in (None, name):
            part()
    if args.json:
        write_json(args.json, numbers)


if __name__ == "__main__":
    main()
