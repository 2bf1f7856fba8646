"""The agents of one job: their polls and reports, and the mesh document that they receive. In memory only.

After a restart of the operator, this state is rebuilt: agents poll and report every few seconds, and the mesh document
is built from the job's status.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from meshwright.protocol.messages import (
    DEFAULT_REPORT_SECONDS,
    MAX_GENERATION,
    AgentState,
    MeshDocument,
    MeshRequest,
    ReportReply,
    TrustBundle,
    WorkerReport,
)
from meshwright.protocol.signing import Sender, digest_of
from meshwright_operator.coordinator.rate_limit import RateLimiter
from meshwright_operator.decide.agents import Agents, ReceivedReport, WaitingAgent
from meshwright_operator.decide.stragglers import ComputeTimes, compute_times
from meshwright_operator.http.limits import ByteBudget

# An agent polls again right after an answer. After this long without a poll it counts as absent.
COMPUTE_SECONDS = 10.0
"""Interval in which the compute times of a job's ranks are compared."""
ABSENT_SECONDS = 10.0
JOB_BODY_BYTES = 2 << 20
"""Bytes of one job's bodies that are received at once, so that its pods leave room for those of other jobs."""
MAX_REPORTED_GENERATION = MAX_GENERATION // 2
SHORTEST_WAIT = 0.75
"""A poll ends after this part of the requested time at the earliest, so that a job's polls do not end together."""


@dataclass(frozen=True, slots=True)
class EncodedMessage:
    """A message as JSON, and its digest for the signature. Both are computed once for all agents."""

    body: bytes
    digest: str


@dataclass(slots=True)
class _Presence:
    request: MeshRequest
    polls: int = 0
    """Number of open polls."""
    seen: float = 0.0
    """When the last one opened or ended."""


@dataclass(slots=True)
class _Report:
    report: WorkerReport
    arrived: float
    halted_since: float | None
    interval: float
    digest: str


class AgentRegistry:
    """One job's agents, and the mesh document for which they poll."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.document: MeshDocument | None = None
        """The document of the current generation; None before the first, and while the next one is being formed."""
        self.generation = 0
        """The newest generation that was published."""
        self.pause: int | None = None
        """The generation whose ranks must save a checkpoint and stop, while their pods stay."""
        self.leave: int | None = None
        """The generation that ranks leave to hold their state, because others are lost."""
        self._notified_of_leave: set[tuple[int, int]] = set()
        self._checkpoint_request: str | None = None
        self._notified_of_pause: set[tuple[int, int]] = set()
        """(worker, incarnation) of the agents that have received `pause`, or whose poll has ended because of it."""
        self._incarnations: Mapping[int, int] = {}
        self._pods: Mapping[int, str] = {}
        self._members: frozenset[tuple[int, int]] = frozenset()
        self._encoded: EncodedMessage | None = None
        self._first_worker = -1
        """The worker of rank 0."""
        self.rate_limiter = RateLimiter(clock)
        """Limits the requests of each worker's agent."""
        self.body_budget = ByteBudget(JOB_BODY_BYTES)
        """Bytes of the bodies that are being received."""
        self._closed = False
        self._published = False
        self._presences: dict[int, _Presence] = {}
        self._reports: dict[int, _Report] = {}
        self._newest = 0
        self._compute: ComputeTimes | None = None
        self._compute_at = float("-inf")
        self._compute_generation = 0
        self._changed = asyncio.Condition()
        self._clock = clock
        self._started_at = clock()

    async def publish(
        self,
        document: MeshDocument | None,
        incarnations: Mapping[int, int],
        *,
        generation: int = 0,
        closed: bool = False,
        pause: bool = False,
        leave: bool = False,
        pods: Mapping[int, str] | None = None,
        checkpoint_request: str | None = None,
    ) -> None:
        """Set what agents receive, and wake waiting polls.

        Args:
            document: The document of the current generation, if any.
            incarnations: Worker -> current incarnation.
            generation: The newest generation, even if it has ended.
            closed: Whether the job needs no pods, so that agents must exit.
            pause: Whether the ranks of `generation` must save a checkpoint and stop, while their pods stay.
            leave: Whether the ranks of `generation` must leave it and hold their state.
            pods: Worker -> uid of the pod of its current incarnation, if it is known.
            checkpoint_request: The request for a checkpoint that rank 0 of `generation` must receive.
        """
        self._checkpoint_request = checkpoint_request
        self.generation = generation
        pods = pods or {}
        paused = generation if pause else None
        now = self.document, self._incarnations, self._closed, self._pods, self.pause
        # Once a rank has failed, the ranks leave their generation, whatever is decided then.
        leaving = generation if leave or self.leave == generation else None
        same = (document, incarnations, closed, pods, paused) == now and leaving == self.leave
        if same and self._published:
            return
        self.document, self._incarnations, self._closed, self._published = document, incarnations, closed, True
        self._pods = pods
        self._set_leave(leaving)
        if paused != self.pause:
            self.pause = paused
            self._notified_of_pause.clear()
        # Encode once: a thousand agents may ask for the document at the same time.
        self._encoded = encode(document) if document is not None else None
        members = document.members if document is not None else []
        self._first_worker = next((m.worker for m in members if m.first_rank == 0), self._first_worker)
        self._members = frozenset((m.worker, m.incarnation) for m in document.members) if document else frozenset()
        async with self._changed:
            self._changed.notify_all()

    def _set_leave(self, generation: int | None) -> None:
        if generation != self.leave:
            self.leave = generation
            self._notified_of_leave.clear()

    async def leave_with_failed(self, report: WorkerReport) -> None:
        """Let all ranks leave their generation as soon as a rank of it fails: those that it does not communicate with
        would notice nothing.
        """
        document, generation = self.document, report.generation
        failed = report.state is AgentState.FAILED and self.leave != generation
        if failed and document is not None and document.in_memory and document.generation == generation:
            self._set_leave(generation)
            async with self._changed:
                self._changed.notify_all()

    @property
    def published(self) -> bool:
        """Whether a reconcile has published the job's state."""
        return self._published

    @property
    def workers(self) -> int:
        """The number of the job's workers."""
        return len(self._incarnations)

    def reports_progress(self, worker: int) -> bool:
        """Whether this is the worker of rank 0, whose reports contain the progress of training."""
        return worker == self._first_worker

    def superseded(self, sender: Sender | MeshRequest | WorkerReport) -> bool:
        """Whether the sender's pod has been replaced, or does not belong to the job."""
        if not self._published:
            return False
        current = self._incarnations.get(sender.worker)
        if self._closed or current is None or sender.incarnation < current:
            return True
        # A process on a disconnected node may outlive its pod object, and a new pod may have the same name.
        known = self._pods.get(sender.worker) if sender.incarnation == current else None
        return bool(known and sender.pod_uid != known)

    def is_new(self, request: MeshRequest) -> bool:
        """Whether a poll says something new: its agent was absent, or polls for another generation."""
        presence = self._presences.get(request.worker)
        if presence is None or presence.request != request:
            return True
        return presence.polls == 0 and self._clock() - presence.seen > ABSENT_SECONDS

    @contextmanager
    def polling(self, request: MeshRequest) -> Iterator[None]:
        """Count the agent as present while its poll is open."""
        presence = self._presences.get(request.worker)
        if presence is None or presence.request != request:
            presence = self._presences[request.worker] = _Presence(request, presence.polls if presence else 0)
        presence.polls += 1
        presence.seen = self._clock()
        self._record_generation(request.generation)
        try:
            yield
        finally:
            # The agent may have sent a different request meanwhile. Then the newer presence has the count.
            current = self._presences.get(request.worker, presence)
            current.polls = max(0, current.polls - 1)
            current.seen = self._clock()

    async def wait_for_newer(self, request: MeshRequest) -> EncodedMessage | None:
        """Wait for a newer document. Return it encoded, or None if the agent is superseded, must report at once to
        receive a pause or a request to leave, or the time is up.
        """

        def done() -> bool:
            newer = self.document_for(request) is not None
            return newer or self.superseded(request) or self._must_be_notified(request)

        try:
            seconds = request.wait_seconds * random.uniform(SHORTEST_WAIT, 1.0)  # noqa: S311 - spreading, not secrecy
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(done)
        except TimeoutError:
            return None
        if self.superseded(request):
            return None
        if self.document_for(request) is None and self._must_be_notified(request):
            notified = self._notified_of_pause if self.pause == request.generation else self._notified_of_leave
            notified.add((request.worker, request.incarnation))
            return None
        # The agent now uses its store port: it must poll again before it counts for the next generation.
        self._presences.pop(request.worker, None)
        return self._encoded if self.document_for(request) is not None else None

    def _must_be_notified(self, request: MeshRequest) -> bool:
        """Whether a poll ends because of a pause or a loss: once for each and agent, since older agents ignore it."""
        agent = request.worker, request.incarnation
        if self.pause == request.generation:
            return agent not in self._notified_of_pause
        return self.leave == request.generation and agent not in self._notified_of_leave

    def pause_for(self, worker: int) -> int | None:
        """The pause for the reply to the worker's last report: that of the report's generation."""
        last = self._reports.get(worker)
        if last is None or last.report.generation != self.pause:
            return None
        self._notified_of_pause.add((worker, last.report.incarnation))
        return self.pause

    def leave_for(self, worker: int) -> int | None:
        """The generation to leave, for the reply to the worker's last report."""
        last = self._reports.get(worker)
        if last is None or last.report.generation != self.leave:
            return None
        self._notified_of_leave.add((worker, last.report.incarnation))
        return self.leave

    def checkpoint_request_for(self, worker: int) -> str | None:
        """The request for a checkpoint for the reply to the worker's last report: only that of rank 0 has it."""
        last = self._reports.get(worker)
        current = last is not None and last.report.generation == self.generation
        return self._checkpoint_request if current and self.reports_progress(worker) else None

    def polls(self, worker: int) -> int:
        """The number of open polls of this worker."""
        presence = self._presences.get(worker)
        return presence.polls if presence is not None else 0

    def document_for(self, request: MeshRequest) -> MeshDocument | None:
        """The document, if it is newer than the agent's generation and contains the agent's incarnation."""
        document = self.document
        if document is None or document.generation <= request.generation:
            return None
        return document if (request.worker, request.incarnation) in self._members else None

    def repeat_report(self, worker: int, digest: str, interval: float) -> bool:
        """Record that the worker's last report arrived again. Return whether the digest is that of the last report."""
        last = self._reports.get(worker)
        if last is None or not last.digest or last.digest != digest:
            return False
        last.arrived, last.interval = self._clock(), interval
        return True

    def receive_report(self, report: WorkerReport, digest: str = "", interval: float = DEFAULT_REPORT_SECONDS) -> bool:
        """Store a report. Return whether it may change a decision, and is not only progress.

        Args:
            report: The report.
            digest: The digest of its body; empty if it is unknown.
            interval: The time until the agent's next report, as the answer says.
        """
        old = self._reports.get(report.worker)
        now = self._clock()
        self._record_generation(report.generation)
        if old is not None and (old.report.incarnation, old.report.generation) > (
            report.incarnation,
            report.generation,
        ):
            return False
        halted_since = None
        if report.state in (AgentState.FAILED, AgentState.IDLE):
            again = old is not None and _halt_state(old.report) == _halt_state(report) and old.halted_since is not None
            halted_since = old.halted_since if old is not None and again else now
        self._reports[report.worker] = _Report(report, now, halted_since, interval, digest)
        return old is None or _decision_fields(old.report) != _decision_fields(report)

    def _record_generation(self, generation: int) -> None:
        """Record the highest generation that an agent has reported, if it is a number that a job can reach.

        The next generation is above it, and agents can name that one only up to `MAX_GENERATION`. So a number from a
        user's pod may not use up the numbers of later generations.
        """
        if generation <= MAX_REPORTED_GENERATION:
            self._newest = max(self._newest, generation)

    def compute_times(self) -> ComputeTimes | None:
        """The compute times of the current generation's ranks, compared again every `COMPUTE_SECONDS`."""
        now = self._clock()
        if now - self._compute_at >= COMPUTE_SECONDS or self._compute_generation != self.generation:
            self._compute_at, self._compute_generation = now, self.generation
            self._compute = compute_times((entry.report for entry in self._reports.values()), self.generation)
        return self._compute

    def agents(self) -> Agents:
        """The state of the job's agents now."""
        now = self._clock()
        waiting_agents = {
            worker: WaitingAgent(
                p.request.incarnation,
                p.request.address,
                p.request.store_port,
                p.request.preparing,
                p.request.holds_state,
                p.request.lighthouse_port,
                p.request.generation,
            )
            for worker, p in self._presences.items()
            if p.polls > 0 or now - p.seen <= ABSENT_SECONDS
        }
        reports = {
            worker: ReceivedReport(
                r.report, now - r.arrived, now - r.halted_since if r.halted_since is not None else 0.0, r.interval
            )
            for worker, r in self._reports.items()
        }
        return Agents(waiting_agents, reports, self._newest, now - self._started_at, self.compute_times())


def encode(message: MeshDocument | ReportReply | TrustBundle) -> EncodedMessage:
    """The message as compact JSON."""
    body = json.dumps(message.wire(), separators=(",", ":")).encode()
    return EncodedMessage(body, digest_of(body))


def _halt_state(report: WorkerReport) -> tuple[AgentState, int]:
    return report.state, report.generation


def _decision_fields(report: WorkerReport) -> tuple[object, ...]:
    """The parts of a report on which a decision may depend."""
    phases = tuple((phase.name, phase.seconds) for phase in report.phases)
    failure = report.failure, report.message, report.evidence
    held = tuple((rank.rank, rank.held.model_dump_json()) for rank in report.ranks if rank.held is not None)
    saves = tuple((tier.error, tier.saving_since) for tier in report.checkpoint_tiers)
    # With its first progress, a generation of a user's command replaces the steps of the last one in the status.
    others = phases, report.preflight, report.checkpoint_request, held, saves, report.progress is not None
    return report.incarnation, report.generation, report.state, report.paused, *failure, *others
