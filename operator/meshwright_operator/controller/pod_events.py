"""Reads the events of pods that wait without a reason: only there the kubelet reports a volume that it cannot mount.

No reconcile waits long for them: what arrives later reconciles the job again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from meshwright_operator.decide.observed import Observed, PodState, Worker
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import core_path
from meshwright_operator.kube.pod_info import PROBLEM_LIMIT, REASON_LIMIT, Pod
from meshwright_operator.text import shortened

SILENT_SECONDS = 8.0
"""Age of a pod that reports nothing at which its events are read, and the shortest time until they are read again."""
LONGEST_SECONDS = 60.0
"""The longest time. Large images pull for minutes without an event."""
PATIENCE_SECONDS = 0.1
"""How long a reconcile waits for the events of a pod."""
log = logging.getLogger(__name__)

_REASONS = frozenset({"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"})
MAX_PODS = 4096


class PodEvents:
    """The last warning of pods that do not start. Asks for one pod of a job at a time: the others wait for the same."""

    def __init__(self, client: KubeClient, reconcile: Callable[[JobKey], None]) -> None:
        """`reconcile` is called with a job whose reconcile did not wait until the events of its pod had arrived."""
        self._client = client
        self._reconcile = reconcile
        self._read: dict[str, tuple[datetime, str]] = {}
        """uid of a pod -> when its events were read, and the problem in them."""
        self._reading: dict[str, asyncio.Task[None]] = {}
        """uid of a pod -> the reading of its events."""
        self._forbidden: set[str] = set()
        """Namespaces whose events the operator may not read."""

    async def explain(self, key: JobKey, observed: Observed) -> tuple[Observed, float | None]:
        """The job with the problem of a pod that waits, and seconds until it should be observed again."""
        waiting = [w for w in observed.workers if w.pod is not None and _is_silent(w, w.pod)]
        if not waiting or key.namespace in self._forbidden:
            return observed, None
        worker = min(waiting, key=lambda w: w.index)
        assert worker.pod is not None
        age = observed.age(worker.pod, SILENT_SECONDS)
        if age < SILENT_SECONDS:
            return observed, SILENT_SECONDS - age
        interval = min(max(SILENT_SECONDS, age / 2), LONGEST_SECONDS)
        problem = await self._problem(key, worker.pod, observed.now, interval)
        if not problem:
            return observed, interval
        pod = replace(worker.pod, problem=problem)
        workers = [replace(w, pod=pod) if w is worker else w for w in observed.workers]
        return replace(observed, workers=workers), interval

    async def _problem(self, key: JobKey, pod: Pod, now: datetime, interval: float) -> str:
        """The problem in the events of a pod, as far as they have arrived."""
        known = self._read.get(pod.uid)
        if known is not None and 0 <= (now - known[0]).total_seconds() < interval:
            return known[1]
        if (reading := self._reading.get(pod.uid)) is None:
            name = f"events of {pod.name}"
            reading = self._reading[pod.uid] = asyncio.create_task(
                self._read_events(key.namespace, pod, now), name=name
            )
            await asyncio.wait([reading], timeout=PATIENCE_SECONDS)
            if reading.done():
                reading.result()
            else:
                reading.add_done_callback(lambda _: self._reconcile(key))
        known = self._read.get(pod.uid)
        return known[1] if known is not None else ""

    async def _read_events(self, namespace: str, pod: Pod, now: datetime) -> None:
        known = self._read.get(pod.uid)
        problem = known[1] if known is not None else ""
        try:
            last = max(await self._warnings(namespace, pod), key=_time, default=None)
            problem = "" if last is None else _text(last)
        except ApiError as error:
            # Clusters often store events elsewhere. A job must start although nobody can read them.
            log.info("events of a pod cannot be read", extra={"pod": pod.name, "error": str(error)})
            if error.code == 403:  # noqa: PLR2004 - the role of an earlier version
                self._forbidden.add(namespace)
        finally:
            self._reading.pop(pod.uid, None)
        if len(self._read) >= MAX_PODS:
            self._read.clear()
        self._read[pod.uid] = (now, problem)

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
