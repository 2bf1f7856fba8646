"""Makes plans in two processes, so that no spec blocks the event loop, or keeps the plans of other jobs waiting.

The first process takes every plan, but only for a short time. What takes longer continues in the second process, with
the full deadline. The plans of a namespace that used much CPU time recently start there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from meshwright.planner.cost_model import Calibration
from meshwright.planner.deadline import DEADLINE_EXCEEDED
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.metrics.operator_metrics import OperatorMetrics
from meshwright_operator.planning.planner import DEADLINE_SECONDS, MAX_ANSWERS, Planner, PlanPendingError
from meshwright_operator.planning.process_client import PlanningStoppedError, ProcessClient
from meshwright_operator.planning.request import Answer, PlanFailure, PlanRequest, message_past_deadline
from meshwright_operator.planning.turns import Turns
from meshwright_operator.scheduling.inventories import Inventories

QUICK_SECONDS = 1.0
"""CPU time of a plan in the first process."""
SLOW_NICE = 5
MAX_QUICK_USE = 3.0
"""CPU seconds that a namespace may use of the first process before its plans start in the second."""
RESTART_SECONDS = 1.0
"""Pause after no process could be started."""

log = logging.getLogger(__name__)


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
        self._quick, self._slow = Turns(), Turns()
        self._slow_specs: OrderedDict[bytes, None] = OrderedDict()

    async def run(self) -> None:
        """Make plans until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._serve(self._quick, QUICK_SECONDS, 0), name="quick plans")
            group.create_task(self._serve(self._slow, DEADLINE_SECONDS, SLOW_NICE), name="slow plans")

    def forget(self, key: JobKey) -> None:
        """Drop the state of a deleted job."""
        self._quick.discard(key)
        self._slow.discard(key)

    def _missing(self, key: JobKey, request: PlanRequest) -> Answer:
        slow = not request.keep_json and self._quick.used(key.namespace, time.monotonic()) >= MAX_QUICK_USE
        slow = slow or request.spec_digest in self._slow_specs or request.spec_digest in self._failures
        (self._slow if slow else self._quick).add(key, request)
        raise PlanPendingError(slow=slow)

    async def _serve(self, turns: Turns, cpu_seconds: float, nice: int) -> None:
        client = ProcessClient(nice)
        try:
            while True:
                key, request = await turns.next(time.monotonic())
                if self._known(request) is None:
                    await self._solve(client, turns, key, request, cpu_seconds)
                self._reconcile(key)
        finally:
            await asyncio.shield(client.close())

    async def _solve(
        self, client: ProcessClient, turns: Turns, key: JobKey, request: PlanRequest, cpu_seconds: float
    ) -> None:
        """Make one plan, and store it or its failure. One that takes too long for this process goes to the second."""
        try:
            answer, used = await client.solve(request, cpu_seconds)
        except PlanningStoppedError:
            used = cpu_seconds
            answer = PlanFailure(message_past_deadline(request, cpu_seconds), DEADLINE_EXCEEDED)
            log.warning("planning process stopped", extra={"job": str(key)})
        except OSError as error:
            log.error("cannot start a planning process", extra={"error": str(error)})
            await asyncio.sleep(RESTART_SECONDS)
            return
        turns.count(key.namespace, used, time.monotonic())
        past = isinstance(answer, PlanFailure) and answer.reason == DEADLINE_EXCEEDED
        if past and turns is self._quick:
            self._note_slow(request)
            return
        if past:
            self._metrics.planning_deadlines.inc()
        self._metrics.planning_seconds.observe(used)
        self._store(request, answer)

    def _note_slow(self, request: PlanRequest) -> None:
        self._slow_specs[request.spec_digest] = None
        while len(self._slow_specs) > MAX_ANSWERS:
            self._slow_specs.popitem(last=False)
