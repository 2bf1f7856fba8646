"""How long a waiting queue delays placements: 12,500 nodes, 100,000 pods with one GPU each, and 64 waiting jobs.

    .venv/bin/python benchmarks/placement_queue.py [--quick] [--json FILE]

It measures the operator's scheduler without an API server: a placement that fails alone, the same behind 64 waiting
jobs, the time until all waiting jobs were tried again after a pod ended, and how many attempts begin before a gang that
lost a pod is looked at while all of them are tried again.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _operator_cluster import GPUS, job, node
from _report import table, write_json

from meshwright.api.labels import GPU_RESOURCE
from meshwright.api.parsing import parse_spec
from meshwright.planner.cluster.pod_resources import Resources
from meshwright_operator.decide.placement_outcome import Granted, NotGranted
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import KubeClient, Page
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.kube.pod_requests import request_json_for
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling import waiting_jobs
from meshwright_operator.scheduling.attempt import Attempt, Outcome
from meshwright_operator.scheduling.cluster_view import ClusterView
from meshwright_operator.scheduling.job_queue import PlacementRequest
from meshwright_operator.scheduling.placer import Later
from meshwright_operator.scheduling.scheduler import JobScheduler

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GANG = 64
"""Pods of each running job."""
WAITING = 64
REPEATS = 5


class NoForeignPods(KubeClient):
    """An API server without foreign pods."""

    def __init__(self) -> None:
        """No connection."""

    async def pages(self, path: str, **query: str) -> AsyncIterator[Page]:
        """One empty page."""
        yield Page([], "")


class Cluster:
    """A full cluster: all GPUs but 32 have a pod of a running job."""

    def __init__(self, nodes: int) -> None:
        self.cache = Cache()
        for number in range(nodes):
            self.cache.put_node({**node(number), "metadata": {**node(number)["metadata"], "name": f"n{number:05d}"}})
        self.attempts: list[JobKey] = []
        self.scheduler = JobScheduler(NoForeignPods(), self.cache, OperatorMetrics(), ())
        self._count_attempts()
        self._pod = request_json_for(Resources(gpus=1, cpu_milli=1000, pods=1), GPU_RESOURCE)
        for number in range(nodes * GPUS // GANG):
            self._run(number)

    def request(self, name: str, workers: int, assigned: Mapping[int, str] | None = None) -> PlacementRequest:
        """A request of a job, which exists from then on."""
        key = JobKey("bench", name)
        if key not in self.cache.jobs:
            body: dict[str, Any] = job(name, "bench", workers)
            body["metadata"] |= {"uid": f"uid-{name}", "creationTimestamp": f"2026-01-01T00:00:00Z-{name}"}
            self.cache.put_job(body)
        spec = parse_spec(self.cache.jobs[key])
        return PlacementRequest(
            key=key,
            uid=f"uid-{name}",
            plan=self.scheduler.plans(spec)[0],
            spec=spec,
            created=str(self.cache.jobs[key]["metadata"]["creationTimestamp"]),
            since=NOW,
            requested_at=NOW,
            assigned_nodes=assigned or {},
        )

    async def ask(self, request: PlacementRequest) -> tuple[float, Granted | NotGranted | Later]:
        """Seconds until the answer, and the answer."""
        started = time.perf_counter()
        async with self.scheduler.grant(request) as grant:
            return time.perf_counter() - started, grant

    def lose(self, gang: int, worker: int) -> dict[int, str]:
        """A pod of a running job is gone. The nodes of the others."""
        key = JobKey("bench", f"runs-{gang:05d}")
        pods = self.cache.pods(key, f"uid-{key.name}")
        self.cache.remove_pod(next(pod for pod in pods if pod.worker == worker))
        return {pod.worker: pod.node for pod in pods if pod.worker != worker}

    def _run(self, number: int) -> None:
        name = f"runs-{number:05d}"
        for worker in range(GANG):
            place = (number * GANG + worker) // GPUS
            self.cache.put_pod(
                Pod(
                    name=f"{name}-w{worker}-0",
                    namespace="bench",
                    uid=f"{name}-{worker}",
                    version=1,
                    job=name,
                    owner=f"uid-{name}",
                    worker=worker,
                    incarnation=0,
                    revision="",
                    gates=(),
                    node=f"n{place:05d}",
                    bound=True,
                    phase="Running",
                    address="",
                    created=NOW,
                    deleting=False,
                    disrupted=False,
                    exit_code=None,
                    ended=None,
                    problem="",
                    request_json=self._pod,
                )
            )

    def _count_attempts(self) -> None:
        run = waiting_jobs.run_attempt

        def counted(attempt: Attempt, view: ClusterView) -> Outcome:
            self.attempts.append(attempt.request.key)
            return run(attempt, view)

        waiting_jobs.run_attempt = counted


async def measure(nodes: int, waiting: int) -> dict[str, float]:
    """The numbers of one cluster."""
    cluster = Cluster(nodes)
    await cluster.ask(cluster.request("first", 48))
    cluster.scheduler.withdraw("uid-first")
    alone, behind = [], []
    for number in range(REPEATS):
        seconds, answer = await cluster.ask(cluster.request(f"alone-{number}", 48))
        assert isinstance(answer, NotGranted)
        alone.append(seconds)
        cluster.scheduler.withdraw(f"uid-alone-{number}")
    for number in range(waiting):
        await cluster.ask(cluster.request(f"queue-{number:03d}", 48))
    await cluster.scheduler.idle()
    for number in range(REPEATS):
        seconds, answer = await cluster.ask(cluster.request(f"zz-behind-{number}", 48))
        assert isinstance(answer, NotGranted)
        behind.append(seconds)
    started = time.perf_counter()
    cluster.lose(0, 1)
    await cluster.scheduler.idle()
    swept = time.perf_counter() - started
    gang = cluster.request("runs-00001", GANG)
    cluster.attempts.clear()
    kept = cluster.lose(1, 1)
    await asyncio.sleep(0)
    seconds, answer = await cluster.ask(replace(gang, assigned_nodes=kept))
    assert isinstance(answer, Granted), answer
    before = cluster.attempts.index(gang.key)
    await cluster.scheduler.idle()
    return {
        "nodes": nodes,
        "pods": nodes * GPUS,
        "waiting_jobs": waiting,
        "failing_alone_s": statistics.median(alone),
        "failing_behind_waiting_s": statistics.median(behind),
        "all_waiting_tried_again_s": swept,
        "attempts_before_gang_that_lost_a_pod": before,
        "gang_that_lost_a_pod_s": seconds,
    }


def main() -> None:
    """Measure, print a table and write the numbers."""
    parser = argparse.ArgumentParser(description="Measure how a waiting queue delays placements.")
    parser.add_argument("--quick", action="store_true", help="Measure a cluster of 500 nodes and 8 waiting jobs.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="File to write the numbers to.")
    options = parser.parse_args()
    numbers = asyncio.run(measure(*((500, 8) if options.quick else (12_500, WAITING))))
    table("Placements and the queue", ("measure", "value"), list(numbers.items()))
    write_json(options.json, numbers)


if __name__ == "__main__":
    main()
