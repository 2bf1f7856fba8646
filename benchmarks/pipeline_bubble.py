"""The bubble of every pipeline schedule: measured, simulated, and from its closed form.

Every rank is a process that runs the worker's own executor; its stages sleep instead of computing, so the machine's
cores do not matter. Baselines in the same run: 1F1B, and torch.distributed.pipelining's `Schedule1F1B` on the same
stages. A row fails when the measured bubble is more than 3 points from the simulator's. A sleeping rank does one thing
at a time: pairs that DualPipe overlaps run one after the other, in the simulation too. ZB-H2's and ZB-V's closed forms
are of ranks that need not meet at a step's end, where they do here; DualPipe's are the longest rank's.

    python -m benchmarks.pipeline_bubble [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks._circumstances import circumstances
from benchmarks._pipeline_ranks import bubble, measure
from benchmarks._report import table, write_json
from benchmarks._torch_pipeline import measure_torch
from meshwright.schedules.actions import Schedule
from meshwright.schedules.registry import NAMES, named
from meshwright.schedules.schedule import PipelineShape, StageTimes
from meshwright.schedules.simulator import ActionCosts, simulate

LIMIT = 0.03
UNIT = 0.06
"""Seconds of each of F, B and W of one stage."""
COSTS = ActionCosts(UNIT, UNIT, UNIT)
BASELINE = "1f1b by torch"
CHUNKED = ("interleaved", "looped-bfs")
TWO_A_RANK = (*CHUNKED, "zb-v", "dualpipe-v")


def room(ranks: int) -> int:
    """Micro-batches that ranks may hold with `automatic`: as many as with ZB-H2."""
    return 2 * ranks - 1


def schedule_of(name: str, ranks: int, micro_batches: int) -> Schedule:
    """The schedule called `name`."""
    chunks = 2 if name in CHUNKED else 1
    return named(name).generate(PipelineShape(ranks, micro_batches, chunks, room(ranks)), COSTS)


def predicted(name: str, ranks: int, micro_batches: int) -> dict[str, float]:
    """The bubble by simulation and by closed form."""
    parts = 2 if name in TWO_A_RANK else 1
    times = StageTimes(UNIT * parts, UNIT * parts, UNIT * parts)
    idle = named(name).bubble(PipelineShape(ranks, micro_batches, parts, room(ranks)), times)
    return {
        "simulated": simulate(schedule_of(name, ranks, micro_batches).serialized(), COSTS).bubble,
        "closed form": idle / (idle + micro_batches * times.total),
    }


def rows(ranks: int, micro_batches: int, steps: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Schedule by schedule, as soon as it is measured: its name, and its bubble in three ways."""
    for name in (*NAMES, "automatic"):
        took = measure(schedule_of(name, ranks, micro_batches), COSTS, steps)
        yield name, {"measured": bubble(took), **predicted(name, ranks, micro_batches)}
    torchs = measure_torch(ranks, micro_batches, COSTS, steps)
    yield BASELINE, {"measured": torchs, **predicted("1f1b", ranks, micro_batches)}


def main() -> None:
    """Runs it; exit status 1 when a schedule waits longer than its simulation says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the same numbers")
    parser.add_argument("--quick", action="store_true", help="two ranks and one step instead of four and three")
    args = parser.parse_args()
    ranks, micro_batches, steps = (2, 4, 1) if args.quick else (4, 8, 3)
    settings = {"ranks": ranks, "micro-batches": micro_batches, "steps": steps, "seconds of F, B and W": UNIT}
    known = {**circumstances("cpu"), **settings}
    found: dict[str, dict[str, float]] = {}
    for name, row in rows(ranks, micro_batches, steps):
        found[name] = row
        write_json(args.json, {"circumstances": known, "results": found})
    columns = ["closed form", "simulated", "measured"]
    shown = [[name, *(f"{row[column]:.1%}" for column in columns)] for name, row in found.items()]
    table(f"Bubble of {ranks} ranks, {micro_batches} micro-batches, F = B = W", ["schedule", *columns], shown)
    ours = {name: row for name, row in found.items() if name != BASELINE}
    off = [name for name, row in ours.items() if abs(row["measured"] - row["simulated"]) > LIMIT]
    if off:
        print(f"more than {LIMIT:.0%} from the simulation: {', '.join(off)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
