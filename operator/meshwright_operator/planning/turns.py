"""Whose plan is made next: those of running jobs first, then the namespace that used the least CPU time recently."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from meshwright_operator.kube.cache import JobKey
from meshwright_operator.planning.request import PlanRequest

HALF_LIFE_SECONDS = 60.0
"""Time in which used CPU time counts half."""
MAX_NAMESPACES = 4096
"""Number of namespaces from which those that used next to nothing are forgotten."""


class RecentUse:
    """The CPU time that plans of each namespace used recently, in whatever process."""

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}
        """Namespace -> CPU seconds, and the time at which they were counted."""

    def count(self, namespace: str, cpu_seconds: float, now: float) -> None:
        """Count CPU time that a namespace's plan took."""
        self._used[namespace] = self.of(namespace, now) + cpu_seconds, now
        if len(self._used) > MAX_NAMESPACES:
            self._used = {name: used for name, used in self._used.items() if self.of(name, now) > 0.01}

    def of(self, namespace: str, now: float) -> float:
        """CPU seconds that a namespace used recently."""
        seconds, at = self._used.get(namespace, (0.0, now))
        return float(seconds * 0.5 ** ((now - at) / HALF_LIFE_SECONDS))


class Turns:
    """Jobs that wait for a plan, each with its latest request."""

    def __init__(self, use: RecentUse) -> None:
        self._running: OrderedDict[JobKey, PlanRequest] = OrderedDict()
        self._by_namespace: dict[str, OrderedDict[JobKey, PlanRequest]] = {}
        self._use = use
        self._added = asyncio.Event()

    def add(self, key: JobKey, request: PlanRequest) -> None:
        """Let a job wait. Its earlier request, if any, is replaced."""
        if request.keep_json:
            self._running[key] = request
        else:
            self._by_namespace.setdefault(key.namespace, OrderedDict())[key] = request
        self._added.set()

    def discard(self, key: JobKey) -> None:
        """Forget a job."""
        self._running.pop(key, None)
        if (jobs := self._by_namespace.get(key.namespace)) is not None:
            jobs.pop(key, None)
            if not jobs:
                del self._by_namespace[key.namespace]

    def wait_for(self, namespace: str) -> bool:
        """Whether a job of this namespace that has not started waits."""
        return namespace in self._by_namespace

    def take(self, namespace: str) -> list[tuple[JobKey, PlanRequest]]:
        """Take all jobs of a namespace that have not started."""
        return list(self._by_namespace.pop(namespace, {}).items())

    async def next(self, now: float) -> tuple[JobKey, PlanRequest]:
        """Take the job whose turn it is, waiting for one if necessary."""
        while not self._running and not self._by_namespace:
            self._added.clear()
            await self._added.wait()
        if self._running:
            return self._running.popitem(last=False)
        namespace = min(self._by_namespace, key=lambda name: self._use.of(name, now))
        jobs = self._by_namespace[namespace]
        taken = jobs.popitem(last=False)
        if not jobs:
            del self._by_namespace[namespace]
        return taken

    async def rival(self, namespace: str, used: float, now: float) -> None:
        """Wait until a running job waits, or one of another namespace that used less than `used` CPU seconds."""
        while not self._running and not any(
            name != namespace and self._use.of(name, now) < used for name in self._by_namespace
        ):
            self._added.clear()
            await self._added.wait()
