"""How long a small job does not train after a fault or a resize, by phase, beside the same job under another commit.

One embedded cluster, one operator, one job of replicas of two ranks each, one on each node, and two more nodes. Each
fault strikes while the job trains; the time ends when every rank of a newer mesh generation trains. "without steps" is
the longest time in which rank 0 was observed at the same step: a job that grows trains on while the new pods start.
With `--on-loss Shrink` the replica that is left trains on at once, and "without steps" includes the pause of the growth
back to the full size. With `--baseline DIR`, a checkout with its own `.venv`, both commits take turns on this machine.
A baseline without `spec.elastic` restarts the gang to resize, as its user had to: its restart of `resize down` is the
time that "restart / this" divides by that of each recovery. For a hang both wait for the limit of the job, which the
ratios leave out.

A second table has the time from the fault to the first new step, of every repetition. It compares faults in memory
with the restart of the baseline after the same fault, and says how long survivors took to leave their collectives.

A third table has the time from when an agent noticed that the process of its rank had exited. "reaped" is the moment
at which it had collected the exit status: the process has left /proc. "logged" is that of its line in the pod's log,
which follows when the agent has read what the rank wrote last.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from _circumstances import circumstances
from _recovery_job import FAULTS, HANG_LIMIT, RESTARTED, measure
from _report import table, write_json

QUICK = ("process", "resize down", "resize up")
RESTART = "resize down"
"""The fault for which a baseline without `spec.elastic` restarts its gang."""
MOMENTS = ("reaped", "logged")
"""When an agent noticed that a process exited."""


def measure_with(python: Path, faults: list[str], job: list[str]) -> dict[str, dict[str, Any]]:
    """Measure with the packages of a checkout, by its interpreter.

    Raises:
        click.ClickException: The run failed. The message has its last lines.
    """
    options = ["--print", *job, *(f"--fault={fault}" for fault in faults)]
    command = [str(python), str(Path(__file__).resolve()), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=python.parents[2])
    if done.returncode:
        raise click.ClickException(f"{python}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def shortest(runs: list[dict[str, dict[str, Any]]], faults: list[str]) -> dict[str, dict[str, Any]]:
    """The run of each fault with the least time without steps."""
    best = {}
    for fault in faults:
        finished = [run[fault] for run in runs if "withoutSteps" in run.get(fault, {})]
        if finished:
            best[fault] = min(finished, key=lambda one: one["withoutSteps"])
    return best


def to_first_step(runs: list[dict[str, dict[str, Any]]], fault: str) -> list[float]:
    """Seconds from the fault to the first new step, of every repetition in all runs."""
    return sorted(seconds for run in runs for seconds in run.get(fault, {}).get("stepAfter", []))


def from_noticing(runs: list[dict[str, dict[str, Any]]], fault: str, moment: str) -> list[float]:
    """Seconds from when the agent noticed the exit to the first new step, of every repetition in all runs."""
    found = []
    for run in runs:
        one = run.get(fault, {})
        pairs = zip(one.get(moment, []), one.get("stepAfter", []), strict=True)
        found += [step - noticed for noticed, step in pairs if noticed is not None]
    return sorted(found)


def noticed_after(runs: list[dict[str, dict[str, Any]]], fault: str, moment: str) -> list[float]:
    """Seconds from the kill until the agent noticed the exit, of every repetition in all runs."""
    found = (seconds for run in runs for seconds in run.get(fault, {}).get(moment, []))
    return sorted(seconds for seconds in found if seconds is not None)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values do not exceed."""
    return values[min(len(values) - 1, int(share * len(values)))]


def repetition_row(fault: str, runs: dict[str, list[dict[str, dict[str, Any]]]]) -> list[object]:
    """A row of the second table."""
    this = to_first_step(runs["this"], fault)
    baseline = to_first_step(runs.get("baseline", []), RESTARTED.get(fault, fault))
    cells: list[object] = [fault]
    for values in (baseline, this):
        cells += [len(values), statistics.median(values), percentile(values, 0.95)] if values else [0, "-", "-"]
    ratio = statistics.median(baseline) / statistics.median(this) if baseline and this else None
    return [*cells, round(ratio, 1) if ratio is not None else "-"]


def noticing(runs: dict[str, list[dict[str, dict[str, Any]]]], faults: list[str]) -> dict[str, dict[str, Any]]:
    """The third table: fault -> moment -> medians of each commit, and their ratio. Only faults that kill a process."""
    rows: dict[str, dict[str, Any]] = {}
    for fault in faults:
        for moment in MOMENTS:
            one: dict[str, Any] = {}
            for name, found in runs.items():
                struck = RESTARTED.get(fault, fault) if name == "baseline" else fault
                noticed, rest = noticed_after(found, struck, moment), from_noticing(found, struck, moment)
                if rest:
                    one[name] = {
                        "repetitions": len(rest),
                        "noticed": round(statistics.median(noticed), 3),
                        "median": round(statistics.median(rest), 3),
                        "p95": round(percentile(rest, 0.95), 3),
                    }
            if "this" in one:
                both = "baseline" in one
                one["ratio"] = round(one["baseline"]["median"] / one["this"]["median"], 1) if both else None
                rows.setdefault(fault, {})[moment] = one
    return rows


def noticing_rows(found: dict[str, dict[str, Any]]) -> list[list[object]]:
    """Rows of the third table."""
    rows = []
    for fault, moments in found.items():
        for moment, one in moments.items():
            cells: list[object] = [f"{fault}, {moment}"]
            for name in ("baseline", "this"):
                cells += list(one[name].values()) if name in one else [0, "-", "-", "-"]
            rows.append([*cells, one["ratio"] if one["ratio"] is not None else "-"])
    return rows


def leaving(runs: list[dict[str, dict[str, Any]]]) -> dict[str, float] | None:
    """How long survivors took to leave their collectives; None if no rank held its state."""
    values = sorted(seconds for run in runs for seconds in run.get("left", {}).get("seconds", []))
    if not values:
        return None
    milliseconds = [round(1000 * value, 1) for value in (statistics.median(values), percentile(values, 0.95))]
    return {"ranks": len(values), "medianMilliseconds": milliseconds[0], "p95Milliseconds": milliseconds[1]}


def row(fault: str, best: dict[str, dict[str, dict[str, Any]]]) -> list[object]:
    """A row of the table."""
    this, baseline = best["this"].get(fault), best.get("baseline", {}).get(fault)
    restart = best.get("baseline", {}).get(RESTART)
    cells: list[object] = [fault]
    for one in (baseline, this):
        cells += [one["seconds"], one["withoutSteps"]] if one else ["-", "-"]
    waits = HANG_LIMIT if fault == "hang" else 0
    for other, wait in ((baseline, waits), (restart, 0)):
        both = other is not None and this is not None
        ratio = (other["withoutSteps"] - wait) / (this["withoutSteps"] - waits) if both else None
        cells.append(round(ratio, 1) if ratio is not None else "-")
    for one in (baseline, this):
        if one is None:
            cells.append("-")
            continue
        phases = ", ".join(f"{name} {value}" for name, value in one["phases"].items() if value >= 0.1)
        restored = f", growth back {one['restored']}" if one.get("restored") else ""
        moments = f"detected {one['detected']}, ranks started {one['started']}, trains {one['seconds']}{restored}"
        cells.append(f"{moments}: {phases} (load {one['load']})")
    return cells


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A few faults: tests that it runs.")
@click.option("--fault", "faults", multiple=True, type=click.Choice(list(FAULTS)), help="Only these.")
@click.option("--runs", default=1, show_default=True, help="Runs of each commit; the shortest time counts.")
@click.option("--on-loss", type=click.Choice(["Replace", "Shrink"]), default="Shrink", show_default=True)
@click.option("--ranks", default=4, show_default=True, type=click.Choice([4, 8]), help="Ranks, two for each worker.")
@click.option("--repeats", default=1, show_default=True, help="How often some faults strike in a run.")
@click.option("--baseline", type=click.Path(path_type=Path, exists=True), help="A checkout with its own `.venv`.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the numbers there.")
@click.option("--print", "printed", is_flag=True, hidden=True)
def main(
    quick: bool,
    faults: tuple[str, ...],
    runs: int,
    on_loss: str,
    ranks: int,
    repeats: int,
    baseline: Path | None,
    file: Path | None,
    printed: bool,
) -> None:
    """Measure, and print a table."""
    chosen = [fault for fault in FAULTS if fault in (faults or (QUICK if quick else FAULTS))]
    if printed:
        print(json.dumps(asyncio.run(measure(chosen, on_loss, ranks, repeats))))
        return
    pythons = {"this": Path(sys.executable)}
    if baseline is not None:
        pythons["baseline"] = baseline.resolve() / ".venv" / "bin" / "python"
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    job = [f"--on-loss={on_loss}", f"--ranks={ranks}", f"--repeats={repeats}"]
    for _ in range(runs):
        for name, python in pythons.items():
            results[name].append(measure_with(python, chosen, job))
    best = {name: shortest(found, chosen) for name, found in results.items()}
    columns = ["", "baseline", "without steps", "this", "without steps", "baseline / this", "restart / this"]
    table("Seconds", [*columns, "phases of the baseline", "phases"], [row(fault, best) for fault in chosen])
    columns = ["", "baseline", "median", "p95", "this", "median", "p95", "baseline / this"]
    table("Seconds from the fault to the first new step", columns, [repetition_row(fault, results) for fault in chosen])
    noticed = noticing(results, chosen)
    columns = ["", "baseline", "noticed", "median", "p95", "this", "noticed", "median", "p95", "baseline / this"]
    table("Seconds from noticing to the first new step", columns, noticing_rows(noticed))
    left = leaving(results["this"])
    if left is not None:
        print(
            f"{left['ranks']} times a survivor left its collectives: {left['medianMilliseconds']} ms median,", end=" "
        )
        print(f"{left['p95Milliseconds']} ms p95")
    facts = {"circumstances": circumstances("cpu"), "onLoss": on_loss, "ranks": ranks, "left": left, "noticed": noticed}
    write_json(file, {**facts, "best": best, "runs": results})


if __name__ == "__main__":
    main()
