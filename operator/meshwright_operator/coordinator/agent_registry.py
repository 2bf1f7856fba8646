"""The agents of one job: their polls and reports, and the mesh document that they receive. In memory only.

After a restart of the operator, this state is rebuilt: agents poll and report every few seconds, and the mesh document
is built from the job's status.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from meshwright.protocol.messages import (
    AgentState,
    MeshDocument,
    MeshRequest,
    ReportReply,
    TrustBundle,
    TrustRequest,
    WorkerReport,
)
from meshwright_operator.coordinator.rate_limit import RateLimiter
from meshwright_operator.decide.agents import Agents, ReceivedReport, WaitingAgent

# An agent polls again right after an answer. After this long without a poll it counts as absent.
ABSENT_SECONDS = 10.0
MAX_GENERATION = 1 << 31


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


class AgentRegistry:
    """One job's agents, and the mesh document for which they poll."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.document: MeshDocument | None = None
        """The document of the current generation; None before the first, and while the next one is being formed."""
        self.generation = 0
        """The newest generation that was published."""
        self._incarnations: Mapping[int, int] = {}
        self._pods: Mapping[int, str] = {}
        self._members: frozenset[tuple[int, int]] = frozenset()
        self._encoded = b""
        self.rate_limiter = RateLimiter(clock)
        """Limits the requests of each worker's agent."""
        self._closed = False
        self._published = False
        self._presences: dict[int, _Presence] = {}
        self._reports: dict[int, _Report] = {}
        self._newest = 0
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
        pods: Mapping[int, str] | None = None,
    ) -> None:
        """Set what agents receive, and wake waiting polls.

        Args:
            document: The document of the current generation, if any.
            incarnations: Worker -> current incarnation.
            generation: The newest generation, even if it has ended.
            closed: Whether the job needs no pods, so that agents must exit.
            pods: Worker -> uid of the pod of its current incarnation, if it is known.
        """
        self.generation = generation
        pods = pods or {}
        now = self.document, self._incarnations, self._closed, self._pods
        same = (document, incarnations, closed, pods) == now
        if same and self._published:
            return
        self.document, self._incarnations, self._closed, self._published = document, incarnations, closed, True
        self._pods = pods
        # Encode once: a thousand agents may ask for the document at the same time.
        self._encoded = encode(document) if document is not None else b""
        self._members = frozenset((m.worker, m.incarnation) for m in document.members) if document else frozenset()
        async with self._changed:
            self._changed.notify_all()

    def superseded(self, sender: MeshRequest | WorkerReport | TrustRequest) -> bool:
        """Whether the sender's pod has been replaced, or does not belong to the job."""
        if not self._published:
            return False
        current = self._incarnations.get(sender.worker)
        if self._closed or current is None or sender.incarnation < current:
            return True
        # A process on a disconnected node may outlive its pod object, and a new pod may have the same name.
        known = self._pods.get(sender.worker) if sender.incarnation == current else None
        return bool(known and sender.pod_uid and sender.pod_uid != known)

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

    async def wait_for_newer(self, request: MeshRequest) -> bytes | None:
        """Wait for a newer document. Return it encoded, or None if the agent is superseded or the time is up."""

        def done() -> bool:
            return self.document_for(request) is not None or self.superseded(request)

        try:
            async with asyncio.timeout(request.wait_seconds), self._changed:
                await self._changed.wait_for(done)
        except TimeoutError:
            return None
        if self.superseded(request):
            return None
        # The agent now uses its store port: it must poll again before it counts for the next generation.
        self._presences.pop(request.worker, None)
        return self._encoded if self.document_for(request) is not None else None

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

    def receive_report(self, report: WorkerReport) -> bool:
        """Store a report. Return whether it may change a decision, and is not only progress."""
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
        self._reports[report.worker] = _Report(report, now, halted_since)
        return old is None or _decision_fields(old.report) != _decision_fields(report)

    def _record_generation(self, generation: int) -> None:
        """Record the highest generation that an agent has reported. Ignore numbers that are out of range."""
        if generation <= MAX_GENERATION:
            self._newest = max(self._newest, generation)

    def agents(self) -> Agents:
        """The state of the job's agents now."""
        now = self._clock()
        waiting_agents = {
            worker: WaitingAgent(p.request.incarnation, p.request.address, p.request.store_port)
            for worker, p in self._presences.items()
            if p.polls > 0 or now - p.seen <= ABSENT_SECONDS
        }
        reports = {
            worker: ReceivedReport(
                r.report, now - r.arrived, now - r.halted_since if r.halted_since is not None else 0.0
            )
            for worker, r in self._reports.items()
        }
        return Agents(waiting_agents, reports, self._newest, now - self._started_at)


def encode(message: MeshDocument | ReportReply | TrustBundle) -> bytes:
    """The message as compact JSON."""
    return json.dumps(message.wire(), separators=(",", ":")).encode()


def _halt_state(report: WorkerReport) -> tuple[AgentState, int]:
    return report.state, report.generation


def _decision_fields(report: WorkerReport) -> tuple[object, ...]:
    """The parts of a report on which a decision may depend."""
    phases = tuple((phase.name, phase.seconds) for phase in report.phases)
    return report.incarnation, report.generation, report.state, report.failure, report.message, phases
