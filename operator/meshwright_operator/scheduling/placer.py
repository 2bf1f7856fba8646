"""The placer: one task that looks at placement requests in order, with one view of the cluster for all.

A job registers its request and is in the queue until it is placed or withdrawn. The task answers requests, first those
of gangs that hold pods. When capacity became free, it tries the waiting jobs again, in the order of the queue, and
wakes those that fit. Between two attempts it looks for new requests, so a gang that lost a pod waits for one attempt at
most.

The task runs only while there is something to do. Attempts run in a thread, one at a time; everything else, including
what the queue knows, is only touched on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from meshwright.planner.cost_model import Calibration
from meshwright.planner.placement import Placement
from meshwright_operator.decide.gang_actions import size_of
from meshwright_operator.decide.placement_outcome import WAITING_RETRY_SECONDS, Granted, NotGranted
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.pod_requests import PodRequest
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling.attempt import Outcome
from meshwright_operator.scheduling.counted_capacity import CountedCapacity
from meshwright_operator.scheduling.job_queue import Member, PlacementRequest
from meshwright_operator.scheduling.pod_request_lister import PodRequestLister
from meshwright_operator.scheduling.policy import Policy
from meshwright_operator.scheduling.policy_admission import POLICY_EXCEEDED
from meshwright_operator.scheduling.waiting_jobs import (
    FIRST_RETRY_SECONDS,
    OvertakenError,
    Surroundings,
    WaitingJobs,
    not_granted,
)

WAKE_COUNT = 4
"""How many jobs at the head of the queue are reconciled after a job got nodes."""
MAX_WAITING_CALLERS = 3
"""Reconciles that may wait for an answer. Others end, and run again when there is an answer."""
MAX_PASSED = 4
"""Later requests that are answered before one, because their jobs are ahead in the queue. Then its reconcile ends."""
MAX_TRIED_AHEAD = 4
"""Jobs ahead that are tried again while a reconcile waits. If there are more, it ends."""
LONGEST_PAUSE_SECONDS = 1.0

log = logging.getLogger(__name__)


class Purpose(Enum):
    """What a request is for."""

    PLACE = "place"
    """Nodes. A job that gets none is queued."""
    EDIT = "edit"
    """A trial for an edit. If it fits, the job is queued with the edit."""
    MOVE = "move"
    """A trial for a move of workers. Changes nothing."""
    GROW = "grow"
    """Nodes for more replicas of a job that trains. A job that gets none is not queued, but woken when it fits."""


class Later:
    """There is no answer yet: the job is in the queue, and its key is queued when there is one."""


LATER = Later()


@dataclass(slots=True, eq=False)
class _Call:
    request: PlacementRequest
    purpose: Purpose
    result: asyncio.Future[Granted | NotGranted | Later]
    passed: int = 0
    """How many requests were answered since it came."""

    @property
    def may_be_later(self) -> bool:
        """Whether the job may be reconciled again for its answer: it waits for nodes, and holds no pods."""
        return self.purpose is Purpose.PLACE and not self.request.reuses_own_pods


@dataclass(slots=True)
class _Trial:
    """An edit or a growth that did not fit. It is tried again when capacity became free, or a node is not avoided."""

    request: PlacementRequest
    answer: NotGranted
    attempted: int
    avoided: tuple[str, ...]
    """Nodes that the job avoided then."""


class Placer:
    """Places jobs, one at a time, in the order of the queue."""

    def __init__(self, lister: PodRequestLister, metrics: OperatorMetrics, around: Surroundings) -> None:
        self._metrics = metrics
        self._around = around
        self._capacity = CountedCapacity(lister, around.gpu_resources, self._on_freed)
        self._jobs = WaitingJobs(self._capacity, around)
        self.queue = self._jobs.queue
        self._calls: list[_Call] = []
        self._trials: dict[tuple[str, Purpose], _Trial] = {}
        self._task: asyncio.Task[None] | None = None
        self._new_call = asyncio.Event()
        self._pause_until = 0.0

    def recalibrate(self, calibration: Calibration) -> None:
        """Places with these constants of the cluster's GPUs from now on."""
        self._jobs.calibration = calibration

    # What happens around the placer.

    def pod_changed(self, pod: str, request: PodRequest | None) -> None:
        """A pod requests this now; None if it requests nothing any more."""
        self._capacity.pod_changed(pod, request)

    def pod_requests(self) -> dict[str, PodRequest | None]:
        """What each pod requests now. A copy."""
        return self._capacity.requests()

    def assume(self, pods: Mapping[str, PodRequest]) -> None:
        """Counts the pods (by id) that a job was granted until they exist, or until they are given up."""
        for pod, request in pods.items():
            self._capacity.assume(pod, request)

    def give_up_assumed(self, uid: str) -> None:
        """Frees what was assumed for a job and does not exist: the job is placed again, or needs it no more."""
        self._capacity.give_up_assumed(uid)

    def nodes_changed(self) -> None:
        """A node changed in a way that matters for placement."""
        self._capacity.may_be_freed()

    def _on_freed(self) -> None:
        if self.queue or self._trials:
            self._ensure_task()

    def set_policy(self, policy: Policy) -> None:
        """Orders and bounds the queue by this policy from now on."""
        self.queue.policy = policy
        self._capacity.may_be_freed()

    def may_fit_now(self) -> None:
        """Tries waiting jobs again: the nodes are the same, but their locations are not."""
        self._capacity.may_be_freed()

    def withdraw(self, uid: str) -> None:
        """Removes a job from the queue, because it needs no more nodes."""
        if self._jobs.remove(uid):
            self._turn_may_have_come()
            self._on_freed()  # The policy may let another job of the namespace wait.

    def withdraw_edit(self, uid: str) -> None:
        """Forgets the edit of a job that waits to fit."""
        self._trials.pop((uid, Purpose.EDIT), None)

    def withdraw_growth(self, uid: str) -> None:
        """Forgets that a job waits to grow."""
        self._trials.pop((uid, Purpose.GROW), None)

    def replica_limit(self, uid: str) -> tuple[int, JobKey] | None:
        """The number of replicas that waiting jobs leave to a job, and the first of these jobs."""
        return self._jobs.replica_limit(uid)

    async def idle(self) -> None:
        """Waits until there is nothing to do."""
        while self._task is not None:
            await asyncio.wait([self._task])

    # Requests.

    async def ask(self, request: PlacementRequest, purpose: Purpose) -> Granted | NotGranted | Later:
        """The answer to a request. `LATER` if others wait for theirs; never for a gang that holds pods.

        Raises:
            ApiError: Foreign pods could not be listed.
        """
        if (known := self._known_answer(request, purpose)) is not None:
            return known
        waiting = sum(1 for call in self._calls if not call.request.reuses_own_pods)
        call = _Call(request, purpose, asyncio.get_running_loop().create_future())
        if call.may_be_later and waiting >= MAX_WAITING_CALLERS:
            self._ensure_task()
            return self._later(request)
        self._calls.append(call)
        self._new_call.set()
        self._ensure_task()
        return await call.result

    def _known_answer(self, request: PlacementRequest, purpose: Purpose) -> NotGranted | None:
        """An answer that was found meanwhile, or that is still right."""
        if (trial := self._trials.get((request.uid, purpose))) is not None:
            age = (request.requested_at - trial.request.requested_at).total_seconds()
            unchanged = purpose is Purpose.EDIT and trial.attempted == self._capacity.freed
            fresh = WAITING_RETRY_SECONDS if unchanged else FIRST_RETRY_SECONDS
            if trial.request.same_as(request) and 0 <= age < fresh:
                return trial.answer
        if purpose is Purpose.PLACE and (member := self.queue.get(request.uid)) is not None and member.undelivered:
            member.undelivered = False
            if request.same_as(member.request):
                return member.answer
        return None

    def _ensure_task(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="placer")

    async def _run(self) -> None:
        """Answers requests and tries waiting jobs, until there is nothing to do."""
        try:
            while await self._step():
                pass
        except Exception as error:
            log.exception("the placer failed")
            for call in self._calls:
                if not call.result.done():
                    call.result.set_exception(RuntimeError(f"no placement: {error!r}"))
        finally:
            self._task = None
            for call in self._calls:
                call.result.cancel()
            self._calls.clear()

    async def _step(self) -> bool:
        """Answers one request, or tries one waiting job. Returns whether there was something to do."""
        self._new_call.clear()
        if self._calls:
            await self._serve(self._next_call())
            return True
        self._jobs.refresh_spares(if_freed=True)
        await self._capacity.count_changes()
        member, trial = self._jobs.next_member(), self._next_trial()
        if self._calls:
            return True
        if member is None and trial is None:
            return self._capacity.uncounted
        if await self._pause() or self._capacity.uncounted:
            return True  # a request came, or there is something to count first
        started = time.monotonic()
        if member is not None:
            await self._jobs.try_again(member)
        elif trial is not None:
            await self._try_trial_again(trial)
        # Half of the time is left to requests, and to other threads.
        ended = time.monotonic()
        self._pause_until = ended + min(ended - started, LONGEST_PAUSE_SECONDS)
        return True

    async def _pause(self) -> bool:
        """Waits before the next job is tried again. Returns whether a request came meanwhile."""
        left = self._pause_until - time.monotonic()
        if left <= 0:
            return False
        try:
            async with asyncio.timeout(left):
                await self._new_call.wait()
        except TimeoutError:
            return False
        return True

    # The order.

    def _next_call(self) -> _Call:
        position = self._jobs.position()
        call = min(self._calls, key=lambda call: (not call.request.reuses_own_pods, position(call.request)))
        self._calls.remove(call)
        for other in self._calls:
            other.passed += 1
        for other in [one for one in self._calls if one.may_be_later and one.passed > MAX_PASSED]:
            self._calls.remove(other)
            if not other.result.done():
                other.result.set_result(self._later(other.request))
        return call

    def _later(self, request: PlacementRequest) -> Later:
        """Queues a job, which is reconciled again when there is an answer. The placer's task must run."""
        self.queue.put(request).wanted = True
        return LATER

    def _next_trial(self) -> _Trial | None:
        for name, trial in list(self._trials.items()):
            if not self._around.exists(trial.request):
                del self._trials[name]
            elif trial.attempted != self._capacity.freed:
                return trial
        return None

    # Answers.

    async def _serve(self, call: _Call) -> None:
        """Answers a request, or leaves it for later if one that comes first arrived meanwhile."""
        started = time.monotonic()
        result = "error"
        try:
            if call.result.done():
                return
            await self._capacity.list_foreign_pods()
            await self._capacity.count_changes()
            answer = await self._answer(call)
            result = "placed" if isinstance(answer, Granted) else "" if answer is LATER else "does_not_fit"
            if isinstance(answer, Granted):
                self._metrics.placement_cost.observe(answer.placement.cost)
            if not call.result.done():
                call.result.set_result(answer)
        except OvertakenError:
            result = ""
            self._calls.append(call)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            if not call.result.done():
                call.result.set_exception(error)
        finally:
            if result:
                self._metrics.placement_attempts.labels(result).inc()
                self._metrics.placement_seconds.observe(time.monotonic() - started)

    async def _answer(self, call: _Call) -> Granted | NotGranted | Later:
        self._jobs.refresh_spares()
        if call.purpose is Purpose.PLACE:
            return await self._place(call)
        request, purpose = call.request, call.purpose
        trial = self._trials.get((request.uid, purpose))
        if trial is not None and trial.request.same_as(request) and self._still_does_not_fit(trial):
            trial.request = request
            return trial.answer
        avoided = self._avoided(request)
        outcome = await self._jobs.attempt(request, explain=purpose is Purpose.EDIT)
        excess = self._jobs.excess_of(request)
        if purpose is Purpose.MOVE or (outcome.placement is not None and not excess):
            if outcome.placement is not None and not call.result.done():
                self._trials.pop((request.uid, purpose), None)
                self._reserve(request, purpose, outcome.placement)
            return _granted(outcome) or not_granted(outcome)
        answer = NotGranted(excess, reason=POLICY_EXCEEDED) if excess else not_granted(outcome)
        self._trials[request.uid, purpose] = _Trial(request, answer, self._capacity.counted_freed, avoided)
        return answer

    def _still_does_not_fit(self, trial: _Trial) -> bool:
        """Whether a trial would fail again: foreign pods were listed, and nothing became free."""
        same = trial.attempted == self._capacity.freed and trial.avoided == self._avoided(trial.request)
        return same and not trial.answer.waits_for_turn

    def _avoided(self, request: PlacementRequest) -> tuple[str, ...]:
        return tuple(self._around.avoided(request.uid))

    def _reserve(self, request: PlacementRequest, purpose: Purpose, placement: Placement) -> None:
        """Keeps the nodes that an edit or a growth gets from other jobs."""
        if purpose is Purpose.EDIT:
            size = size_of(request.sizes, placement)
            sizes = (size,) if size is not None else ()
            queued = self.queue.put(replace(request, plan=placement.plan, other_plans=(), sizes=sizes))
            self._jobs.note_fit(queued, placement)
        elif purpose is Purpose.GROW:
            self._around.assume(request, placement)

    async def _place(self, call: _Call) -> Granted | NotGranted | Later:
        """Nodes for a job, which then leaves the queue, or the reason why it stays in it."""
        member = self.queue.put(call.request)
        self._jobs.ordered()
        if member.excess:
            return self._jobs.note_answer(member, NotGranted(member.excess, reason=POLICY_EXCEEDED))
        basis = self._jobs.basis(member)

        def is_overtaken() -> bool:
            others = any(other.request.reuses_own_pods for other in self._calls)
            return others and not call.request.reuses_own_pods

        if member.answer is None or member.answered != basis:
            outcome = await self._jobs.attempt(member.request, member)
            if outcome.placement is not None and call.may_be_later and self._jobs.stale_ahead(member) > MAX_TRIED_AHEAD:
                return self._later(call.request)
            if outcome.placement is not None and await self._jobs.bring_up_to_date(member, is_overtaken):
                outcome = await self._jobs.attempt(member.request, member)
            if self.queue.get(call.request.uid) is not member or call.result.done():
                return NotGranted("The job no longer waits for nodes")
            if (granted := _granted(outcome)) is not None:
                return self._grant(member, granted)
            self._jobs.record(member, outcome, basis)
        assert member.answer is not None
        return self._jobs.with_retry(member, member.answer)

    def _grant(self, member: Member, granted: Granted) -> Granted:
        self.queue.remove(member.request.uid)
        self._around.assume(member.request, granted.placement)
        self._jobs.release_victims(member)
        if member.claims:
            self._jobs.release_claims(member, set(granted.placement.nodes.values()))
            for trial in self._trials.values():
                trial.attempted = -1
        self._turn_may_have_come()
        head = self.queue.ordered(self._capacity.view.gpus_in_use)[:WAKE_COUNT]
        return replace(granted, wake=tuple(other.request.key for other in head))

    def _turn_may_have_come(self) -> None:
        """Tries edits again that fit, but for a job ahead of them, because a job has left the queue.

        It need not have claimed nodes: beside the pods of the job with the edit, it may not have fitted.
        """
        for trial in self._trials.values():
            if trial.answer.waits_for_turn:
                trial.attempted = -1

    async def _try_trial_again(self, trial: _Trial) -> None:
        """Tries the edit or the growth of a running job after a change, and wakes the job if it fits."""
        trial.attempted, trial.avoided = self._capacity.counted_freed, self._avoided(trial.request)
        try:
            outcome = await self._jobs.attempt(trial.request, explain=False)
        except Exception:
            # A bug in the planner, for this job. Its reconcile asks again, and reports the error on the job.
            log.exception("placement attempt failed", extra={"job": str(trial.request.key)})
            self._around.wake(trial.request.key)
            return
        if outcome.placement is not None and not self._jobs.excess_of(trial.request):
            self._trials = {name: one for name, one in self._trials.items() if one is not trial}
            self._around.wake(trial.request.key)


def _granted(outcome: Outcome) -> Granted | None:
    return Granted(outcome.placement, outcome.warnings) if outcome.placement is not None else None
