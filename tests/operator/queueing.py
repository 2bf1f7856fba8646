"""Jobs that ask the real scheduler for nodes, without reconciles: requests, pods and what the scheduler said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from meshwright.api.objects import pod_name
from meshwright.api.parsing import parse_spec
from meshwright.planner.plan import make_plans
from meshwright_operator.decide.placement_outcome import Granted, NotGranted
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import KubeClient, Page
from meshwright_operator.kube.pod_requests import request_json_for
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling import waiting_jobs
from meshwright_operator.scheduling.attempt import Attempt, Outcome, run_attempt
from meshwright_operator.scheduling.cluster_view import ClusterView
from meshwright_operator.scheduling.job_queue import PlacementRequest
from meshwright_operator.scheduling.placer import Later
from meshwright_operator.scheduling.scheduler import JobScheduler
from tests.operator.builders import NOW, pod
from tests.operator.support import node
from tests.operator.test_gang_races import small

GPU = "nvidia.com/gpu"


class NoForeignPods(KubeClient):
    """An API server without foreign pods."""

    def __init__(self) -> None:
        self.listed = 0

    async def pages(self, path: str, **query: str) -> AsyncIterator[Page]:
        self.listed += 1
        yield Page([], "")


class Tenants:
    """A cluster of nodes with two GPUs, and jobs of several namespaces whose workers need two GPUs each."""

    def __init__(self, nodes: int) -> None:
        self.cache, self.woken, self.server = Cache(), list[JobKey](), NoForeignPods()
        for number in range(nodes):
            self.cache.put_node(node(f"n{number}", "r0"))
        self.scheduler = JobScheduler(self.server, self.cache, OperatorMetrics(), (), self.woken.append)
        self._jobs = 0

    def request(
        self, name: str, size: int, /, *, assigned: Mapping[int, str] | None = None, waited: float = 0.0, **spec: Any
    ) -> PlacementRequest:
        """The request of a job `namespace/name` or `name`, newer than the jobs before it."""
        namespace, _, name = name.rpartition("/")
        key = JobKey(namespace or "default", name)
        uid = f"uid-{key}"
        if key not in self.cache.jobs:
            body = small(name, size)
            body["spec"] |= spec
            self._jobs += 1
            body["metadata"] |= {
                "namespace": key.namespace,
                "uid": uid,
                "creationTimestamp": f"2026-01-01T00:{self._jobs // 60:02}:{self._jobs % 60:02}Z",
            }
            self.cache.put_job(body)
        job = self.cache.jobs[key]
        parsed = parse_spec(job)
        plan, *_ = make_plans(parsed, self.scheduler.inventory(parsed), self.scheduler.calibration)
        return PlacementRequest(
            key=key,
            uid=uid,
            plan=plan,
            spec=parsed,
            created=job["metadata"]["creationTimestamp"],
            since=NOW - timedelta(seconds=waited),
            requested_at=NOW,
            assigned_nodes=assigned or {},
        )

    async def ask(self, request: PlacementRequest, *, runs: bool = True) -> Granted | NotGranted | Later:
        """The scheduler's answer. What it grants runs from then on, unless `runs` is false."""
        async with self.scheduler.grant(request) as grant:
            if isinstance(grant, Granted) and runs:
                self.run(request, grant.placement.nodes)
        return grant

    async def start(self, name: str, size: int, /, **fields: Any) -> None:
        """A job that is placed at once."""
        assert isinstance(await self.ask(self.request(name, size, **fields)), Granted)

    def run(self, request: PlacementRequest, nodes: Mapping[int, str]) -> None:
        """The pods of a job, on these nodes."""
        json = request_json_for(request.plan.worker_request, GPU)
        for worker, name in nodes.items():
            one = pod(worker, node=name, request_json=json, job=request.key.name, owner=request.uid)
            unique = pod_name(request.key.name, worker, 0)
            uid = f"{request.uid}-{worker}"
            self.cache.put_pod(replace(one, name=unique, uid=uid, namespace=request.key.namespace))

    def end(self, name: str, worker: int | None = None) -> None:
        """A job, or one of its pods, is gone."""
        namespace, _, name = name.rpartition("/")
        key = JobKey(namespace or "default", name)
        for one in self.cache.pods(key, f"uid-{key}"):
            if worker in (None, one.worker):
                self.cache.remove_pod(one)
        if worker is None:
            del self.cache.jobs[key]

    async def freed(self) -> list[str]:
        """The jobs that were woken once the scheduler has looked at all of them."""
        await self.scheduler.idle()
        woken, self.woken[:] = [str(key) for key in self.woken], []
        return list(dict.fromkeys(woken))


class Attempts:
    """Notes every attempt to place a job."""

    def __init__(self, monkeypatch: Any) -> None:
        self.jobs: list[str] = []
        self._loop, self._began = asyncio.get_event_loop(), asyncio.Event()
        monkeypatch.setattr(waiting_jobs, "run_attempt", self._run)

    async def next(self) -> None:
        """Waits until an attempt begins."""
        self._began.clear()
        await self._began.wait()

    def _run(self, attempt: Attempt, view: ClusterView) -> Outcome:
        self.jobs.append(str(attempt.request.key))
        self._loop.call_soon_threadsafe(self._began.set)
        return run_attempt(attempt, view)
