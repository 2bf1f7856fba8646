"""The probes of one run of a container: whether it has started, lives, and is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from meshwright.api.objects import KubeObject
from meshwright_local.nodeagent.runtime.handlers import Target
from meshwright_local.nodeagent.runtime.probes import probe_results
from meshwright_local.nodeagent.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class Prober:
    """Probes a container until its run ends."""

    sandbox: Sandbox
    spec: KubeObject
    target: Target
    stopping: Callable[[], bool]
    """Whether the container is to end: then only its readiness still counts."""
    started: Callable[[], None]
    """Called once the startup probe has succeeded."""
    ready: Callable[[bool], None]
    unhealthy: Callable[[str], None]
    """Called with `startup` or `liveness` if the run is to end."""

    async def run(self) -> None:
        """Probe until cancelled. The other probes begin when the startup probe has succeeded."""
        if await self._fails("startup"):
            self.unhealthy("startup")
            return
        if "startupProbe" in self.spec:
            self.started()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._probe_liveness())
            group.create_task(self._probe_readiness())

    async def _probe_liveness(self) -> None:
        if await self._fails("liveness"):
            self.unhealthy("liveness")

    async def _probe_readiness(self) -> None:
        if "readinessProbe" in self.spec:
            async for why in self._results("readiness"):
                self.ready(not why)

    async def _fails(self, kind: str) -> bool:
        """Await the first result of the startup probe that counts, or the failure of the liveness probe."""
        if f"{kind}Probe" in self.spec:
            async for why in self._results(kind):
                if why or kind == "startup":
                    return bool(why)
        return False

    def _results(self, kind: str) -> AsyncIterator[str]:
        def report(text: str) -> None:
            if kind == "readiness" or not self.stopping():
                self.sandbox.event("Warning", "Unhealthy", f"{kind.capitalize()} {text}")

        return probe_results(self.spec[f"{kind}Probe"], self.target, report)
