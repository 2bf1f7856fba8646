"""The bubble of every pipeline schedule: measured, simulated, and from its closed form.

Every rank is a process that runs the worker's own executor; its stages sleep instead of computing, so the machine's
cores do not matter. Baselines in the same run: 1F1B, and torch.distributed.pipelining's `Schedule1F1B` on the same
stages. A row fails when the measured bubble is more than 3 points from the simulator's. A sleeping rank does one thing
at a time: pairs that DualPipe overlaps run one after the other, in the simulation too.

    python -m benchmarks.pipeline_bubble [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks._pipeline_ranks import bubble, measure
from benchmarks._report import table, write_json
from benchmarks._torch_pipeline import measure_torch
from meshwright.schedules.automatic import automatic
from meshwright.schedules.closed_forms import StageTimes
from meshwright.schedules.closed_forms import bubble as closed_form
from meshwright.schedules.generate import NAMES, generate
from meshwright.schedules.simulate import Costs, simulate

LIMIT = 0.03
UNIT = 0.06
"""Seconds of each of F, B and W of one stage."""
CHUNKED = ("interleaved", "looped-bfs")
TWO_A_RANK = (*CHUNKED, "zb-v", "dualpipe-v")


def rows(ranks: int, micro_batches: int, steps: int) -> list[dict[str, float | str]]:
    """A row a schedule."""
    found: list[dict[str, float | str]] = []
    for name in (*NAMES, "automatic"):
        parts = 2 if name in TWO_A_RANK else 1
        costs = Costs(UNIT, UNIT, UNIT)
        if name == "automatic":
            schedule = automatic(ranks, micro_batches, 2 * ranks - 1, costs)
        else:
            schedule = generate(name, ranks, micro_batches, 2 if name in CHUNKED else 1)
        simulated = simulate(schedule.apart(), costs).bubble
        row: dict[str, float | str] = {"schedule": name, "simulated": simulated}
        row["measured"] = bubble(measure(schedule, costs, steps))
        if name != "automatic":
            times = StageTimes(UNIT * parts, UNIT * parts, UNIT * parts)
            idle = closed_form(name, ranks, micro_batches, parts, times)
            row["closed form"] = idle / (idle + micro_batches * times.total)
        found.append(row)
    row = {"schedule": "1f1b by torch", "simulated": simulate(generate("1f1b", ranks, micro_batches)).bubble}
    row["measured"] = measure_torch(ranks, micro_batches, Costs(UNIT, UNIT, UNIT), steps)
    found.append(row)
    return found


def main() -> None:
    """Runs it; exit status 1 when a schedule waits longer than its simulation says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the same numbers")
    parser.add_argument("--quick", action="store_true", help="two ranks and one step instead of four and three")
    args = parser.parse_args()
    ranks, micro_batches, steps = (2, 4, 1) if args.quick else (4, 8, 3)
    found = rows(ranks, micro_batches, steps)
    columns = ["schedule", "closed form", "simulated", "measured"]
    shown = [[row[c] if c == "schedule" else f"{row[c]:.1%}" if c in row else "" for c in columns] for row in found]
    table(f"Bubble of {ranks} ranks, {micro_batches} micro-batches, F = B = W", columns, shown)
    write_json(args.json, {str(row["schedule"]): {k: v for k, v in row.items() if k != "schedule"} for row in found})
    off = [r["schedule"] for r in found[:-1] if abs(float(r["measured"]) - float(r["simulated"])) > LIMIT]
    if off:
        print(f"more than {LIMIT:.0%} from the simulation: {', '.join(map(str, off))}")
        sys.exit(1)


if __name__ == "__main__":
    main()
