"""The operator's side of one planning process: starts it when it is needed, and kills it if it does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
from asyncio.subprocess import PIPE, Process

from meshwright_operator.planning.planning_process import LENGTH_BYTES
from meshwright_operator.planning.request import Answer, PlanRequest

ANSWER_SECONDS = 120.0
"""Elapsed time after which a process is killed. The kernel kills it much earlier, unless the machine is overloaded."""


class PlanningStoppedError(Exception):
    """The process ended before it answered: a plan exceeded its CPU time or memory."""


class ProcessClient:
    """One planning process, or none while there is nothing to plan."""

    def __init__(self, nice: int) -> None:
        """`nice` lowers the process's priority."""
        self._nice = nice
        self._process: Process | None = None

    async def solve(self, request: PlanRequest, cpu_seconds: float) -> tuple[Answer, float]:
        """The answer, and the CPU time that it took.

        Raises:
            PlanningStoppedError: The process ended before it answered. The next request starts another one.
            OSError: No process can be started.
        """
        process = await self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        body = pickle.dumps((request, cpu_seconds))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                process.stdin.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)
                await process.stdin.drain()
                length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
                answer = await process.stdout.readexactly(length)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            await self.close()
            raise PlanningStoppedError from error
        except asyncio.CancelledError:
            self._kill()
            raise
        found: tuple[Answer, float] = pickle.loads(answer)  # noqa: S301 - of the operator's own process
        return found

    async def close(self) -> None:
        """Kill the process, if there is one."""
        process = self._process
        self._kill()
        if process is not None:
            await process.wait()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process = None

    async def _started(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            module = "meshwright_operator.planning.planning_process"
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, str(self._nice), stdin=PIPE, stdout=PIPE
            )
        return self._process
