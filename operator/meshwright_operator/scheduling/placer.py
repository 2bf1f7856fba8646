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
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost_model import Calibration
from meshwright.planner.placement import Placement
from meshwright_operator.decide.placement_outcome import Granted, NotGranted
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.pod_requests import PodRequest
from meshwright_operator.metrics.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling.attempt import Attempt, Outcome, run_attempt
from meshwright_operator.scheduling.cluster_view import ClusterView
from meshwright_operator.scheduling.job_queue import Basis, JobQueue, Member, PlacementRequest, QueuePosition
from meshwright_operator.scheduling.pod_request_lister import PodRequestLister
from meshwright_operator.scheduling.policy import Policy
from meshwright_operator.scheduling.policy_admission import POLICY_EXCEEDED, quota_excess, waiting_excess
from meshwright_operator.scheduling.reservations import (
    RESERVE_SECONDS,
    ReservedSpares,
    reserved_for_others,
    spares_allowed,
)

FIRST_RETRY_SECONDS = 15.0
"""Time after which the first job of the queue asks again, so that foreign pods are listed: no watch reports them."""
WAKE_COUNT = 4
"""How many jobs at the head of the queue are reconciled after a job got nodes."""
MAX_WAITING_CALLERS = 3
"""Reconciles that may wait for an answer. Others end, and run again when there is an answer."""
LONGEST_PAUSE_SECONDS = 1.0
INLINE_CHANGES = 256
"""More changes of pods than this are counted in a thread."""

log = logging.getLogger(__name__)


class Purpose(Enum):
    """What a request is for."""

    PLACE = "place"
    """Nodes. A job that gets none is queued."""
    EDIT = "edit"
    """A trial for an edit. If it fits, the job is queued with the edit."""
    MOVE = "move"
    """A trial for a move of workers. Changes nothing."""


class Later:
    """There is no answer yet: the job is in the queue, and its key is queued when there is one."""


LATER = Later()


@dataclass(slots=True, eq=False)
class _Call:
    request: PlacementRequest
    purpose: Purpose
    result: asyncio.Future[Granted | NotGranted | Later]


@dataclass(slots=True)
class _Trial:
    """An edit that did not fit. It is tried again when capacity became free."""

    request: PlacementRequest
    answer: NotGranted
    attempted: int


@dataclass(slots=True, kw_only=True)
class Surroundings:
    """What the placer reads about the cluster and calls, besides pods."""

    inventory: Callable[[ParallelTrainingJobSpec], Awaitable[Inventory]]
    """The nodes of a job without pods."""
    spares: Callable[[Policy], Sequence[ReservedSpares]]
    """The spare nodes of all jobs."""
    avoided: Callable[[str], Mapping[str, str]]
    """uid of a job -> node -> why this job avoids it."""
    exists: Callable[[PlacementRequest], bool]
    """Whether the job of a request still exists."""
    gpu_resources: Callable[[], Iterable[str]]
    """The GPU resources of all jobs."""
    assume: Callable[[PlacementRequest, Placement], None]
    """Counts what a job was granted as occupied."""
    wake: Callable[[JobKey], None]
    """Queues the key of a job to be reconciled."""


class Placer:
    """Places jobs, one at a time, in the order of the queue."""

    def __init__(self, lister: PodRequestLister, metrics: OperatorMetrics, around: Surroundings) -> None:
        self.queue = JobQueue()
        self._lister = lister
        self._metrics = metrics
        self._around = around
        self._view = ClusterView()
        self._calls: list[_Call] = []
        self._trials: dict[str, _Trial] = {}
        self._changes: dict[str, PodRequest | None] = {}
        self._freed = 0
        """Changes whenever capacity may have become free. Then waiting jobs are tried again."""
        self._changed = 0
        """Changes with every change of capacity. Until then the last answer is still right."""
        self._counted_freed = self._counted_changed = 0
        """The same, of what the view of the cluster contains."""
        self._task: asyncio.Task[None] | None = None
        self._new_call = asyncio.Event()
        self._pause_until = 0.0
        self._spares: Sequence[ReservedSpares] = ()
        self.calibration = Calibration()
        """The calibrated constants of the cluster's GPUs."""

    # What happens around the placer.

    def pod_changed(self, pod: str, request: PodRequest | None) -> None:
        """A pod requests this now; None if it requests nothing any more."""
        self._changes[pod] = request
        self._changed += 1
        if request is None:
            self.capacity_freed()

    def replaced(self, pod: str) -> None:
        """An assumed pod exists now, so it no longer counts itself."""
        self._changes[pod] = None
        self._changed += 1

    def nodes_changed(self) -> None:
        """A node changed in a way that matters for placement."""
        self.capacity_freed()

    def capacity_freed(self) -> None:
        """Tries the waiting jobs again."""
        self._changed += 1
        self._freed += 1
        if self.queue or self._trials:
            self._ensure_task()

    def set_policy(self, policy: Policy) -> None:
        """Orders and bounds the queue by this policy from now on."""
        self.queue.policy = policy
        self.capacity_freed()

    def withdraw(self, uid: str) -> None:
        """Removes a job from the queue, because it needs no more nodes."""
        member = self.queue.remove(uid)
        if member is not None and member.claims:
            self.capacity_freed()

    def withdraw_edit(self, uid: str) -> None:
        """Forgets the edit of a job that waits to fit."""
        self._trials.pop(uid, None)

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
        if purpose is Purpose.PLACE and not request.reuses_own_pods and waiting >= MAX_WAITING_CALLERS:
            self.queue.put(request).wanted = True
            self._ensure_task()
            return LATER
        call = _Call(request, purpose, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        self._new_call.set()
        self._ensure_task()
        return await call.result

    def _known_answer(self, request: PlacementRequest, purpose: Purpose) -> NotGranted | None:
        """An answer that was found meanwhile, or that is still right."""
        if purpose is Purpose.EDIT and (trial := self._trials.get(request.uid)) is not None:
            age = (request.requested_at - trial.request.requested_at).total_seconds()
            if trial.request.same_as(request) and 0 <= age < FIRST_RETRY_SECONDS:
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
        await self._count_changes()
        member, trial = self._next_member(), self._next_trial()
        if self._calls:
            return True
        if member is None and trial is None:
            return bool(self._changes)
        if await self._pause() or self._changes:
            return True  # a request came, or there is something to count first
        started = time.monotonic()
        failed = member or trial
        assert failed is not None
        try:
            if member is not None:
                await self._try_again(member)
            elif trial is not None:
                await self._try_edit_again(trial)
        except Exception:
            # A bug in the planner, for this job. Its reconcile asks again, and reports the error on the job.
            log.exception("placement attempt failed", extra={"job": str(failed.request.key)})
            failed.attempted = self._counted_freed
            if member is not None:
                member.wanted, member.due = False, True
            self._around.wake(failed.request.key)
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
            await asyncio.wait_for(self._new_call.wait(), left)
        except TimeoutError:
            return False
        return True

    # The order.

    def _position(self) -> Callable[[PlacementRequest], QueuePosition]:
        return self.queue.position(self._view.gpus_in_use)

    def _next_call(self) -> _Call:
        position = self._position()
        call = min(self._calls, key=lambda call: (not call.request.reuses_own_pods, position(call.request)))
        self._calls.remove(call)
        return call

    def _ordered(self) -> list[Member]:
        """The jobs that may be placed now, first to last. Notes why the policy does not let the others start."""
        for request in self.queue.requests():
            if not self._around.exists(request):
                self.queue.remove(request.uid)
        waiting: Counter[str] = Counter()
        allowed = []
        for member in self.queue.ordered(self._view.gpus_in_use):
            namespace = member.request.key.namespace
            waiting[namespace] += 1
            member.excess = self._excess(member.request, waiting[namespace])
            if member.excess:
                member.claims, member.fits, member.reserved = {}, False, ()
            else:
                allowed.append(member)
        return allowed

    def _excess(self, request: PlacementRequest, waiting: int = 0) -> str:
        """Why the policy does not let the job start now. A gang that holds pods keeps what it has."""
        if request.assigned_nodes:
            return ""
        namespace = request.key.namespace
        bounds = self.queue.policy.of(namespace)
        in_use = self._view.gpus_in_use(namespace, request.uid)
        text = quota_excess(request.plan, namespace, in_use, bounds)
        if text or request.restarts or bounds.max_waiting_jobs is None or waiting <= bounds.max_waiting_jobs:
            return text
        return waiting_excess(namespace, bounds)

    def _next_member(self) -> Member | None:
        """The first job whose last attempt is older than the last change. Wakes those whose answer is ready."""
        allowed = self._ordered()
        for member in self.queue.members():
            refused = member.answer is not None and member.answer.reason == POLICY_EXCEEDED
            if member.excess and (member.wanted or (member.answer is not None and not refused)):
                self._answered(member, NotGranted(member.excess, reason=POLICY_EXCEEDED), undelivered=True)
                self._wake(member)
            elif refused and not member.excess:
                member.answer = None
                self._wake(member)
        for member in allowed:
            if self._stale(member):
                return member
            if member.wanted:
                self._wake(member)
        return None

    def _wake(self, member: Member) -> None:
        member.wanted = False
        self._around.wake(member.request.key)

    def _next_trial(self) -> _Trial | None:
        for uid, trial in list(self._trials.items()):
            if not self._around.exists(trial.request):
                del self._trials[uid]
            elif trial.attempted != self._freed:
                return trial
        return None

    def _stale(self, member: Member) -> bool:
        return member.attempted != self._freed or (_due(member.request) and not member.due)

    # Answers.

    async def _serve(self, call: _Call) -> None:
        started = time.monotonic()
        result = "error"
        try:
            if call.result.done():
                return
            await self._list_foreign_pods()
            await self._count_changes()
            answer = await self._answer(call)
            result = "placed" if isinstance(answer, Granted) else "does_not_fit"
            if isinstance(answer, Granted):
                self._metrics.placement_cost.observe(answer.placement.cost)
            if not call.result.done():
                call.result.set_result(answer)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            if not call.result.done():
                call.result.set_exception(error)
        finally:
            self._metrics.placement_attempts.labels(result).inc()
            self._metrics.placement_seconds.observe(time.monotonic() - started)

    async def _answer(self, call: _Call) -> Granted | NotGranted:
        spares = self._around.spares(self.queue.policy)
        if spares != self._spares:
            self._spares = spares
            self.capacity_freed()
        if call.purpose is Purpose.PLACE:
            return await self._place(call)
        request = call.request
        trial = self._trials.get(request.uid) if call.purpose is Purpose.EDIT else None
        if trial is not None and trial.attempted == self._freed and trial.request.same_as(request):
            # Foreign pods were listed, and nothing became free.
            trial.request = request
            return trial.answer
        outcome = await self._attempt(request, explain=call.purpose is Purpose.EDIT)
        excess = self._excess(request)
        if call.purpose is Purpose.MOVE or (outcome.placement is not None and not excess):
            if call.purpose is Purpose.EDIT and outcome.placement is not None and not call.result.done():
                self._trials.pop(request.uid, None)
                queued = self.queue.put(replace(request, plan=outcome.placement.plan, other_plans=()))
                self._fits(queued, outcome.placement)
            return _granted(outcome) or self._not_granted(outcome)
        answer = NotGranted(excess, reason=POLICY_EXCEEDED) if excess else self._not_granted(outcome)
        self._trials[request.uid] = _Trial(request, answer, self._counted_freed)
        return answer

    async def _place(self, call: _Call) -> Granted | NotGranted:
        """Nodes for a job, which then leaves the queue, or the reason why it stays in it."""
        member = self.queue.put(call.request)
        allowed = self._ordered()
        if member.excess:
            return self._answered(member, NotGranted(member.excess, reason=POLICY_EXCEEDED))
        basis = self._basis(member)
        if member.answer is None or member.answered != basis:
            outcome = await self._attempt(member.request, member)
            if outcome.placement is not None and await self._bring_up_to_date(member):
                outcome = await self._attempt(member.request, member)
            if self.queue.get(call.request.uid) is not member or call.result.done():
                return NotGranted("The job no longer waits for nodes")
            if (granted := _granted(outcome)) is not None:
                return self._grant(member, granted)
            self._record(member, outcome, basis)
        first = bool(allowed) and allowed[0].request.uid == member.request.uid
        assert member.answer is not None
        return replace(member.answer, retry_seconds=FIRST_RETRY_SECONDS) if first else member.answer

    def _grant(self, member: Member, granted: Granted) -> Granted:
        self.queue.remove(member.request.uid)
        self._around.assume(member.request, granted.placement)
        if member.claims:
            self.capacity_freed()
        head = self.queue.ordered(self._view.gpus_in_use)[:WAKE_COUNT]
        return replace(granted, wake=tuple(other.request.key for other in head))

    async def _bring_up_to_date(self, member: Member) -> bool:
        """Tries the jobs ahead again whose last attempt is older than the last change. Returns whether there were any.

        Only then is it certain that a job does not take nodes on which one ahead of it fits now.
        """
        found = False
        for other in self._ahead(member.request):
            if self._stale(other):
                found = True
                await self._try_again(other)
        return found

    async def _try_again(self, member: Member) -> None:
        """Tries a waiting job after a change, and wakes it if it fits."""
        basis, explain = self._basis(member), member.answer is None
        outcome = await self._attempt(member.request, member, explain=explain)
        if self.queue.get(member.request.uid) is not member:
            return
        self._record(member, outcome, basis, explained=explain)
        if member.fits or member.wanted:
            member.undelivered = not member.fits
            self._wake(member)

    async def _try_edit_again(self, trial: _Trial) -> None:
        """Tries the edit of a running job after a change, and wakes the job if the edit fits."""
        version = self._counted_freed
        outcome = await self._attempt(trial.request, explain=False)
        trial.attempted = version
        if outcome.placement is not None and not self._excess(trial.request):
            self._trials.pop(trial.request.uid, None)
            self._around.wake(trial.request.key)

    def _record(self, member: Member, outcome: Outcome, basis: Basis, *, explained: bool = True) -> None:
        """Notes what an attempt found, and what the job claims because of it."""
        member.attempted, member.due = basis.freed, basis.due
        before = member.claims
        if outcome.placement is not None:
            self._fits(member, outcome.placement)
        else:
            member.fits, member.reserved = False, outcome.reserved
            member.claims = dict.fromkeys(outcome.reserved, f"reserved for job {member.request.key}")
            if explained:
                self._answered(member, self._not_granted(outcome), basis)
        if before.keys() - member.claims.keys():
            position = self._position()
            for other in self.queue.members():
                if position(other.request) > position(member.request):
                    other.attempted = -1

    def _fits(self, member: Member, placement: Placement) -> None:
        """A job that fits now. Jobs behind it leave it the nodes until it asks for them."""
        member.fits, member.attempted, member.due = True, self._counted_freed, _due(member.request)
        nodes = set(placement.nodes.values()) - set(member.request.assigned_nodes.values())
        member.claims = dict.fromkeys(sorted(nodes), f"next for job {member.request.key}")

    def _answered(
        self, member: Member, answer: NotGranted, basis: Basis | None = None, *, undelivered: bool = False
    ) -> NotGranted:
        member.answer, member.answered, member.undelivered = answer, basis, undelivered
        return answer

    def _not_granted(self, outcome: Outcome) -> NotGranted:
        return NotGranted(
            outcome.message,
            outcome.warnings,
            blocked_by_kept_workers=outcome.blocked_by_kept_workers,
            waits_for_turn=outcome.waits_for is not None,
            wake=(outcome.waits_for,) if outcome.waits_for is not None else (),
        )

    # Attempts.

    def _basis(self, member: Member) -> Basis:
        request, avoided = member.request, tuple(self._around.avoided(member.request.uid))
        return Basis(self._counted_freed, self._counted_changed, _due(request), avoided)

    def _ahead(self, request: PlacementRequest) -> list[Member]:
        """The jobs ahead of this one that may be placed now, first to last."""
        position = self._position()
        own = position(request)
        return [
            other for other in self._ordered() if other.request.uid != request.uid and position(other.request) < own
        ]

    async def _attempt(
        self, request: PlacementRequest, member: Member | None = None, *, explain: bool = True
    ) -> Outcome:
        """One attempt to place a job beside the claims of the jobs ahead."""
        ahead = self._ahead(request)
        claims: dict[str, str] = {}
        first = None
        for other in ahead:
            claims |= {name: why for name, why in other.claims.items() if name not in claims}
            first = first or (other.request.key if other.fits else None)
        if request.restarts and self._view.gpus_in_use(request.key.namespace) != self._view.gpus_in_use(
            request.key.namespace, request.uid
        ):
            claims, first = await self._claims_without(request.uid, ahead)
        reserving = {other.request.key.namespace for other in ahead if other.reserved}
        reserves = member is not None and _due(request) and request.key.namespace not in reserving
        attempt = await self._attempt_of(request, claims, explain=explain)
        attempt = replace(
            attempt,
            blocked_by=first,
            ahead=len(ahead),
            reserves=reserves,
            reserved=member.reserved if member is not None else (),
        )
        return await asyncio.to_thread(run_attempt, attempt, self._view)

    async def _claims_without(self, uid: str, ahead: Sequence[Member]) -> tuple[dict[str, str], JobKey | None]:
        """What the jobs ahead would claim if the pods of the job `uid` were deleted."""
        claims: dict[str, str] = {}
        first: JobKey | None = None
        for other in ahead:
            attempt = await self._attempt_of(other.request, claims, explain=False, without_pods_of=uid)
            outcome = await asyncio.to_thread(run_attempt, attempt, self._view)
            if outcome.placement is not None:
                first = first or other.request.key
                nodes = outcome.placement.nodes.values()
                claims |= dict.fromkeys(nodes, f"next for job {other.request.key}")
            else:
                claims |= {name: why for name, why in other.claims.items() if name not in claims}
        return claims, first

    async def _attempt_of(
        self, request: PlacementRequest, claims: Mapping[str, str], *, explain: bool, without_pods_of: str = ""
    ) -> Attempt:
        bounds = self.queue.policy.of(request.key.namespace)
        spares = spares_allowed(request.spec.recovery.spare_nodes, len(request.plan.workers), bounds)
        return Attempt(
            request=request,
            empty=await self._around.inventory(request.spec),
            kept_off={**reserved_for_others(self._spares, request.uid), **self._around.avoided(request.uid)},
            claims=claims,
            spares=spares,
            explain=explain,
            without_pods_of=without_pods_of,
            calibration=self.calibration,
        )

    # The view of the cluster.

    async def _list_foreign_pods(self) -> None:
        """Lists foreign pods again, unless the last listing is recent.

        Raises:
            ApiError: They could not be listed.
        """
        requests = await self._lister.list_if_due()
        if requests is not None and await asyncio.to_thread(self._view.replace_foreign, requests):
            self.capacity_freed()

    async def _count_changes(self) -> None:
        """Counts what has changed since the last time."""
        changes, self._changes = self._changes, {}
        # What changes while this waits is counted the next time.
        freed, changed = self._freed, self._changed
        if changes:
            await self._in_thread_if_many(len(changes), self._view.apply, changes)
        self._counted_freed, self._counted_changed = freed, changed
        for resource in set(self._around.gpu_resources()):
            if not self._view.knows(resource):
                await asyncio.to_thread(self._view.use_of, resource)

    @staticmethod
    async def _in_thread_if_many(
        count: int, apply: Callable[[Mapping[str, PodRequest | None]], bool], changes: Mapping[str, PodRequest | None]
    ) -> None:
        if count > INLINE_CHANGES:
            await asyncio.to_thread(apply, changes)
        else:
            apply(changes)


def _due(request: PlacementRequest) -> bool:
    """Whether the job has waited long enough to reserve nodes."""
    return (request.requested_at - request.since).total_seconds() >= RESERVE_SECONDS


def _granted(outcome: Outcome) -> Granted | None:
    return Granted(outcome.placement, outcome.warnings) if outcome.placement is not None else None
