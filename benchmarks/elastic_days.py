"""Days of jobs on 64 nodes in virtual time: GPU occupancy, resizes and waits with elastic jobs, against rigid ones.

    .venv/bin/python -m benchmarks.elastic_days [--days 200] [--seed 1] [--processes 2] [--quick] [--json FILE]
    .venv/bin/python -m benchmarks.elastic_days --combine PART.json PART.json [--json FILE]

Each day is printed and written to FILE when it has ended. Days that FILE has already, of the same jobs and load, are
not run again: the same command continues a run that was cut, and `--days 50 --seed 101` adds days to it.

The operator's own reconciler, job queue, placer and preemption run each seeded day twice: once without `elastic`, where
a job always has the replicas that it asks for, and once with. Jobs of several sizes, priorities and lengths arrive over
the day; nodes fail and return. A job is a number of replica-seconds of training, and progress is linear in replicas.
Every start, every checkpoint before a resize and every step that a crash repeats costs time, and does not count.

Occupancy is useful GPU time divided by the GPU time of all nodes, those that are down too, until the last job ends.
Exit status 1 if a job does not end, if a resize comes before the pause of the last one has passed, or if elastic jobs
gain fewer than 10 points.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._day_traces import DAY, NODES, PAUSE_SECONDS, trace
from benchmarks._report import table, write_json
from benchmarks._virtual_days import DayJob, DayWorld

JOBS = 60
LOAD = 1.0
WANTED_GAIN = 0.10
QUICK_HOURS = 8.0


@dataclass(frozen=True, slots=True)
class Run:
    """One day, rigid or elastic."""

    seed: int
    elastic: bool
    occupancy: float
    """Until the last job has ended."""
    occupancy_in_day: float
    """Until the end of the day, when the last jobs have arrived."""
    ended_hours: float
    waits: list[float]
    """Seconds from the arrival of each job to its first step."""
    turnarounds: list[float]
    """Seconds from the arrival of each job to its end."""
    repeated: float
    """Training that crashes made vain, as a share of the useful one."""
    resizes: int
    resizes_per_job_hour: float
    most_resizes_per_job_hour: float
    early_resizes: list[str]
    """Resizes that came before the pause of the last one had passed, though nothing but free nodes asked for them."""
    requests: int
    """Requests to the API server."""
    cpu_seconds: float


def run_day(seed: int, jobs: int, load: float, hours: float, *, elastic: bool) -> Run:
    """One day.

    Raises:
        AssertionError: A job does not end, or its reconciles do not.
    """
    began = time.process_time()
    day = trace(seed, jobs, load, hours)
    world = DayWorld(day, elastic=elastic)
    asyncio.run(world.run_day())
    found = list(world.jobs.values())
    end = max(job.ended or 0.0 for job in found)
    rates = [len(job.resizes) / _hours(job) for job in found]
    useful = sum(job.done for job in found)
    return Run(
        seed=seed,
        elastic=elastic,
        occupancy=useful / (NODES * end),
        occupancy_in_day=sum(_useful_until(job, hours * 3600.0) for job in found) / (NODES * hours * 3600.0),
        ended_hours=end / 3600.0,
        waits=[(job.trained_first or 0.0) - job.arrival.arrives for job in found],
        turnarounds=[(job.ended or 0.0) - job.arrival.arrives for job in found],
        repeated=sum(job.repeated for job in found) / useful,
        resizes=sum(len(job.resizes) for job in found),
        resizes_per_job_hour=sum(len(job.resizes) for job in found) / sum(_hours(job) for job in found),
        most_resizes_per_job_hour=max(rates),
        early_resizes=[text for job in found for text in _early(job, world.jobs)],
        requests=len(world.cluster.requests),
        cpu_seconds=time.process_time() - began,
    )


def _hours(job: DayJob) -> float:
    """Hours between the first step and the last, at least one."""
    return max(1.0, ((job.ended or 0.0) - (job.trained_first or 0.0)) / 3600.0)


def _useful_until(job: DayJob, end: float) -> float:
    return sum(rate * max(0.0, min(until, end) - since) for since, until, rate in job.useful)


def _early(job: DayJob, jobs: dict[str, DayJob]) -> Iterator[str]:
    """The resizes that must wait for the pause, and did not.

    A shrink because nodes were lost, or for a job of a higher priority, does not wait. Nor does a job that starts.
    """
    for before, resize in zip(job.resizes, job.resizes[1:], strict=False):
        waiting = jobs.get(resize.for_job.rpartition("/")[2])
        urgent = waiting is not None and waiting.arrival.priority > job.arrival.priority
        lost_nodes = resize.after < resize.before and not resize.for_job
        # Times in status are whole seconds.
        if not urgent and not lost_nodes and not resize.starts and resize.at - before.at < PAUSE_SECONDS - 1.0:
            seconds = resize.at - before.at
            yield f"{job.arrival.name}: {resize.before} to {resize.after} replicas {seconds:.0f} s after a resize"


def days(options: argparse.Namespace) -> tuple[list[Run], list[str]]:
    """All days, in several processes if asked for, and what is wrong with the days that have no result."""
    traces = _traces_of(options)
    jobs, hours = round(traces["jobs"]), traces["hours"]
    count = 3 if options.quick else options.days
    found = _days_before(options.json, traces)
    done, failed = {run.seed for run in found}, []
    seeds = [seed for seed in range(options.seed, options.seed + count) if seed not in done]
    calls = [(seed, jobs, options.load, hours, elastic) for seed in seeds for elastic in (False, True)]
    with ProcessPoolExecutor(options.processes) as pool:
        waiting = [(seed, [pool.submit(_run_day, call) for call in calls if call[0] == seed]) for seed in seeds]
        for seed, pair in waiting:
            errors = [error for future in pair if (error := future.exception()) is not None]
            if errors:
                failed.append(f"seed {seed}: {'; '.join(map(str, errors))}")
                print(failed[-1], file=sys.stderr, flush=True)
                continue
            rigid, elastic = (future.result() for future in pair)
            found += [rigid, elastic]
            print(_progress(found), file=sys.stderr, flush=True)
            # If a later day is interrupted, the file has those before it.
            write_json(options.json, {"traces": traces, "failed": failed, "days": [asdict(run) for run in found]})
    return sorted(found, key=lambda run: (run.seed, run.elastic)), failed


def _traces_of(options: argparse.Namespace) -> dict[str, float]:
    """What the traces are drawn from besides their seed."""
    hours = QUICK_HOURS if options.quick else DAY / 3600.0
    return {"jobs": round(options.jobs * hours / 24.0), "load": options.load, "hours": hours}


def _days_before(file: Path | None, traces: dict[str, float]) -> list[Run]:
    """The days of these traces that a run before has written to the file."""
    written = json.loads(file.read_text()) if file is not None and file.exists() else {}
    if written and written.get("traces") != traces:
        sys.exit(f"{file} has days of {written.get('traces')}, and not of {traces}: name another file with --json")
    return [Run(**run) for run in written.get("days", ())]


def _progress(found: Sequence[Run]) -> str:
    """The last day, and the gain of all days so far."""
    rigid, elastic = found[-2:]
    gains = [100.0 * (two.occupancy - one.occupancy) for one, two in zip(found[::2], found[1::2], strict=True)]
    day = f"seed {rigid.seed}: rigid {rigid.occupancy:.1%}, elastic {elastic.occupancy:.1%}"
    early = sum(len(run.early_resizes) for run in found)
    so_far = f"{len(gains)} days: {statistics.mean(gains):+.1f} points, worst {min(gains):+.1f}, {early} early resizes"
    return f"{day}, {rigid.cpu_seconds + elastic.cpu_seconds:.1f} s of CPU ({so_far})"


def _run_day(call: tuple[int, int, float, float, bool]) -> Run:
    seed, jobs, load, hours, elastic = call
    return run_day(seed, jobs, load, hours, elastic=elastic)


def _combined(files: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The days of parts that ran before, by seed, and those that failed."""
    parts = [json.loads(file.read_text()) for file in files]
    found = [Run(**run) for part in parts for run in part["days"]]
    failed = [text for part in parts for text in part["failed"]]
    return sorted(found, key=lambda run: (run.seed, run.elastic)), failed


def rows(runs: Sequence[Run]) -> list[tuple[str, float, float, float]]:
    """(measure, rigid, elastic, elastic / rigid) over all days."""
    sides = [[run for run in runs if run.elastic is elastic] for elastic in (False, True)]
    measures = {
        "occupancy until the last job has ended, mean": lambda side: statistics.mean(run.occupancy for run in side),
        "occupancy, worst day": lambda side: min(run.occupancy for run in side),
        "occupancy until the last job has arrived, mean": lambda side: statistics.mean(
            run.occupancy_in_day for run in side
        ),
        "last job ended, hours, mean": lambda side: statistics.mean(run.ended_hours for run in side),
        "wait for the first step, minutes, mean": lambda side: statistics.mean(_all(side, "waits")) / 60.0,
        "wait for the first step, minutes, 95%": lambda side: _percentile(_all(side, "waits"), 95) / 60.0,
        "wait for the first step, minutes, longest": lambda side: max(_all(side, "waits")) / 60.0,
        "from arrival to end, hours, mean": lambda side: statistics.mean(_all(side, "turnarounds")) / 3600.0,
        "repeated training, %": lambda side: 100.0 * statistics.mean(run.repeated for run in side),
        "resizes of a job in an hour, mean": lambda side: statistics.mean(run.resizes_per_job_hour for run in side),
        "resizes of a job in an hour, most": lambda side: max(run.most_resizes_per_job_hour for run in side),
        "resizes before the pause had passed": lambda side: float(sum(len(run.early_resizes) for run in side)),
        "requests to the API server of a day": lambda side: statistics.mean(run.requests for run in side),
        "CPU seconds of a day": lambda side: statistics.mean(run.cpu_seconds for run in side),
    }
    found = []
    for name, measure in measures.items():
        rigid, elastic = (measure(side) for side in sides)
        found.append((name, rigid, elastic, elastic / rigid if rigid else float("nan")))
    return found


def _all(side: Sequence[Run], what: str) -> list[float]:
    return [value for run in side for value in getattr(run, what)]


def _percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def main() -> None:
    """Run the days, print a table and write the numbers."""
    parser = argparse.ArgumentParser(description="Measure GPU occupancy with elastic jobs against rigid ones.")
    parser.add_argument("--days", type=int, default=200, help="Number of days, one for each seed (default: 200).")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the first day (default: 1).")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"Jobs of a day (default: {JOBS}).")
    parser.add_argument(
        "--load", type=float, default=LOAD, help=f"Work of a day, as a share of its GPU time (default: {LOAD})."
    )
    parser.add_argument("--processes", type=int, default=1, help="Processes (default: 1).")
    parser.add_argument("--quick", action="store_true", help=f"Run three parts of {QUICK_HOURS:.0f} hours.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="File to write the numbers to.")
    parser.add_argument(
        "--combine", type=Path, nargs="+", metavar="FILE", help="Run nothing, and combine the numbers of these files."
    )
    options = parser.parse_args()
    runs, failed = _combined(options.combine) if options.combine else days(options)
    if not runs:
        sys.exit(1)
    found = rows(runs)
    pairs = [(rigid, elastic) for rigid, elastic in zip(runs[::2], runs[1::2], strict=True)]
    gains = [elastic.occupancy - rigid.occupancy for rigid, elastic in pairs]
    early = [text for run in runs for text in run.early_resizes]
    title = f"{len(gains)} days, {options.load:.0%} load, {NODES} nodes"
    table(title, ("measure", "rigid", "elastic", "elastic / rigid"), found)
    gain = statistics.mean(gains)
    print(f"gain in occupancy: {100 * gain:+.1f} points (worst day {100 * min(gains):+.1f})")
    for text in [*failed, *early[:10]]:
        print(text)
    numbers: dict[str, Any] = {
        "traces": _traces_of(options),
        "load": options.load,
        "gain_points": 100 * gain,
        "gain_points_worst": 100 * min(gains),
        "measures": {name: {"rigid": a, "elastic": b} for name, a, b, _ in found},
        "failed": failed,
        "days": [asdict(run) for run in runs],
    }
    write_json(options.json, numbers)
    if failed or early or (gain < WANTED_GAIN and not options.quick):
        sys.exit(1)


if __name__ == "__main__":
    main()
