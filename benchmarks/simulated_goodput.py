"""Goodput of real runs with injected faults, next to what the simulation says of the same runs.

    .venv/bin/python -m benchmarks.simulated_goodput [--runs 10] [--seed 1] [--json FILE]

Each run is a small job on an embedded cluster with faults of four kinds (a killed rank, a stopped rank, a deleted pod,
a lost node) at seeded times. Its measured goodput is the time that its steps take undisturbed, over all time. The
operator's ledger is beside it: its reports are seconds apart, which in runs of a minute is up to ten points.

The simulation gets the times of the faults and measured times: of the start, of a step, of a checkpoint's stall, and of
detection and restart by kind of fault. "own" are those that were measured in the same run, "others" the means of all
other runs, as for a run that has not been yet. What a fault costs in steps that are done again follows from the
simulation's checkpoints in both.

Runs that FILE has already are not repeated. A run in which something else failed too, as on a machine so busy that
nodes time out, is left out: start the program again to repeat it. Exit status 1 if the own times give a run that is
more than 5 points away.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks._circumstances import circumstances
from benchmarks._injected_runs import SAVE_EVERY, Fault, InjectedRun, injected_runs
from benchmarks._report import table, write_json
from meshwright.api.goodput import TimeCause
from meshwright.simulation.inputs import FaultKind, Inputs, Saves
from meshwright.simulation.run import Failure, TracedFailures, simulate
from meshwright.simulation.setting import Setting

WANTED = 0.05


def predicted(run: InjectedRun, measured: Sequence[InjectedRun]) -> float:
    """The simulated goodput of a run, with the times that were measured in these runs."""
    steps = sum(one.steps for one in measured)
    step = sum(one.step * one.steps for one in measured) / steps
    stalls = sum(one.ledger.get("CheckpointStall", 0.0) for one in measured)
    own = len(measured) == 1
    faults = {
        f"{number}": _kind(fault, [fault] if own else [other for one in measured for other in one.faults])
        for number, fault in enumerate(run.faults)
    }
    setting = Setting(
        mtbf=1.0,
        interval=SAVE_EVERY * step,
        step=step,
        horizon=run.seconds,
        inputs=Inputs(
            faults=faults,
            saves=Saves(stall=stalls * SAVE_EVERY / steps, durable=0.0),
            start=statistics.fmean(one.start for one in measured),
        ),
    )
    failures = [Failure(fault.at, f"{number}") for number, fault in enumerate(run.faults)]
    found = simulate(setting, 0, TracedFailures(failures))
    return found.seconds[TimeCause.TRAINING] / found.elapsed


def _kind(fault: Fault, like: Sequence[Fault]) -> FaultKind:
    """The fault with the mean times of faults of its kind, or of all faults if there is no other one."""
    same = [other for other in like if other.kind == fault.kind] or like
    detection = statistics.fmean(other.detection for other in same)
    restart = statistics.fmean(other.restart for other in same)
    return FaultKind(share=1.0, cause="PodLost", detection=detection, restart=restart)


def rows(runs: Sequence[InjectedRun]) -> list[tuple[object, ...]]:
    """(seed, faults, seconds, ledger, measured, own, points away, others, points away)."""
    found: list[tuple[object, ...]] = []
    for run in runs:
        others = [one for one in runs if one is not run]
        values = [predicted(run, [run]), *([predicted(run, others)] if others else [])]
        cells = [cell for value in values for cell in (f"{value:.3f}", f"{100 * (value - run.goodput):+.1f}")]
        kinds = ", ".join(fault.kind for fault in run.faults)
        found.append((run.seed, kinds, f"{run.seconds:.0f}", f"{run.booked:.3f}", f"{run.goodput:.3f}", *cells))
    return found


def read_runs(file: Path | None) -> list[InjectedRun]:
    """The runs that a file has."""
    written = json.loads(file.read_text())["runs"] if file is not None and file.exists() else []
    return [InjectedRun(**{**run, "faults": [Fault(**fault) for fault in run["faults"]]}) for run in written]


def main() -> None:
    """Measure the runs that are missing, and print a table."""
    parser = argparse.ArgumentParser(description="Compare simulated goodput with that of runs with injected faults.")
    parser.add_argument("--runs", type=int, default=10, help="Number of runs (default: 10).")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the first run (default: 1).")
    parser.add_argument("--mean-seconds", type=float, default=15.0, help="Mean training time before a fault.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="File to write the numbers to.")
    options = parser.parse_args()
    runs = read_runs(options.json)
    present = {run.seed for run in runs}
    seeds = [seed for seed in range(options.seed, options.seed + options.runs) if seed not in present]

    def done(run: InjectedRun) -> None:
        runs.append(run)
        where = circumstances("cpu")
        write_json(options.json, {"circumstances": where, "runs": [asdict(one) for one in runs]})

    if seeds:
        asyncio.run(injected_runs(seeds, options.mean_seconds, done))
    columns = ("seed", "faults", "seconds", "ledger", "measured", "own times", "points", "others' times", "points")
    table(f"Goodput of {len(runs)} runs", columns, rows(runs))
    worst = max(abs(predicted(run, [run]) - run.goodput) for run in runs)
    print(f"largest difference with own times: {100 * worst:.1f} points")
    if worst > WANTED:
        sys.exit(1)


if __name__ == "__main__":
    main()
