"""The two loops that talk to the coordinator: the long poll for meshes, and heartbeats.

Neither stops training: while the coordinator is unavailable both retry, and ranks keep running. Only two answers stop
the pod, and both let ranks save first: 410, and 401 or 404 for so long that a restarting operator cannot be the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

from meshwright.protocol.messages import MeshDocument, MeshRequest, ReportReply, WorkerReport
from meshwright_worker.agent.coordinator_client import (
    CoordinatorClient,
    IncompatibleError,
    RejectedError,
    SupersededError,
    UnavailableError,
)
from meshwright_worker.agent.events import EventQueue, MeshReceived, ShutdownRequested
from meshwright_worker.agent.state_machine import EXIT_DRAINED, EXIT_REJECTED

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.25
# Short, because it bounds how late a pod learns of a new mesh after the operator restarts.
LAST_RETRY_SECONDS = 3.0
# Limits the request rate if the coordinator answers every poll at once.
POLL_PAUSE_SECONDS = 0.2
EARLY_ANSWER = 0.5
"""A poll without a document that ends before this part of the requested time asks for a report. Otherwise it ends after
three quarters of the time at the earliest."""
# Whatever interval the coordinator sets.
LONGEST_REPORT_SECONDS = 60.0


class Backoff:
    """Exponential backoff up to a bound, jittered so that pods do not retry in lockstep."""

    def __init__(self) -> None:
        self._next = FIRST_RETRY_SECONDS
        self.longest = LAST_RETRY_SECONDS
        """Upper bound of the delay."""

    def reset(self) -> None:
        """Start over after a successful request."""
        self._next = FIRST_RETRY_SECONDS

    def delay(self, minimum: float = 0.0) -> float:
        """Return the seconds to wait before the next try: at least `minimum`, if the coordinator asked for a delay.

        Then it is not much more than that: a replica on standby asks for a short delay, because the next connection may
        reach the leader.
        """
        delay = min(self._next, minimum) if minimum else self._next
        self._next = min(self._next * 2, self.longest)
        return minimum * random.uniform(1.0, 1.5) + delay * random.uniform(0.5, 1.0)  # noqa: S311 - spreading, not secrecy


class MeshPoll:
    """Polls for meshes and puts each into the event queue."""

    def __init__(
        self,
        client: CoordinatorClient,
        build_mesh_request: Callable[[], MeshRequest],
        event_queue: EventQueue,
        reject_seconds: float,
        on_early_answer: Callable[[], None],
    ) -> None:
        """`on_early_answer` is called when a poll ends early without a document: the coordinator asks for a report."""
        self._client = client
        self._build_mesh_request = build_mesh_request
        self._event_queue = event_queue
        self._reject_seconds = reject_seconds
        self._on_early_answer = on_early_answer
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._applied = asyncio.Event()
        self._generation = 0

    def wake(self) -> None:
        """End a wait between tries early, because a new mesh is available."""
        self._wake.set()

    def repeat(self) -> None:
        """Send an open poll again at once, because the request has changed."""
        self._changed.set()

    def mark_applied(self, generation: int) -> None:
        """Record that the mesh of `generation` was applied: the next poll, with the next store port, may be sent."""
        self._generation = generation
        self._applied.set()

    async def run(self) -> None:
        """Poll until the coordinator stops the pod, or the task is cancelled."""
        backoff = Backoff()
        rejected_since: float | None = None
        unreachable = False
        while True:
            self._changed.clear()
            request, opened = self._build_mesh_request(), time.monotonic()
            try:
                document = await self._ask(request)
            except SupersededError:
                self._event_queue.put_nowait(ShutdownRequested(EXIT_DRAINED, "the job no longer wants this pod"))
                return
            except (RejectedError, IncompatibleError) as error:
                rejected_since = rejected_since or time.monotonic()
                # Running ranks need no coordinator: an operator upgrade with an incompatible protocol must not stop
                # them.
                has_running_ranks = isinstance(error, IncompatibleError) and self._build_mesh_request().generation > 0
                if not has_running_ranks and time.monotonic() - rejected_since >= self._reject_seconds:
                    reason = f"the coordinator rejected this pod for {self._reject_seconds:g} s: {error}"
                    self._event_queue.put_nowait(ShutdownRequested(EXIT_REJECTED, reason))
                    return
                if has_running_ranks and not unreachable:
                    log.warning("the coordinator rejected the poll; ranks keep running: %s", error)
                unreachable = unreachable or has_running_ranks
                await self._pause(backoff.delay())
                continue
            except UnavailableError as error:
                if not unreachable:
                    log.warning("the coordinator is unavailable; ranks keep running: %s", error)
                unreachable, rejected_since = True, None
                await self._pause(backoff.delay(error.retry_after))
                continue
            if unreachable:
                log.info("the coordinator is available again")
            unreachable, rejected_since = False, None
            backoff.reset()
            if document is not None:
                self._event_queue.put_nowait(MeshReceived(document))
                while self._generation < document.generation:
                    self._applied.clear()
                    await self._applied.wait()
            elif not self._changed.is_set() and time.monotonic() - opened < EARLY_ANSWER * request.wait_seconds:
                self._on_early_answer()
            await asyncio.sleep(POLL_PAUSE_SECONDS)

    async def _ask(self, request: MeshRequest) -> MeshDocument | None:
        """The answer to a poll. None if there is no newer mesh yet, or if the request has changed meanwhile."""
        poll = asyncio.create_task(self._client.mesh(request))
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait((poll, changed), return_when=asyncio.FIRST_COMPLETED)
            return await poll if poll.done() else None
        finally:
            poll.cancel()
            changed.cancel()
            await asyncio.gather(poll, changed, return_exceptions=True)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()


class Heartbeat:
    """Sends the agent's state at once when it changes, and else at the interval that the coordinator sets.

    The first interval is `interval`, which is also the shortest.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        report: Callable[[], WorkerReport],
        event_queue: EventQueue,
        interval: float,
        on_reply: Callable[[ReportReply], None],
        on_delivered: Callable[[WorkerReport], None] = lambda _: None,
    ) -> None:
        """`on_delivered` gets each report that the coordinator has accepted."""
        self._client = client
        self._on_delivered = on_delivered
        self._build_report = report
        self._event_queue = event_queue
        self._shortest = self._interval = interval
        self._on_reply = on_reply
        self._changed = asyncio.Event()

    def report_now(self) -> None:
        """Send a report now, because the state changed."""
        self._changed.set()

    async def run(self) -> None:
        """Report until cancelled."""
        backoff = Backoff()
        while True:
            self._changed.clear()
            try:
                report = self._build_report()
                reply = await self._client.report(report)
            except SupersededError:
                self._event_queue.put_nowait(ShutdownRequested(EXIT_DRAINED, "the job no longer wants this pod"))
                await asyncio.sleep(self._interval)
            except (RejectedError, IncompatibleError, UnavailableError) as error:
                # `MeshPoll` logs all three and acts on them. Here it is enough to send the newest state later.
                await asyncio.sleep(backoff.delay(error.retry_after if isinstance(error, UnavailableError) else 0.0))
            else:
                backoff.reset()
                self._interval = min(max(self._shortest, reply.report_seconds), LONGEST_REPORT_SECONDS)
                # Agents of a large job do not all come back at once when the operator restarts.
                backoff.longest = max(LAST_RETRY_SECONDS, self._interval)
                self._on_delivered(report)
                self._on_reply(reply)
                await self._wait()

    async def send_final_report(self, seconds: float) -> bool:
        """Send reports until one is accepted, for at most `seconds`. Return whether one was."""
        backoff = Backoff()
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            try:
                # A request may be several: for another session, or for a new CA bundle.
                async with asyncio.timeout(remaining):
                    report = self._build_report()
                    await self._client.report(report, seconds=remaining)
            except TimeoutError:
                return False
            except (SupersededError, RejectedError, IncompatibleError):
                return False
            except UnavailableError:
                await asyncio.sleep(min(backoff.delay(), max(0.0, end - time.monotonic())))
            else:
                self._on_delivered(report)
                return True
        return False

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._interval * random.uniform(0.9, 1.0)):  # noqa: S311 - spreading, not secrecy
                await self._changed.wait()
