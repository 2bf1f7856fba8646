"""The plans of all jobs. A plan that is not known yet is made elsewhere, and its job is reconciled again.

Answers are stored by what they depend on. A spec whose plan passes its deadline is not planned again until a pause has
passed, which doubles each time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import PlanStatus
from meshwright.planner.cost_model import Calibration
from meshwright.planner.deadline import DEADLINE_EXCEEDED
from meshwright.planner.plan import Plan
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.planning.request import Answer, PlanFailure, PlanRequest, solve
from meshwright_operator.scheduling.inventories import Inventories

DEADLINE_SECONDS = 10.0
"""CPU time of one plan. Mixtures on thousands of GPUs, with tens of thousands of tokens in a sequence, take seconds,
and some of them more than five on a slow machine.
"""
MAX_ANSWERS = 8192
FIRST_PAUSE_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 3600.0


class PlanPendingError(Exception):
    """The plan is being made. The job is reconciled again when it is there.

    Attributes:
        slow: whether it takes so long that the user should know.
    """

    def __init__(self, *, slow: bool = False) -> None:
        super().__init__("The plan is being made")
        self.slow = slow


class Planner:
    """Makes each plan in the caller's thread, when it is asked for: for tests in virtual time."""

    def __init__(
        self,
        inventories: Inventories,
        calibration: Callable[[], Calibration],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inventories = inventories
        self._calibration = calibration
        self._clock = clock
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        self._failures: OrderedDict[bytes, tuple[int, float, PlanFailure]] = OrderedDict()
        """Spec digest -> how often its plan passed the deadline, the time until it is not repeated, and the failure."""
        self._sizes: dict[JobKey, tuple[object, list[Plan]]] = {}
        self._running: dict[JobKey, tuple[object, Plan]] = {}
        """The last running plan of each job, and what it was made for. To find it by digest takes longer."""

    def plans(self, key: JobKey, spec: ParallelTrainingJobSpec) -> list[Plan]:
        """The plans to choose from for a job that has not started, the best first.

        Raises:
            PlanError: No plan fits the job or the cluster, or it passed its deadline.
            PlanPendingError: The plan is being made.
        """
        hardware = self._inventories.hardware(spec).calibrated(self._calibration())
        return self._ask(key, PlanRequest.new(spec, hardware))

    def running_plan(self, key: JobKey, spec: ParallelTrainingJobSpec, keep: PlanStatus) -> Plan:
        """The plan of a running job, which does not depend on nodes.

        Raises:
            PlanError: The spec is invalid, or the plan passed its deadline.
            PlanPendingError: The plan is being made.
        """
        known = self._running.get(key)
        if known is None or known[0] != (spec, keep):
            known = self._running[key] = (spec, keep), self._ask(key, PlanRequest.running(spec, keep))[0]
        return known[1]

    def warnings(self, spec: ParallelTrainingJobSpec) -> tuple[str, ...]:
        """Problems with nodes, for the message about a plan that depends on them."""
        return self._inventories.empty(spec).warnings

    def sizes(self, key: JobKey, asked: object, make: Callable[[], list[Plan]]) -> list[Plan]:
        """What `make` returns, or returned when the last call for the job asked for the same.

        An elastic job has up to 16 plans. To find and check all of them takes longer than the rest of a reconcile.
        """
        known = self._sizes.get(key)
        if known is None or known[0] != asked:
            known = self._sizes[key] = asked, make()
        return known[1]

    def forget(self, key: JobKey) -> None:
        """Drop the state of a deleted job."""
        self._sizes.pop(key, None)
        self._running.pop(key, None)

    def _ask(self, key: JobKey, request: PlanRequest) -> list[Plan]:
        answer = self._known(request)
        if answer is None:
            answer = self._missing(key, request)
        if isinstance(answer, PlanFailure):
            raise answer.error
        return list(answer)

    def _known(self, request: PlanRequest) -> Answer | None:
        """The answer, if it is stored and does not have to be found again."""
        answer = self._answers.get(request.digest)
        if answer is not None:
            self._answers.move_to_end(request.digest)
            return answer
        _, until, failure = self._failures.get(request.spec_digest, (0, 0.0, None))
        return failure if failure is not None and self._clock() < until else None

    def _missing(self, key: JobKey, request: PlanRequest) -> Answer:
        """The answer to a request that is not stored.

        Raises:
            PlanPendingError: The plan is being made.
        """
        answer = solve(request, DEADLINE_SECONDS)
        self._store(request, answer)
        return answer

    def _store(self, request: PlanRequest, answer: Answer) -> None:
        if isinstance(answer, PlanFailure) and answer.reason == DEADLINE_EXCEEDED:
            count = self._failures.pop(request.spec_digest, (0, 0.0, answer))[0]
            pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(count, 16), LONGEST_PAUSE_SECONDS)
            self._failures[request.spec_digest] = count + 1, self._clock() + pause, answer
        else:
            self._failures.pop(request.spec_digest, None)
            self._answers[request.digest] = answer
        for stored in (self._answers, self._failures):
            while len(stored) > MAX_ANSWERS:
                stored.popitem(last=False)
