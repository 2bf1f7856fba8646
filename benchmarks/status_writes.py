"""How often the operator writes the progress of many running jobs, with the budget that they share and without.

    python -m benchmarks.status_writes [--jobs N ...] [--minutes M] [--json FILE]

Time is virtual: the operator's own `StatusWriter` and budget run with a clock and a work queue that jump to the next
event. Each job makes progress all the time and is reconciled every ten seconds, as the reports of its agents cause it,
with an offset of its own; some jobs also save a checkpoint once a minute. The age of a status is how long before its
next write it was written. The baseline, without a shared budget, is a budget that no job can use up.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._report import table, write_json
from meshwright.api.labels import API_VERSION, KIND
from meshwright.api.objects import KubeObject
from meshwright.api.status import CheckpointStatus, ParallelTrainingJobStatus
from meshwright_operator.controller.status_patch import PROGRESS_SECONDS, StatusWriter
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import KubeClient
from meshwright_operator.kube.progress_budget import PROGRESS_WRITES_PER_SECOND, ProgressBudget
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.timestamps import format_time, utc_now

SAVING = 10
"""One of so many jobs saves a checkpoint every `SAVE_SECONDS`."""
SAVE_SECONDS = 60.0


@dataclass
class Counts:
    """What the API server got."""

    progress: list[float] = field(default_factory=list)
    """When writes came that only have progress."""
    ages: list[tuple[float, float]] = field(default_factory=list)
    """(When a job's status was written, seconds since it was written before)."""
    late_checkpoints: list[float] = field(default_factory=list)
    """Seconds from a checkpoint until it was written."""


class Server(KubeClient):
    """Stores every patch at once."""

    def __init__(self, jobs: dict[str, KubeObject]) -> None:
        self._jobs = jobs

    async def merge_patch(self, path: str, body: KubeObject) -> KubeObject:
        """Store a patch of a status."""
        job = self._jobs[path.removesuffix("/status").rsplit("/", 1)[1]]
        merge(job["status"], body["status"])
        job["metadata"]["resourceVersion"] = str(int(job["metadata"]["resourceVersion"]) + 1)
        return job


def merge(target: KubeObject, patch: KubeObject) -> None:
    """Apply a merge patch (RFC 7386)."""
    for name, value in patch.items():
        if isinstance(value, dict) and isinstance(target.get(name), dict):
            merge(target[name], value)
        elif value is None:
            target.pop(name, None)
        else:
            target[name] = value


class VirtualQueue(WorkQueue[JobKey]):
    """Keys by the time at which they are due; of two times of a key, the earlier counts."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._due: dict[JobKey, float] = {}
        self._heap: list[tuple[float, JobKey]] = []

    def add_after(self, key: JobKey, seconds: float) -> None:
        """Queue the key."""
        when = self.now + seconds
        if when < self._due.get(key, inf):
            self._due[key] = when
            heapq.heappush(self._heap, (when, key))

    def take(self) -> JobKey:
        """The next key, at its time."""
        while True:
            when, key = heapq.heappop(self._heap)
            if self._due.get(key) == when:
                del self._due[key]
                self.now = when
                return key


def running(number: int) -> KubeObject:
    """A job that trains."""
    metadata = {"name": f"job-{number}", "namespace": "default", "uid": f"uid-{number}", "resourceVersion": "1"}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": {}, "status": {"step": 0}}


async def run(number: int, seconds: float, per_second: float) -> Counts:
    """What so many jobs write in this time."""
    queue, counts, draw = VirtualQueue(), Counts(), random.Random(number)
    jobs = {body["metadata"]["name"]: body for body in map(running, range(number))}
    budget = ProgressBudget(per_second, lambda: queue.now)
    writer = StatusWriter(Server(jobs), Cache(), queue, lambda: queue.now, budget)
    written, stamp = dict.fromkeys(jobs, 0.0), format_time(utc_now())
    for name in jobs:
        queue.add_after(JobKey("default", name), draw.uniform(0.0, PROGRESS_SECONDS))
    while queue.now < seconds:
        key = queue.take()
        job, status = jobs[key.name], ParallelTrainingJobStatus(step=round(100 * queue.now))
        before = (job["status"].get("checkpoint") or {}).get("step", 0)
        saved = int(queue.now // SAVE_SECONDS) if int(key.name.rpartition("-")[2]) % SAVING == 0 else 0
        if saved:
            status.checkpoint = CheckpointStatus(step=saved, time=stamp, path="/checkpoints")
        if await writer.write(key, job, status, has_events=False):
            if saved > before:
                counts.late_checkpoints.append(queue.now - saved * SAVE_SECONDS)
            else:
                counts.progress.append(queue.now)
            counts.ages.append((queue.now, queue.now - written[key.name]))
            written[key.name] = queue.now
        queue.add_after(key, PROGRESS_SECONDS)
    queue.close()
    return counts


def summary(counts: Counts, seconds: float) -> dict[str, float]:
    """The numbers of one run. The first half, in which the jobs find their order, is left out."""
    late = [moment for moment in counts.progress if moment > seconds / 2]
    windows = [
        sum(first <= moment < first + 10 for moment in late) / 10
        for first in range(int(seconds / 2), int(seconds) - 10)
    ]
    ages = [age for moment, age in counts.ages if moment > seconds / 2]
    return {
        "writes_per_second": len(late) / (seconds / 2),
        "most_in_ten_seconds": max(windows, default=0.0),
        "age_p50_s": median(ages),
        "age_max_s": max(ages),
        "checkpoint_max_s": max(counts.late_checkpoints, default=0.0),
    }


def main() -> None:
    """Measure, print, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, nargs="+", default=[20, 100, 200, 500, 1000], help="numbers of jobs")
    parser.add_argument("--minutes", type=float, default=5.0, help="virtual time")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    rows: list[list[Any]] = []
    results: dict[str, dict[str, dict[str, float]]] = {}
    for number in args.jobs:
        for name, rate in (("none", 1e9), ("shared", PROGRESS_WRITES_PER_SECOND)):
            found = summary(asyncio.run(run(number, 60 * args.minutes, rate)), 60 * args.minutes)
            results.setdefault(str(number), {})[name] = found
            rows.append([number, name, *found.values()])
    columns = ["jobs", "budget", "progress writes/s", "most in 10 s", "age p50 s", "age max s", "checkpoint max s"]
    table("status writes of running jobs", columns, rows)
    write_json(args.json, results)


if __name__ == "__main__":
    main()
