"""The coordinator's HTTP endpoints (the protocol is documented in `meshwright.protocol.messages`).

The headers of a request are checked before its body is read (`authentication`). Bodies are limited in size, in reading
time and in total. The coordinator signs every answer to a request with a valid signature. It responds with 410, after
which an agent exits, only after a reconcile has published the job's state. Until then, agents wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from meshwright.protocol.messages import MeshRequest, ReportReply, TrustBundle, WorkerReport
from meshwright.protocol.signing import Sender, digest_of
from meshwright.protocol.trust import bundle_id
from meshwright_operator.coordinator.agent_registry import AgentRegistry, EncodedMessage, encode
from meshwright_operator.coordinator.authentication import (
    Authenticator,
    SignedRequest,
    rate_limited,
    superseded_error,
)
from meshwright_operator.coordinator.rate_limit import MAX_OPEN_POLLS
from meshwright_operator.coordinator.tokens import Tokens
from meshwright_operator.decide.report_interval import report_seconds, urgent_spacing
from meshwright_operator.http.limits import ByteBudget
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.operator_metrics import OperatorMetrics

BODY_SECONDS = 10.0
BODY_BYTES_IN_FLIGHT = 16 << 20
"""Bytes of all bodies that are being received."""
COUNT_WORKERS_SECONDS = 5.0
MAX_REPLIES = 4096
MAX_NOTIFIED = 4096
MAX_PROBLEM_CHARACTERS = 2000
CLIENT_CLOSED_REQUEST = 499
"""Code in metrics if the client disconnected before the answer."""

Message = TypeVar("Message", MeshRequest, WorkerReport)
Handler = Callable[[SignedRequest, web.Request], Awaitable[EncodedMessage | None]]


class Coordinator:
    """The registry of all jobs, and the endpoints for agents."""

    def __init__(
        self,
        cache: Cache,
        tokens: Tokens,
        metrics: OperatorMetrics,
        notify: Callable[[JobKey, bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`notify(key, urgent)` is called for each poll and report; urgent if it may change a decision."""
        self._clock = clock
        self._metrics = metrics
        self._notify = notify
        self._registry_by_uid: dict[str, AgentRegistry] = {}
        self._authenticator = Authenticator(cache, tokens, self.registry)
        self._body_budget = ByteBudget(BODY_BYTES_IN_FLIGHT)
        self._all_workers = 0
        self._counted_at = float("-inf")
        self._notifying: set[JobKey] = set()
        """Jobs with an urgent notification that is delayed."""
        self._notified_at: dict[JobKey, float] = {}
        self._replies: dict[tuple[int, int | None, int | None, float, float | None, str | None], EncodedMessage] = {}
        self._trust = encode(TrustBundle(certificates=""))
        self._trust_id: str | None = None

    @property
    def synced(self) -> bool:
        """Whether the cache contains all jobs, so that a job that is not in it does not exist."""
        return self._authenticator.synced

    @synced.setter
    def synced(self, synced: bool) -> None:
        self._authenticator.synced = synced

    def trust(self, bundle: str) -> None:
        """Set the CA bundle with which agents verify the coordinator; empty without TLS."""
        self._trust, self._trust_id = encode(TrustBundle(certificates=bundle)), bundle_id(bundle) or None
        self._replies.clear()

    def registry(self, uid: str) -> AgentRegistry:
        """The registry of the job with this uid."""
        registry = self._registry_by_uid.get(uid)
        if registry is None:
            registry = self._registry_by_uid[uid] = AgentRegistry(self._clock)
        return registry

    async def forget(self, uid: str) -> None:
        """Drop the registry of a deleted job. Its agents exit at their next request."""
        if (registry := self._registry_by_uid.pop(uid, None)) is not None:
            await registry.publish(None, {}, closed=True)

    def application(self) -> web.Application:
        """The web application."""
        application = web.Application()
        base = "/v1/jobs/{namespace}/{name}/{uid}"
        application.router.add_post(f"{base}/mesh", self._with_metrics("mesh", self._mesh))
        application.router.add_post(f"{base}/report", self._with_metrics("report", self._report))
        application.router.add_post(f"{base}/trust", self._with_metrics("trust", self._send_trust))
        return application

    def _with_metrics(self, endpoint: str, handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            code = 500
            try:
                response = await self._respond(endpoint, handler, request)
                code = response.status
                return response
            except asyncio.CancelledError:
                code = CLIENT_CLOSED_REQUEST
                raise
            except web.HTTPException as http_error:
                code = http_error.status
                raise
            finally:
                self._metrics.coordinator_requests.labels(endpoint, str(code)).inc()

        return handle

    async def _respond(self, endpoint: str, handler: Handler, request: web.Request) -> web.Response:
        """The handler's answer or error, signed with the job's token."""
        signed_request = self._authenticator.authenticate(endpoint, request)
        try:
            message = await handler(signed_request, request)
        except web.HTTPException as http_error:
            body = http_error.body if isinstance(http_error.body, bytes) else b""
            signed = self._authenticator.answer_headers(signed_request, http_error.status, digest_of(body))
            http_error.headers.update(signed)
            raise
        if message is None:
            headers = self._authenticator.answer_headers(signed_request, 204, digest_of(b""))
            return web.Response(status=204, headers=headers)
        headers = self._authenticator.answer_headers(signed_request, 200, message.digest)
        return web.Response(body=message.body, headers=headers, content_type="application/json")

    async def _mesh(self, signed_request: SignedRequest, request: web.Request) -> EncodedMessage | None:
        registry = signed_request.registry
        if registry.polls(signed_request.sender.worker) >= MAX_OPEN_POLLS:
            raise rate_limited(1.0)
        mesh_request = _parse(MeshRequest, signed_request, await self._read(signed_request, request))
        new = registry.is_new(mesh_request)
        with registry.polling(mesh_request):
            if new:
                self._notify_change(signed_request, registry)
            document = await registry.wait_for_newer(mesh_request)
        if document is not None:
            return document
        if registry.superseded(mesh_request):
            raise superseded_error()
        return None

    async def _report(self, signed_request: SignedRequest, request: web.Request) -> EncodedMessage:
        registry, head, key = signed_request.registry, signed_request.head, signed_request.key
        body = await self._read(signed_request, request)
        interval = self._report_seconds(registry, head.sender.worker)
        if registry.repeat_report(head.sender.worker, head.digest, interval):
            self._notify(key, False)
        else:
            report = _parse(WorkerReport, signed_request, body)
            if len(report.ranks) > signed_request.max_ranks:
                raise web.HTTPBadRequest(text=f"ranks: a worker of this job has at most {signed_request.max_ranks}")
            if registry.receive_report(report, head.digest, interval):
                self._notify_change(signed_request, registry)
                await registry.leave_with_failed(report)
            else:
                self._notify(key, False)
        times = registry.compute_times()
        median = None if times is None else float(f"{times.median:.3g}")
        worker = head.sender.worker
        asked, pause, leave = (
            registry.checkpoint_request_for(worker),
            registry.pause_for(worker),
            registry.leave_for(worker),
        )
        return self._reply(registry.generation, pause, leave, interval, median, asked)

    async def _send_trust(self, signed_request: SignedRequest, request: web.Request) -> EncodedMessage:
        # The headers contain everything that is needed, but the body must be the one that was signed.
        await self._read(signed_request, request)
        return self._trust

    def _notify_change(self, signed_request: SignedRequest, registry: AgentRegistry) -> None:
        """Have the job reconciled now, unless the worker's state changes so often that its pod must be broken."""
        if registry.rate_limiter.may_hurry(signed_request.sender.worker):
            self._notify_urgently(signed_request.key, registry)
        else:
            self._notify(signed_request.key, False)

    def _notify_urgently(self, key: JobKey, registry: AgentRegistry) -> None:
        """Have the job reconciled now; in a large job, once for all agents that report at the same time."""
        spacing = urgent_spacing(registry.workers)
        if spacing == 0.0:
            self._notify(key, True)
        elif key not in self._notifying:
            wait = max(0.0, self._notified_at.get(key, float("-inf")) + spacing - self._clock())
            self._notifying.add(key)
            asyncio.get_running_loop().call_later(wait, self._notify_now, key)

    def _notify_now(self, key: JobKey) -> None:
        self._notifying.discard(key)
        if len(self._notified_at) >= MAX_NOTIFIED:
            self._notified_at.clear()
        self._notified_at[key] = self._clock()
        self._notify(key, True)

    async def _read(self, signed_request: SignedRequest, request: web.Request) -> bytes:
        """The body, which must be the one that was signed."""
        length, budgets = signed_request.head.length, (signed_request.registry.body_budget, self._body_budget)
        if any(budget.left < length for budget in budgets):
            raise web.HTTPServiceUnavailable(text="too many bodies at once", headers={"Retry-After": "1"})
        for budget in budgets:
            budget.take(length)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"request body not received within {BODY_SECONDS:g} s") from None
        finally:
            for budget in budgets:
                budget.give_back(length)
        if not signed_request.head.matches(body):
            raise web.HTTPUnauthorized(text="the body is not the one that was signed")
        return body

    def _report_seconds(self, registry: AgentRegistry, worker: int) -> float:
        """The time until this agent's next report."""
        now = self._clock()
        if now - self._counted_at >= COUNT_WORKERS_SECONDS:
            self._counted_at = now
            self._all_workers = sum(other.workers for other in self._registry_by_uid.values())
        return report_seconds(0 if registry.reports_progress(worker) else registry.workers, self._all_workers)

    def _reply(
        self,
        generation: int,
        pause: int | None,
        leave: int | None,
        interval: float,
        median: float | None,
        checkpoint_request: str | None,
    ) -> EncodedMessage:
        """The answer to a report. Few differ."""
        key = generation, pause, leave, interval, median, checkpoint_request
        reply = self._replies.get(key)
        if reply is None:
            if len(self._replies) >= MAX_REPLIES:
                self._replies.clear()
            message = ReportReply(
                generation=generation,
                report_seconds=interval,
                pause=pause,
                leave=leave,
                checkpoint_request=checkpoint_request,
                median_compute_seconds=median,
                trust=self._trust_id,
            )
            reply = self._replies[key] = encode(message)
        return reply


def _parse(kind: type[Message], signed_request: SignedRequest, body: bytes) -> Message:
    """The message, if it is about the pod that signed it."""
    try:
        message = kind.model_validate_json(body)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise web.HTTPBadRequest(text=problems[:MAX_PROBLEM_CHARACTERS]) from None
    if Sender(message.worker, message.incarnation, message.pod_uid) != signed_request.sender:
        raise web.HTTPBadRequest(text=f"the message must be about its sender, {signed_request.sender}")
    return message
