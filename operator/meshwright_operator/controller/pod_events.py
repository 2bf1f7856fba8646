"""Reads the events of pods that wait without a reason: only there the kubelet reports a volume that it cannot mount."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from meshwright_operator.decide.observed import Observed, PodState, Worker
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import core_path
from meshwright_operator.kube.pod_info import PROBLEM_LIMIT, REASON_LIMIT, Pod
from meshwright_operator.text import shortened

SILENT_SECONDS = 8.0
"""Age of a pod that reports nothing at which its events are read, and the shortest time until they are read again."""
LONGEST_SECONDS = 60.0
"""The longest time. Large images pull for minutes without an event."""
log = logging.getLogger(__name__)

_REASONS = frozenset({"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"})
MAX_PODS = 4096


class PodEvents:
    """The last warning of pods that do not start. Asks for one pod of a job at a time: the others wait for the same."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._read: dict[str, tuple[datetime, str]] = {}
        """uid of a pod -> when its events were read, and the problem in them."""
        self._forbidden: set[str] = set()
        """Namespaces whose events the operator may not read."""

    async def explain(self, namespace: str, observed: Observed) -> tuple[Observed, float | None]:
        """The job with the problem of a pod that waits, and seconds until it should be observed again."""
        waiting = [w for w in observed.workers if w.pod is not None and _is_silent(w, w.pod)]
        if not waiting or namespace in self._forbidden:
            return observed, None
        worker = min(waiting, key=lambda w: w.index)
        assert worker.pod is not None
        age = observed.age(worker.pod, SILENT_SECONDS)
        if age < SILENT_SECONDS:
            return observed, SILENT_SECONDS - age
        interval = min(max(SILENT_SECONDS, age / 2), LONGEST_SECONDS)
        problem = await self._problem(namespace, worker.pod, observed.now, interval)
        if not problem:
            return observed, interval
        pod = replace(worker.pod, problem=problem)
        workers = [replace(w, pod=pod) if w is worker else w for w in observed.workers]
        return replace(observed, workers=workers), interval

    async def _problem(self, namespace: str, pod: Pod, now: datetime, interval: float) -> str:
        known = self._read.get(pod.uid)
        if known is not None and 0 <= (now - known[0]).total_seconds() < interval:
            return known[1]
        problem = known[1] if known is not None else ""
        try:
            last = max(await self._warnings(namespace, pod), key=_time, default=None)
            problem = "" if last is None else _text(last)
        except ApiError as error:
            # Clusters often store events elsewhere. A job must start although nobody can read them.
            log.info("events of a pod cannot be read", extra={"pod": pod.name, "error": str(error)})
            if error.code == 403:  # noqa: PLR2004 - the role of an earlier version
                self._forbidden.add(namespace)
        if len(self._read) >= MAX_PODS:
            self._read.clear()
        self._read[pod.uid] = (now, problem)
        return problem

    async def _warnings(self, namespace: str, pod: Pod) -> list[Mapping[str, Any]]:
        selector = f"involvedObject.uid={pod.uid},type=Warning"
        pages = self._client.pages(core_path(namespace, "events"), fieldSelector=selector)
        return [event async for page in pages for event in page.items if event.get("reason") in _REASONS]


def _is_silent(worker: Worker, pod: Pod) -> bool:
    return worker.state is PodState.PENDING and pod.bound and not pod.gated and not pod.problem


def _time(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _text(event: Mapping[str, Any]) -> str:
    return f"{str(event['reason'])[:REASON_LIMIT]}: {shortened(str(event.get('message') or ''), PROBLEM_LIMIT)}"
