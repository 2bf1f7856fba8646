"""Observes a job through the API server, and rank 0's metrics for values that are newer than the status."""

from __future__ import annotations

import re
from dataclasses import replace

import aiohttp

from meshwright.api import labels
from meshwright_cli.demo.snapshot import PodView, Sample, Snapshot, snapshot
from meshwright_local.kube.client import ApiClient, ApiError
from meshwright_local.kube.resources import EVENTS, JOBS, PODS

METRICS_TIMEOUT = aiohttp.ClientTimeout(total=2)


class Observer:
    """Takes snapshots of one job."""

    def __init__(self, client: ApiClient, namespace: str, name: str) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name

    async def take_snapshot(self) -> Snapshot:
        """The job now.

        Raises:
            ApiError: the API server refused, such as 404 when the job is gone.
        """
        job = await self._client.get(JOBS, self._name, self._namespace)
        selector = f"{labels.LABEL_JOB}={self._name}"
        pods = await self._client.list(PODS, self._namespace, label_selector=selector)
        about = f"involvedObject.name={self._name},involvedObject.kind={labels.KIND}"
        events = await self._client.list(EVENTS, self._namespace, field_selector=about)
        now = snapshot(job, pods.items, events.items)
        first = next((pod for pod in now.pods if pod.worker == 0 and pod.state == "Running" and pod.address), None)
        return now if first is None else replace(now, sample=await self._sample(first, now.generation))

    async def resumed_after(self, now: Snapshot) -> int | None:
        """The step after which rank 0 started this generation, from its pod's log, or None."""
        for pod in now.pods:
            if pod.worker != 0:
                continue
            path = PODS.path(self._namespace, pod.name, "log")
            try:
                lines = [line.decode(errors="replace") async for line in self._client.lines(path)]
            except ApiError:
                continue
            found = parse_resumed_step("\n".join(lines), now.generation)
            if found is not None:
                return found
        return None

    async def _sample(self, pod: PodView, generation: int) -> Sample | None:
        """The metrics of rank 0's pod. None until it reports this generation."""
        url = f"http://{pod.address}:{labels.METRICS_PORT}/metrics"
        try:
            # A separate session: a pod must not get the API server's credentials.
            async with aiohttp.ClientSession(timeout=METRICS_TIMEOUT) as session, session.get(url) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return None
        if gauge(text, "ptj_mesh_generation") != generation:
            return None
        step, loss = gauge(text, "ptj_step"), gauge(text, "ptj_loss")
        return None if not step or loss is None else Sample(int(step), loss)


def parse_resumed_step(log: str, generation: int) -> int | None:
    """The step after which rank 0 started a generation, from an agent's log."""
    found = re.search(rf"rank trains rank=0 generation={generation} after-step=(\d+)", log)
    return int(found.group(1)) if found else None


def gauge(text: str, name: str) -> float | None:
    """The value of a metric's first series in Prometheus text format, or None."""
    found = re.search(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return float(found.group(1)) if found else None
