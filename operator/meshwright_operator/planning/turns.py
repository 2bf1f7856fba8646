"""Whose plan is made next: those of running jobs first, then the namespace that used the least CPU time recently."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from meshwright_operator.kube.cache import JobKey
from meshwright_operator.planning.request import PlanRequest

HALF_LIFE_SECONDS = 60.0
"""Time in which used CPU time counts half."""


class Turns:
    """Jobs that wait for a plan, each with its latest request."""

    def __init__(self) -> None:
        self._running: OrderedDict[JobKey, PlanRequest] = OrderedDict()
        self._by_namespace: dict[str, OrderedDict[JobKey, PlanRequest]] = {}
        self._used: dict[str, tuple[float, float]] = {}
        """Namespace -> CPU seconds, and the time at which they were counted."""
        self._waiting = asyncio.Event()

    def add(self, key: JobKey, request: PlanRequest) -> None:
        """Let a job wait. Its earlier request, if any, is replaced."""
        if key in self._running or key in self._by_namespace.get(key.namespace, ()):
            self._put(key, request)
            return
        self._put(key, request)
        self._waiting.set()

    def discard(self, key: JobKey) -> None:
        """Forget a job."""
        self._running.pop(key, None)
        if (jobs := self._by_namespace.get(key.namespace)) is not None:
            jobs.pop(key, None)
            if not jobs:
                del self._by_namespace[key.namespace]

    async def next(self, now: float) -> tuple[JobKey, PlanRequest]:
        """Take the job whose turn it is, waiting for one if necessary."""
        while not self._running and not self._by_namespace:
            self._waiting.clear()
            await self._waiting.wait()
        if self._running:
            return self._running.popitem(last=False)
        namespace = min(self._by_namespace, key=lambda name: self.used(name, now))
        jobs = self._by_namespace[namespace]
        taken = jobs.popitem(last=False)
        if not jobs:
            del self._by_namespace[namespace]
        return taken

    def count(self, namespace: str, cpu_seconds: float, now: float) -> None:
        """Count CPU time that a namespace's plan took."""
        self._used[namespace] = self.used(namespace, now) + cpu_seconds, now
        if len(self._used) > 4096:
            self._used = {name: used for name, used in self._used.items() if self.used(name, now) > 0.01}

    def _put(self, key: JobKey, request: PlanRequest) -> None:
        if request.keep_json:
            self._running[key] = request
        else:
            self._by_namespace.setdefault(key.namespace, OrderedDict())[key] = request

    def used(self, namespace: str, now: float) -> float:
        """CPU seconds that a namespace used recently."""
        seconds, at = self._used.get(namespace, (0.0, now))
        return float(seconds * 0.5 ** ((now - at) / HALF_LIFE_SECONDS))
