"""How long honest jobs wait for their plans while another namespace's specs take all the planning time they can.

    .venv/bin/python benchmarks/planning_fairness.py [--quick] [--json FILE]

The baseline of the same run is the same specs without the hostile ones. Rounds with and without alternate. Each begins
with a planner that knows nothing of the hostile namespace, so that its first plans are measured too. Also measured is
the longest time for which the event loop did not run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from itertools import count
from pathlib import Path
from typing import Any

from _report import table, write_json

from meshwright.api.parsing import parse_spec
from meshwright.planner.cost_model import Calibration
from meshwright.planner.errors import PlanError
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.planning.planner import PlanPendingError
from meshwright_operator.planning.planning_service import PlanningService
from meshwright_operator.scheduling.inventories import Inventories

HOSTILE_JOBS = 8
NODES = 64


def node(number: int) -> dict[str, Any]:
    """A node with eight GPUs."""
    return {
        "metadata": {"name": f"n{number}", "labels": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}},
        "status": {
            "allocatable": {"nvidia.com/gpu": "8", "cpu": "64", "memory": "256Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def spec_of(layers: int, batch: int, length: int, steps: int = 50) -> Any:
    """A job whose degrees are left out. With another number of `steps`, the same search is done again."""
    model = {"layers": layers, "hiddenSize": 4096, "intermediateSize": 14336, "heads": 32, "kvHeads": 8}
    spec = {
        "replicas": 2,
        "model": {**model, "vocabSize": 128256},
        "data": {"source": "PythonStdlib"},
        "training": {"steps": steps, "globalBatchSize": batch, "sequenceLength": length},
        "workers": {"image": "worker", "gpusPerWorker": 8},
    }
    return parse_spec({"spec": spec})


class Bench:
    """A planning service, and what waits for it."""

    def __init__(self) -> None:
        cache = Cache()
        for number in range(NODES):
            cache.put_node(node(number))
        self.woken: dict[JobKey, asyncio.Event] = {}
        self.service = PlanningService(Inventories(cache), Calibration, OperatorMetrics(), self.wake)
        self.numbers = count()
        self.stall = 0.0

    def wake(self, key: JobKey) -> None:
        """Reconcile a job."""
        self.woken[key].set()

    async def plan(self, key: JobKey, spec: Any) -> float:
        """Seconds until a job has its plan, or its rejection."""
        started = time.perf_counter()
        event = self.woken.setdefault(key, asyncio.Event())
        while True:
            event.clear()
            try:
                self.service.plans(key, spec)
            except PlanPendingError:
                await event.wait()
                continue
            except PlanError:
                pass
            return time.perf_counter() - started

    async def be_hostile(self, number: int) -> None:
        """Submit one expensive spec after another."""
        while True:
            key = JobKey("hostile", f"job-{next(self.numbers)}")
            await self.plan(key, spec_of(720, 14414400 - 5040 * number, 16777216 - 4096 * next(self.numbers)))

    async def watch(self) -> None:
        """Note how late a timer is."""
        while True:
            due = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            self.stall = max(self.stall, time.perf_counter() - due)

    async def round(self, jobs: int) -> list[float]:
        """Seconds of each of several honest jobs, one after another. Every round searches the same degrees."""
        seconds = []
        for number in range(jobs):
            steps = 50 + next(self.numbers)
            spec = spec_of(32, 1024 + 8 * number, 4096, steps)
            seconds.append(await self.plan(JobKey("honest", f"job-{steps}"), spec))
        return seconds


async def round_of(jobs: int, hostile: int) -> tuple[list[float], float]:
    """Seconds of each of several honest jobs beside this many hostile ones, and the event loop's longest stall."""
    bench = Bench()
    serving = asyncio.create_task(bench.service.run())
    await bench.round(1)  # Starts the process.
    others = [asyncio.create_task(bench.watch()), *(asyncio.create_task(bench.be_hostile(n)) for n in range(hostile))]
    await asyncio.sleep(0)
    seconds = await bench.round(jobs)
    for task in (*others, serving):
        task.cancel()
    await asyncio.gather(*others, serving, return_exceptions=True)
    return seconds, bench.stall


async def measure(rounds: int, jobs: int) -> dict[str, float]:
    """Alternate rounds without and with hostile jobs."""
    alone: list[float] = []
    first: list[float] = []
    beside: list[float] = []
    stall = 0.0
    for _ in range(rounds):
        alone += (await round_of(jobs, 0))[0]
        seconds, stalled = await round_of(jobs, HOSTILE_JOBS)
        first.append(seconds[0])
        beside += seconds
        stall = max(stall, stalled)
    return {
        "alone_s": statistics.median(alone),
        "beside_s": statistics.median(beside),
        "ratio": statistics.median(beside) / statistics.median(alone),
        "alone_mean_s": statistics.fmean(alone),
        "beside_mean_s": statistics.fmean(beside),
        "ratio_of_means": statistics.fmean(beside) / statistics.fmean(alone),
        "longest_alone_s": max(alone),
        "longest_beside_s": max(beside),
        "first_beside_s": statistics.median(first),
        "longest_stall_s": stall,
    }


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the same numbers")
    parser.add_argument("--quick", action="store_true", help="one round of few jobs")
    args = parser.parse_args()
    numbers = asyncio.run(measure(1, 20) if args.quick else measure(5, 60))
    rows = [[name, f"{value:.3f}"] for name, value in numbers.items()]
    table("Plans of honest jobs, without and beside hostile ones (ratio at most 1.2)", ["number", "value"], rows)
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
