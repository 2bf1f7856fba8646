"""Makes plans in two processes, so that no spec blocks the event loop, or keeps the plans of other jobs waiting.

The quick process takes every plan first. There a plan is preempted after a short slice as soon as a job of another
namespace waits, and in any case after `QUICK_SECONDS`. It continues in the slow process, which has a lower priority,
with the full deadline. The other plans of its namespace follow it there, so that a namespace with many expensive specs
costs the others one slice.

A plan is also preempted for a namespace that used less: in the quick process at once, if the plan's namespace used much
CPU time recently; in the slow process after a longer slice. It waits for its next turn in the same process, and is
preempted only so often that each plan ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from math import inf

from meshwright.planner.cost_model import Calibration
from meshwright.planner.deadline import DEADLINE_EXCEEDED
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.planning.planner import DEADLINE_SECONDS, MAX_ANSWERS, Planner, PlanPendingError
from meshwright_operator.planning.process_client import PlanningStoppedError, PlanPreemptedError, ProcessClient
from meshwright_operator.planning.request import Answer, PlanFailure, PlanRequest, message_past_deadline
from meshwright_operator.planning.turns import RecentUse, Turns
from meshwright_operator.scheduling.inventories import Inventories

QUICK_SECONDS = 1.0
"""CPU time of a plan in the quick process, if nobody else waits."""
QUICK_SLICE_SECONDS = 0.25
"""CPU time of a plan in the quick process until it is preempted for another namespace. Most plans take half of it."""
SLOW_SLICE_SECONDS = 0.5
"""CPU time of a plan in the slow process until it is preempted for a namespace that used less."""
MAX_PREEMPTIONS = 2
"""How often a plan is preempted for a namespace that used less. It begins again each time."""
SLOW_NICE = 10
"""The slow process gets a tenth of a core that it shares with the quick one, and so needs 100 s for its deadline."""
MUCH_USE = 3.0
"""CPU seconds that a namespace used recently from which it makes way in the quick process for those that used less."""
AT_ONCE_SECONDS = 0.01
"""CPU time after which a plan has certainly begun."""
RESTART_SECONDS = 1.0
"""Pause after no process could be started."""

log = logging.getLogger(__name__)


class _Lane:
    """One process, and the jobs that wait for it."""

    def __init__(self, use: RecentUse, cpu_seconds: float, slice_seconds: float, nice: int) -> None:
        self.turns = Turns(use)
        self.client = ProcessClient(nice)
        self.cpu_seconds = cpu_seconds
        self.slice_seconds = slice_seconds
        self.namespace: str | None = None
        """The namespace whose plan is being made."""
        self.took_slice = False
        """Whether the plan that was preempted last had taken a whole slice of this lane."""

    def serves(self, namespace: str) -> bool:
        """Whether a plan of a job of this namespace that has not started waits or is being made."""
        return self.namespace == namespace or self.turns.wait_for(namespace)

    async def preempt_for_rival(self, namespace: str, used: float, slice_seconds: float) -> None:
        """Preempt the plan that is being made, when it took its slice and a rival waits that used less than `used`."""
        while (left := slice_seconds - self.client.used()) > 0:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(max(left, 0.01))
        await self.turns.rival(namespace, used, time.monotonic())
        self.took_slice = slice_seconds >= self.slice_seconds
        self.client.preempt()


class PlanningService(Planner):
    """Makes plans in other processes while `run` runs, and reconciles a job when its plan is there."""

    def __init__(
        self,
        inventories: Inventories,
        calibration: Callable[[], Calibration],
        metrics: OperatorMetrics,
        reconcile: Callable[[JobKey], None],
    ) -> None:
        super().__init__(inventories, calibration)
        self._metrics = metrics
        self._reconcile = reconcile
        self._prestarting: asyncio.Task[None] | None = None
        self._use = RecentUse()
        self._quick = _Lane(self._use, QUICK_SECONDS, QUICK_SLICE_SECONDS, 0)
        self._slow = _Lane(self._use, DEADLINE_SECONDS, SLOW_SLICE_SECONDS, SLOW_NICE)
        self._slow_specs: OrderedDict[bytes, None] = OrderedDict()
        self._preemptions: OrderedDict[bytes, int] = OrderedDict()
        """Digest of a request -> how often it was preempted for a namespace that used less."""

    def prestart(self) -> asyncio.Task[None]:
        """Start the quick process, so that the first job does not wait for its imports."""
        if self._prestarting is None:
            self._prestarting = asyncio.create_task(self._start_quick(), name="planning process")
        return self._prestarting

    async def _start_quick(self) -> None:
        with contextlib.suppress(PlanningStoppedError, OSError):  # the first request starts it again
            await self._quick.client.start()

    async def close(self) -> None:
        """Stop the processes, and wait for their end: `run` may never have run, or been cancelled while they ended."""
        if self._prestarting is not None:
            self._prestarting.cancel()
            await asyncio.wait([self._prestarting])
        for lane in (self._quick, self._slow):
            await lane.client.close()

    async def run(self) -> None:
        """Make plans until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._serve(self._quick, self.prestart()), name="quick plans")
            group.create_task(self._serve(self._slow), name="slow plans")

    def forget(self, key: JobKey) -> None:
        """Drop the state of a deleted job."""
        super().forget(key)
        self._quick.turns.discard(key)
        self._slow.turns.discard(key)

    def _missing(self, key: JobKey, request: PlanRequest) -> Answer:
        slow = request.spec_digest in self._slow_specs or request.spec_digest in self._failures
        if not slow and not request.keep_json:
            slow = self._slow.serves(key.namespace)
        (self._slow if slow else self._quick).turns.add(key, request)
        raise PlanPendingError(slow=slow)

    async def _serve(self, lane: _Lane, started: Awaitable[None] | None = None) -> None:
        try:
            if started is not None:
                await started
            while True:
                key, request = await lane.turns.next(time.monotonic())
                if self._known(request) is None:
                    lane.namespace = key.namespace if not request.keep_json else None
                    await self._solve(lane, key, request)
                    lane.namespace = None
                self._reconcile(key)
        finally:
            await lane.client.close()

    async def _solve(self, lane: _Lane, key: JobKey, request: PlanRequest) -> None:
        """Make one plan, and store it or its failure. One that takes too long for this lane goes to the slow one."""
        preempting = asyncio.create_task(self._preempt(lane, key, request))
        try:
            answer, used = await lane.client.solve(request, lane.cpu_seconds)
        except PlanPreemptedError as preempted:
            self._use.count(key.namespace, preempted.cpu_seconds, time.monotonic())
            self._try_again(lane, key, request)
            return
        except PlanningStoppedError:
            used = lane.cpu_seconds
            answer = PlanFailure(message_past_deadline(request, lane.cpu_seconds), DEADLINE_EXCEEDED)
            log.warning("planning process stopped", extra={"job": str(key)})
        except OSError as error:
            log.error("cannot start a planning process", extra={"error": str(error)})
            await asyncio.sleep(RESTART_SECONDS)
            return
        finally:
            preempting.cancel()
        self._use.count(key.namespace, used, time.monotonic())
        past = isinstance(answer, PlanFailure) and answer.reason == DEADLINE_EXCEEDED
        if past and lane is self._quick:
            self._continue_slowly(key, request)
            return
        if past:
            self._metrics.planning_deadlines.inc()
        self._metrics.planning_seconds.observe(used)
        self._preemptions.pop(request.digest, None)
        self._store(request, answer)

    async def _preempt(self, lane: _Lane, key: JobKey, request: PlanRequest) -> None:
        """Preempt a plan when others should not wait for it any longer."""
        namespace, used = key.namespace, self._use.of(key.namespace, time.monotonic())
        may_repeat = self._preemptions.get(request.digest, 0) < MAX_PREEMPTIONS
        async with asyncio.TaskGroup() as group:
            if lane is self._quick:
                group.create_task(lane.preempt_for_rival(namespace, inf, lane.slice_seconds))
                if may_repeat and used >= MUCH_USE:
                    group.create_task(lane.preempt_for_rival(namespace, used / 2, AT_ONCE_SECONDS))
            elif may_repeat:
                group.create_task(lane.preempt_for_rival(namespace, used + lane.slice_seconds, lane.slice_seconds))

    def _try_again(self, lane: _Lane, key: JobKey, request: PlanRequest) -> None:
        """Let a plan that was preempted begin again later."""
        if lane is self._quick and lane.took_slice:
            self._continue_slowly(key, request)
            return
        self._preemptions[request.digest] = self._preemptions.pop(request.digest, 0) + 1
        _bound(self._preemptions)
        lane.turns.add(key, request)

    def _continue_slowly(self, key: JobKey, request: PlanRequest) -> None:
        """Let the slow process make a plan, and the other plans of its namespace."""
        self._slow_specs[request.spec_digest] = None
        _bound(self._slow_specs)
        for waiting in ((key, request), *self._quick.turns.take(key.namespace)):
            self._slow.turns.add(*waiting)


def _bound(stored: OrderedDict[bytes, int] | OrderedDict[bytes, None]) -> None:
    while len(stored) > MAX_ANSWERS:
        stored.popitem(last=False)
