"""The coordinator's HTTP endpoints (the protocol is documented in `meshwright.protocol.messages`).

The coordinator limits the size of a body and the time to read it, and checks the signature before it parses the body.
It signs every answer to a request with a valid signature. It responds with 410, after which an agent exits, only after
a reconcile has published the job's state. Until then, agents wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import ceil
from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from meshwright.protocol import signing
from meshwright.protocol.messages import (
    PROTOCOL_VERSION,
    VERSION_HEADER,
    MeshRequest,
    ReportReply,
    TrustBundle,
    TrustRequest,
    WorkerReport,
)
from meshwright.protocol.trust import bundle_id
from meshwright_operator.coordinator.agent_registry import AgentRegistry, encode
from meshwright_operator.coordinator.rate_limit import MAX_OPEN_POLLS
from meshwright_operator.coordinator.tokens import Tokens
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.metrics.operator_metrics import OperatorMetrics

MAX_BODY_BYTES = 256 << 10
BODY_SECONDS = 10.0
CLIENT_CLOSED_REQUEST = 499
"""Code in metrics if the client disconnected before the answer."""

Message = TypeVar("Message", MeshRequest, WorkerReport, TrustRequest)


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """A request that is signed with the job's token."""

    endpoint: str
    key: JobKey
    registry: AgentRegistry
    token: str = field(repr=False)
    signature: str
    date: int
    body: bytes

    def sign_response(self, status: int, body: object) -> dict[str, str]:
        """The headers with the signature of an answer."""
        return signing.answer_headers(self.token, self.signature, status, body if isinstance(body, bytes) else b"")


Handler = Callable[[SignedRequest], Awaitable[bytes | None]]


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
        self._cache = cache
        self._tokens = tokens
        self._metrics = metrics
        self._notify = notify
        self._registry_by_uid: dict[str, AgentRegistry] = {}
        self.synced = False
        """Whether the cache contains all jobs, so that a job that is not in it does not exist."""
        self._trust = TrustBundle(certificates="")
        self._trust_id: str | None = None

    def trust(self, bundle: str) -> None:
        """Set the CA bundle with which agents verify the coordinator; empty without TLS."""
        self._trust, self._trust_id = TrustBundle(certificates=bundle), bundle_id(bundle) or None

    def registry(self, uid: str) -> AgentRegistry:
        """The registry of the job with this uid."""
        return self._registry_by_uid.setdefault(uid, AgentRegistry(self._clock))

    async def forget(self, uid: str) -> None:
        """Drop the registry of a deleted job. Its agents exit at their next request."""
        if (registry := self._registry_by_uid.pop(uid, None)) is not None:
            await registry.publish(None, {}, closed=True)

    def application(self) -> web.Application:
        """The web application."""
        application = web.Application(client_max_size=MAX_BODY_BYTES)
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
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"request body not received within {BODY_SECONDS:g} s") from None
        signed_request = self._authenticate(endpoint, request, body)
        try:
            payload = await handler(signed_request)
        except web.HTTPException as http_error:
            http_error.headers.update(signed_request.sign_response(http_error.status, http_error.body))
            raise
        if payload is None:
            return web.Response(status=204, headers=signed_request.sign_response(204, b""))
        return web.Response(
            body=payload, headers=signed_request.sign_response(200, payload), content_type="application/json"
        )

    async def _mesh(self, signed_request: SignedRequest) -> bytes | None:
        mesh_request = self._checked_message(signed_request, MeshRequest)
        registry = signed_request.registry
        if registry.polls(mesh_request.worker) >= MAX_OPEN_POLLS:
            raise _rate_limited(1.0)
        with registry.polling(mesh_request):
            self._notify(signed_request.key, True)
            document = await registry.wait_for_newer(mesh_request)
        if document is not None:
            return document
        if registry.superseded(mesh_request):
            raise _superseded_error()
        return None

    async def _report(self, signed_request: SignedRequest) -> bytes:
        report = self._checked_message(signed_request, WorkerReport)
        self._notify(signed_request.key, signed_request.registry.receive_report(report))
        return encode(ReportReply(generation=signed_request.registry.generation, trust=self._trust_id))

    async def _send_trust(self, signed_request: SignedRequest) -> bytes:
        self._checked_message(signed_request, TrustRequest)
        return encode(self._trust)

    def _checked_message(self, signed_request: SignedRequest, kind: type[Message]) -> Message:
        """The message, if its sender is a current pod of the job, is within its rate limit, and does not replay it."""
        message = _parse(kind, signed_request.body)
        registry, worker, incarnation = signed_request.registry, message.worker, message.incarnation
        if registry.superseded(message):
            raise _superseded_error()
        if (seconds := registry.rate_limiter.delay_for(worker)) > 0:
            raise _rate_limited(seconds)
        if not registry.rate_limiter.is_newer(signed_request.endpoint, worker, incarnation, signed_request.date):
            raise web.HTTPConflict(text="this request, or a later one of the same pod, was received before")
        return message

    def _authenticate(self, endpoint: str, request: web.Request, body: bytes) -> SignedRequest:
        namespace, name, uid = (request.match_info[part] for part in ("namespace", "name", "uid"))
        token = self._tokens.token(namespace, name, uid)
        path = f"/v1/jobs/{namespace}/{name}/{uid}/{endpoint}"
        try:
            date, signature = signing.check_request(token, request.method, path, request.headers, body)
        except signing.ClockError as error:
            # Signed, because the agent adopts this clock and must trust it.
            raise _signed_error(web.HTTPUnauthorized(text=str(error)), token, request) from None
        except signing.SignatureError as error:
            raise web.HTTPUnauthorized(text=f"not signed with this job's token: {error}") from None
        version = request.headers.get(VERSION_HEADER, "1")
        if version != str(PROTOCOL_VERSION):
            text = f"protocol version must be {PROTOCOL_VERSION}, got {version[:16]!r}"
            raise web.HTTPUpgradeRequired(text=f"{text}: use a worker image of the operator's release")
        if not self.synced:
            raise web.HTTPServiceUnavailable(text="starting", headers={"Retry-After": "1"})
        key = JobKey(namespace, name)
        job = self._cache.jobs.get(key)
        if job is None or job["metadata"].get("uid") != uid:
            raise web.HTTPNotFound(text="job not found")
        return SignedRequest(endpoint, key, self.registry(uid), token, signature, date, body)


def _signed_error(http_error: web.HTTPException, token: str, request: web.Request) -> web.HTTPException:
    signature = request.headers[signing.AUTHORIZATION].partition(" ")[2].strip()
    body = http_error.body if isinstance(http_error.body, bytes) else b""
    http_error.headers.update(signing.answer_headers(token, signature, http_error.status, body))
    return http_error


def _rate_limited(seconds: float) -> web.HTTPTooManyRequests:
    return web.HTTPTooManyRequests(
        text="too many requests from this worker", headers={"Retry-After": str(ceil(seconds))}
    )


def _superseded_error() -> web.HTTPGone:
    return web.HTTPGone(text="superseded: a newer incarnation of this worker exists, or the job needs no pods")


def _parse(kind: type[Message], body: bytes) -> Message:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise web.HTTPBadRequest(text=problems) from None
