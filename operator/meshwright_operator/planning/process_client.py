"""The operator's side of one planning process: starts it when it is needed, preempts its plan, and kills it if it does
not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from meshwright.planner.deadline import DEADLINE_EXCEEDED
from meshwright_operator.planning.planning_process import LENGTH_BYTES, PREEMPT, READY
from meshwright_operator.planning.request import Answer, PlanFailure, PlanRequest

ANSWER_SECONDS = 120.0
"""Elapsed time after which a process is killed. The kernel kills it much earlier, unless the machine is overloaded."""


class PlanningStoppedError(Exception):
    """The process ended before it answered: a plan exceeded its CPU time or memory."""


class PlanPreemptedError(Exception):
    """The plan was preempted. `cpu_seconds` is the CPU time that it had used."""

    def __init__(self, cpu_seconds: float) -> None:
        super().__init__("The plan was preempted")
        self.cpu_seconds = cpu_seconds


async def start_process() -> Process:
    """Start a planning process, which then imports the planner."""
    module = "meshwright_operator.planning.planning_process"
    return await asyncio.create_subprocess_exec(sys.executable, "-m", module, stdin=PIPE, stdout=PIPE)


class ProcessClient:
    """One planning process, or none while there is nothing to plan."""

    def __init__(self, nice: int) -> None:
        """`nice` lowers the process's priority."""
        self._nice = nice
        self._process: Process | None = None
        self._killed: list[Process] = []
        """Processes whose end nobody has waited for yet."""
        self._starting: asyncio.Future[Process] | None = None
        self._ending: asyncio.Task[None] | None = None
        """Waits for their end."""
        self._began: float | None = None
        """CPU time of the process when the plan began that it is making."""
        self._preempted = False

    async def solve(self, request: PlanRequest, cpu_seconds: float) -> tuple[Answer, float]:
        """The answer, and the CPU time that it took.

        Raises:
            PlanPreemptedError: `preempt` was called before the plan was complete.
            PlanningStoppedError: The process ended before it answered. The next request starts another one.
            OSError: No process can be started.
        """
        body = pickle.dumps((request, cpu_seconds))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await self._exchange(body)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            await self.close()
            raise PlanningStoppedError from error
        except asyncio.CancelledError:
            self._kill()
            raise
        finally:
            preempted, self._preempted, self._began = self._preempted, False, None
        if preempted and isinstance(found[0], PlanFailure) and found[0].reason == DEADLINE_EXCEEDED:
            raise PlanPreemptedError(found[1])
        return found

    def used(self) -> float:
        """CPU seconds that the plan has used which is being made; 0 if none is."""
        if self._process is None or self._began is None:
            return 0.0
        return _cpu_seconds(self._process.pid) - self._began

    def preempt(self) -> None:
        """End the plan that is being made, if one is: `solve` raises, unless the plan is complete already."""
        if self._process is not None and self._began is not None:
            self._preempted = True
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(PREEMPT)

    async def _exchange(self, body: bytes) -> tuple[Answer, float]:
        """Send a request and receive its answer."""
        process = await self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        self._began = _cpu_seconds(process.pid)
        process.stdin.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)
        await process.stdin.drain()
        length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
        found: tuple[Answer, float] = pickle.loads(await process.stdout.readexactly(length))  # noqa: S301 - our own
        return found

    async def start(self) -> None:
        """Start the process, if there is none, and wait until it is ready.

        Raises:
            PlanningStoppedError: The process ended before it was ready.
            OSError: No process can be started.
        """
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._started()
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            await self.close()
            raise PlanningStoppedError from error

    async def close(self) -> None:
        """Kill the process, if there is one, and wait for its end.

        Callers may be cancelled while the process ends, even repeatedly: a later call waits for what is left.
        """
        self._kill()
        while self._killed or self._starting is not None:
            if self._ending is None or self._ending.done():
                self._ending = asyncio.create_task(self._wait_for_killed(), name="end of a planning process")
            await asyncio.wait([self._ending])
            if not self._ending.cancelled():  # the library that watches jobs cancels all tasks when it stops
                self._ending.result()

    async def _wait_for_killed(self) -> None:
        if (starting := self._starting) is not None:
            await asyncio.wait([starting])
            self._starting = None
            if not starting.cancelled() and starting.exception() is None:
                self._process = starting.result()
                self._kill()
        while self._killed:
            process = self._killed[0]
            # Also for the end of its output: pipes that are open when the event loop ends raise later, somewhere else.
            await process.communicate()
            self._killed.remove(process)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._killed.append(self._process)
            self._process = None

    async def _started(self) -> Process:
        """The process, which is ready: before that, a signal would end it."""
        if self._process is None or self._process.returncode is not None:
            # If this is cancelled, `close` waits for the start: a process that nobody knows would remain.
            self._starting = asyncio.ensure_future(start_process())
            self._process = await asyncio.shield(self._starting)
            self._starting = None
            # At once: its imports take as long as several plans.
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + self._nice)
            assert self._process.stdout is not None
            await self._process.stdout.readexactly(len(READY))
        return self._process


def _cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, to 10 ms. 0 if it has ended, and where there is no `/proc`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
