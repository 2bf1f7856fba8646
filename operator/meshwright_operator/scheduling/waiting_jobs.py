"""The jobs that wait for nodes: who may be placed now, beside what those ahead claim, and what attempts found.

A job that fits claims its nodes until it asks for them, and one that has waited long claims the nodes reserved for it.
Jobs behind it are placed beside these claims. Whenever a job gives up its claims, those behind it are tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.limits import RESERVED
from meshwright.planner.cost_model import Calibration
from meshwright.planner.placement import Placement
from meshwright_operator.decide.placement_outcome import WAITING_RETRY_SECONDS, NotGranted
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.scheduling.attempt import Attempt, Outcome, run_attempt
from meshwright_operator.scheduling.counted_capacity import CountedCapacity
from meshwright_operator.scheduling.job_queue import Basis, JobQueue, Member, PlacementRequest, QueuePosition
from meshwright_operator.scheduling.policy import Bounds, Policy
from meshwright_operator.scheduling.policy_admission import POLICY_EXCEEDED, quota_excess, waiting_excess
from meshwright_operator.scheduling.preemption import Holder
from meshwright_operator.scheduling.reservations import (
    RESERVE_SECONDS,
    ReservedSpares,
    reserved_for_others,
    spares_allowed,
)

FIRST_RETRY_SECONDS = 15.0
"""Time after which the first job of the queue asks again, so that foreign pods are listed: no watch reports them."""
MAX_COMPARED = 4
"""Jobs ahead that do not fit, with which a request is compared before it is tried."""
SILENT_SECONDS = 600.0
"""A job that has not asked for its nodes for this long claims none. A waiting job asks every two minutes."""

log = logging.getLogger(__name__)


class OvertakenError(Exception):
    """A request cannot be answered yet, because another one has to be answered first."""


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
    holders: Callable[[Policy, datetime], Sequence[Holder]] = lambda policy, now: ()
    """The elastic and the preemptible jobs, which may shrink or stop for waiting jobs, as they are at a time."""
    clock: Callable[[], float] = time.monotonic
    """The monotonic clock."""


class WaitingJobs:
    """The queue with what is known of each job in it, and attempts to place them in its order."""

    def __init__(self, capacity: CountedCapacity, around: Surroundings) -> None:
        self.queue = JobQueue(around.clock)
        self._capacity = capacity
        self._around = around
        self._order: list[Member] = []
        self._order_of: object = None
        """What the order depends on."""
        self._spares: Sequence[ReservedSpares] = ()
        self._spares_of = -1
        """The version of the free capacity in which they were collected."""
        self.calibration = Calibration()
        """The calibrated constants of the cluster's GPUs."""

    # The order.

    def position(self) -> Callable[[PlacementRequest], QueuePosition]:
        """A function from a request to its position in the queue; the smallest is first."""
        return self.queue.position(self._capacity.view.gpus_in_use)

    def ordered(self) -> list[Member]:
        """The jobs that may be placed now, first to last. Notes why the policy does not let the others start."""
        for request in self.queue.requests():
            if not self._around.exists(request):
                self.remove(request.uid)
        basis = (self.queue.version, self.queue.policy, self._capacity.counted_changed)
        if self._order_of != basis:
            # Ordering all jobs for each attempt would take quadratic time.
            self._order, self._order_of = self.queue.ordered(self._capacity.view.gpus_in_use), basis
            waiting: Counter[str] = Counter()
            for member in self._order:
                namespace = member.request.key.namespace
                waiting[namespace] += 1
                member.excess = self.excess_of(member.request, waiting[namespace])
        for member in self._order:
            if (member.claims or member.victims) and (member.excess or self._is_silent(member)):
                self._give_up_claims(member)
                self.release_victims(member)
        return [member for member in self._order if not member.excess]

    def remove(self, uid: str) -> bool:
        """Removes a job that waits no more. Returns whether it was in the queue."""
        member = self.queue.remove(uid)
        if member is not None:
            self._give_up_claims(member)
            self.release_victims(member)
        return member is not None

    def _is_silent(self, member: Member) -> bool:
        """Whether the job has not asked for so long that its reconciles must be failing before they can."""
        return self._around.clock() - member.asked > SILENT_SECONDS

    def release_victims(self, member: Member) -> None:
        """Lets the jobs that shrank or stopped for a job grow or start again: it has started, or waits no more."""
        victims, member.victims = member.victims, {}
        for victim in victims.values():
            self._around.wake(victim.key)

    def _give_up_claims(self, member: Member) -> None:
        had_claims = bool(member.claims)
        member.claims, member.fits, member.reserved = {}, False, ()
        if had_claims:
            self._capacity.may_be_freed()

    def release_claims(self, member: Member, granted: Set[str]) -> None:
        """Leaves to the jobs behind a job what it claimed and did not need. It was placed on the nodes in `granted`.

        Only those that it kept from fitting are tried again. Jobs ahead of it were not affected, and those behind it
        that fit have other nodes: trying all of them for each grant would take quadratic time.
        """
        position = self.position()
        for other in self.queue.members():
            affected = not other.fits or not granted.isdisjoint(other.claims)
            if affected and position(other.request) > position(member.request):
                other.attempted, other.answered = -1, None

    def excess_of(self, request: PlacementRequest, waiting: int = 0) -> str:
        """Why the policy does not let the job start now. A gang that holds pods keeps what it has."""
        if request.assigned_nodes and not request.grows:
            return ""
        namespace = request.key.namespace
        bounds = self.queue.policy.of(namespace)
        in_use = self._capacity.view.gpus_in_use(namespace, request.uid)
        text = quota_excess(request.smallest.plan, namespace, in_use, bounds)
        if (
            text
            or request.grows
            or request.restarts
            or bounds.max_waiting_jobs is None
            or waiting <= bounds.max_waiting_jobs
        ):
            return text
        return waiting_excess(namespace, bounds)

    def next_member(self) -> Member | None:
        """The first job whose last attempt is older than the last change. Wakes those whose answer is ready."""
        allowed = self.ordered()
        for member in self.queue.members():
            refused = member.answer is not None and member.answer.reason == POLICY_EXCEEDED
            if member.excess and (member.wanted or (member.answer is not None and not refused)):
                self.note_answer(member, NotGranted(member.excess, reason=POLICY_EXCEEDED), undelivered=True)
                self.wake(member)
            elif refused and not member.excess:
                member.answer = None
                self.wake(member)
        for member in allowed:
            if self.is_stale(member):
                return member
            if member.wanted:
                self.wake(member)
        return None

    def wake(self, member: Member) -> None:
        """Has the job reconciled."""
        member.wanted = False
        self._around.wake(member.request.key)

    def is_stale(self, member: Member) -> bool:
        """Whether something that matters for the job has changed since its last attempt."""
        return member.attempted != self._capacity.freed or (_due(member.request) and not member.due) or member.rested

    def refresh_spares(self, *, if_freed: bool = False) -> None:
        """Collects the spare nodes of all jobs again; with `if_freed` only if capacity became free since."""
        if if_freed and self._spares_of == self._capacity.freed:
            return
        spares = self._around.spares(self.queue.policy)
        if spares != self._spares:
            self._spares = spares
            self._capacity.may_be_freed()
        self._spares_of = self._capacity.freed

    # What attempts found.

    async def bring_up_to_date(self, member: Member, is_overtaken: Callable[[], bool]) -> bool:
        """Tries the jobs ahead again whose last attempt is older than the last change. Returns whether there were any.

        Only then is it certain that a job does not take nodes on which one ahead of it fits now.

        Args:
            member: The job.
            is_overtaken: Whether another request has to be answered first. Asked before every attempt.

        Raises:
            OvertakenError: Another request has to be answered first.
        """
        found = False
        for other in self.ahead(member.request):
            if self.is_stale(other):
                if is_overtaken():
                    raise OvertakenError
                found = True
                await self.try_again(other)
        return found

    def stale_ahead(self, member: Member) -> int:
        """How many jobs ahead `bring_up_to_date` would try again."""
        return sum(self.is_stale(other) for other in self.ahead(member.request))

    async def try_again(self, member: Member) -> None:
        """Tries a waiting job after a change, and wakes it if it fits.

        An attempt that raises, because of a bug in the planner, must concern only this job. The job is woken: its
        reconcile asks again, and reports the error on the job.
        """
        try:
            await self._try_again(member)
        except Exception:
            log.exception("placement attempt failed", extra={"job": str(member.request.key)})
            member.attempted, member.due = self._capacity.counted_freed, True
            self._give_up_claims(member)
            self.wake(member)

    def _is_known_not_to_fit(self, member: Member) -> bool:
        """Whether a job ahead that requests the same did not fit since capacity became free, beside fewer claims."""
        request, freed = member.request, self._capacity.freed
        if freed != self._capacity.counted_freed or not _is_plain(request) or member.rested or member.reserved:
            return False
        if _due(request) or self._around.avoided(request.uid):
            return False
        failed = (
            other
            for other in reversed(self.ahead(request))
            if other.attempted == freed and not other.fits and other.answer is not None and _is_plain(other.request)
        )
        return any(
            _requests_the_same(other.request, request) and not self._around.avoided(other.request.uid)
            for other in islice(failed, MAX_COMPARED)
        )

    async def _try_again(self, member: Member) -> None:
        basis, explain = self.basis(member), member.answer is None
        if not explain and self._is_known_not_to_fit(member):
            self.record(member, Outcome(), basis, explained=False)
            if member.wanted:
                member.undelivered = True
                self.wake(member)
            return
        outcome = await self.attempt(member.request, member, explain=explain)
        if self.queue.get(member.request.uid) is not member:
            return
        self.record(member, outcome, basis, explained=explain)
        if member.fits or member.wanted:
            member.undelivered = not member.fits
            self.wake(member)

    def record(self, member: Member, outcome: Outcome, basis: Basis, *, explained: bool = True) -> None:
        """Notes what an attempt found, and what the job claims because of it."""
        member.attempted, member.due = basis.freed, basis.due
        before = member.claims
        if outcome.placement is not None:
            self.note_fit(member, outcome.placement)
        else:
            reserved = () if self._is_silent(member) else outcome.reserved
            member.fits, member.reserved = False, reserved
            claimed = () if self._is_silent(member) else outcome.claimed
            member.claims = dict.fromkeys((*reserved, *claimed), f"{RESERVED}{member.request.key}")
            if explained:
                self.note_answer(member, self.with_retry(member, not_granted(outcome)), basis)
        self._note_victims(member, outcome)
        if before.keys() - member.claims.keys():
            position = self.position()
            for other in self.queue.members():
                if position(other.request) > position(member.request):
                    other.attempted = -1

    def _note_victims(self, member: Member, outcome: Outcome) -> None:
        """Notes which jobs have to shrink or to stop for a job, and has them reconciled."""
        if outcome.placement is not None:
            return  # they stay as they are until it has started
        victims = () if self._is_silent(member) else outcome.victims
        before, member.victims = member.victims, {victim.uid: victim for victim in victims}
        for victim in (before | member.victims).values():
            self._around.wake(victim.key)

    def replica_limit(self, uid: str) -> tuple[int, JobKey] | None:
        """The number of replicas that waiting jobs leave to a job, and the first of these jobs.

        0 if it has to stop. None if no job needs its nodes.
        """
        limits = [
            (member.victims[uid].replicas, member.request.key)
            for member in self.queue.members()
            if uid in member.victims
        ]
        return min(limits, default=None)

    def note_fit(self, member: Member, placement: Placement) -> None:
        """A job that fits now. Jobs behind it leave it the nodes until it asks for them."""
        member.fits, member.attempted, member.due = True, self._capacity.counted_freed, _due(member.request)
        nodes = set() if self._is_silent(member) else set(placement.nodes.values())
        nodes -= set(member.request.assigned_nodes.values())
        member.claims = dict.fromkeys(sorted(nodes), f"next for job {member.request.key}")

    def with_retry(self, member: Member, answer: NotGranted) -> NotGranted:
        """The answer with the time after which the job asks again: the first job of the queue asks for all."""
        first = not self.ahead(member.request)
        return replace(answer, retry_seconds=FIRST_RETRY_SECONDS if first else WAITING_RETRY_SECONDS)

    def note_answer(
        self, member: Member, answer: NotGranted, basis: Basis | None = None, *, undelivered: bool = False
    ) -> NotGranted:
        """Notes and returns the answer to a job's last request, and what it depends on."""
        member.answer, member.answered, member.undelivered = answer, basis, undelivered
        return answer

    # Attempts.

    def basis(self, member: Member) -> Basis:
        """What an answer that is found now depends on."""
        request, avoided = member.request, tuple(self._around.avoided(member.request.uid))
        freed, changed = self._capacity.counted_freed, self._capacity.counted_changed
        return Basis(freed, changed, _due(request), avoided, member.rested)

    def ahead(self, request: PlacementRequest) -> list[Member]:
        """The jobs ahead of this one that may be placed now, first to last."""
        position, allowed = self.position(), self.ordered()
        count = bisect_left(allowed, position(request), key=lambda member: position(member.request))
        return [member for member in allowed[:count] if member.request.uid != request.uid]

    async def attempt(
        self, request: PlacementRequest, member: Member | None = None, *, explain: bool = True
    ) -> Outcome:
        """One attempt to place a job beside the claims of the jobs ahead."""
        ahead = self.ahead(request)
        claims: dict[str, str] = {}
        first = None
        for other in ahead:
            claims |= {name: why for name, why in other.claims.items() if name not in claims}
            first = first or (other.request.key if other.fits else None)
        namespace, view = request.key.namespace, self._capacity.view
        if request.restarts and view.gpus_in_use(namespace) != view.gpus_in_use(namespace, request.uid):
            claims, first = await self._claims_without((namespace, request.uid), ahead)
        reserving = {other.request.key.namespace for other in ahead if other.reserved}
        reserves = member is not None and _due(request) and namespace not in reserving
        attempt = await self._attempt_of(request, claims, explain=explain)
        priority = self.queue.policy.of(namespace).priority.clamp(request.spec.priority)
        holders: Sequence[Holder] = ()
        if member is not None and not ahead:
            holders = self._around.holders(self.queue.policy, request.requested_at)
        if member is not None:
            rests = [one.rests_until for one in holders if one.priority == priority and one.filled_from is not None]
            member.rests_until = min((end for end in rests if end is not None), default=None)
        attempt = replace(
            attempt,
            blocked_by=first,
            ahead=len(ahead),
            reserves=reserves,
            reserved=member.reserved if member is not None else (),
            holders=holders,
            victims=tuple(member.victims.values()) if member is not None else (),
            priority=priority,
        )
        return await asyncio.to_thread(run_attempt, attempt, view)

    async def _claims_without(
        self, job: tuple[str, str], ahead: Sequence[Member]
    ) -> tuple[dict[str, str], JobKey | None]:
        """What the jobs ahead would claim if the pods of this job (namespace, uid) were deleted."""
        claims: dict[str, str] = {}
        first: JobKey | None = None
        for other in ahead:
            attempt = await self._attempt_of(other.request, claims, explain=False, without_pods_of=job)
            try:
                outcome = await asyncio.to_thread(run_attempt, attempt, self._capacity.view)
            except Exception:
                log.exception("placement attempt failed", extra={"job": str(other.request.key)})
                outcome = Outcome()
            if outcome.placement is not None:
                first = first or other.request.key
                nodes = outcome.placement.nodes.values()
                claims |= dict.fromkeys(nodes, f"next for job {other.request.key}")
            else:
                claims |= {name: why for name, why in other.claims.items() if name not in claims}
        return claims, first

    async def _attempt_of(
        self,
        request: PlacementRequest,
        claims: Mapping[str, str],
        *,
        explain: bool,
        without_pods_of: tuple[str, str] | None = None,
    ) -> Attempt:
        bounds = self.queue.policy.of(request.key.namespace)
        request = self._within_quota(request, bounds)
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

    def _within_quota(self, request: PlacementRequest, bounds: Bounds) -> PlacementRequest:
        """The request without the sizes that exceed the quota of the namespace. The smallest one stays."""
        if len(request.sizes) < 2 or bounds.max_gpus_in_use is None:
            return request
        namespace = request.key.namespace
        in_use = self._capacity.view.gpus_in_use(namespace, request.uid)
        sizes = tuple(one for one in request.sizes if not quota_excess(one.plan, namespace, in_use, bounds))
        return replace(request, sizes=sizes or request.sizes[-1:])


def _is_plain(request: PlacementRequest) -> bool:
    """Whether a request is for a gang of one size that has never been placed: only free nodes matter to it."""
    return not (request.reuses_own_pods or request.sizes or request.grows or request.previous)


def _requests_the_same(first: PlacementRequest, second: PlacementRequest) -> bool:
    """Whether two plain requests fit on the same nodes."""
    plans = zip(first.plans, second.plans, strict=False)
    same = len(first.plans) == len(second.plans) and all(a is b or a == b for a, b in plans)
    return same and (first.spec is second.spec or first.spec == second.spec)


def _due(request: PlacementRequest) -> bool:
    """Whether the job has waited long enough to reserve nodes."""
    return (request.requested_at - request.since).total_seconds() >= RESERVE_SECONDS


def not_granted(outcome: Outcome) -> NotGranted:
    """The answer to a request whose attempt found no placement."""
    return NotGranted(
        outcome.message,
        outcome.warnings,
        blocked_by_kept_workers=outcome.blocked_by_kept_workers,
        waits_for_turn=outcome.waits_for is not None,
        wake=(outcome.waits_for,) if outcome.waits_for is not None else (),
    )
