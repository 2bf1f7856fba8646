"""What `schedule: Automatic` gains by measuring: a step in the order for even passes, and in the one it changes to.

Every rank is a process that runs the worker's own executor, which times its passes, agrees on the times and searches;
its stages sleep instead of computing, so the machine's cores do not matter. A row fails when the bubble in the measured
order is more than 3 points above the simulator's.

    python -m benchmarks.automatic_order [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks._pipeline_ranks import bubble, measure
from benchmarks._report import table, write_json
from meshwright.schedules.automatic import automatic
from meshwright.schedules.simulator import ActionCosts, simulate

LIMIT = 0.03
UNIT = 0.04
"""Seconds of a forward pass."""
PASSES = {
    "1 : 1 : 1": ActionCosts(1.0, 1.0, 1.0),
    "1 : 1.6 : 0.5": ActionCosts(1.0, 1.6, 0.5),
    "1 : 2 : 1": ActionCosts(1.0, 2.0, 1.0),
}
"""F : B : W. Attention over long sequences makes W the cheapest, activation checkpointing makes B the dearest."""


def rows(ranks: int, micro_batches: int, room: int, steps: int) -> list[dict[str, float | str]]:
    """A row for each of `PASSES`."""
    found: list[dict[str, float | str]] = []
    even = automatic(ranks, micro_batches, room)
    for name, relative in PASSES.items():
        costs = ActionCosts(
            *(UNIT * each for each in (relative.forward, relative.backward_input, relative.backward_weight))
        )
        own = automatic(ranks, micro_batches, room, relative)
        found.append(
            {
                "F : B : W": name,
                "even, simulated": simulate(even, costs).bubble,
                "even, run": bubble(measure(even, costs, steps)),
                "own, simulated": simulate(own, costs).bubble,
                "own, run": bubble(measure(even, costs, steps, room)),
            }
        )
    return found


def main() -> None:
    """Runs it; exit status 1 when the measured order waits longer than the one for the true costs should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the same numbers")
    parser.add_argument("--quick", action="store_true", help="two ranks and one step instead of four and three")
    args = parser.parse_args()
    ranks, micro_batches, room, steps = (2, 4, 3, 1) if args.quick else (4, 16, 6, 3)
    found = rows(ranks, micro_batches, room, steps)
    columns = list(found[0])
    shown = [[cell if isinstance(cell, str) else f"{cell:.1%}" for cell in row.values()] for row in found]
    table(f"Bubble of {ranks} ranks, {micro_batches} micro-batches, room for {room}", columns, shown)
    write_json(args.json, {str(row["F : B : W"]): {k: v for k, v in row.items() if k != "F : B : W"} for row in found})
    off = [row["F : B : W"] for row in found if float(row["own, run"]) - float(row["own, simulated"]) > LIMIT]
    if off:
        print(f"more than {LIMIT:.0%} above the simulation: {', '.join(map(str, off))}")
        sys.exit(1)


if __name__ == "__main__":
    main()
