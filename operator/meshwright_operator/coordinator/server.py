"""The coordinator's HTTP endpoints (the protocol is documented in `meshwright.protocol`).

The signature is checked before anything else is looked at, a body is bounded in size and time, and every answer to a
genuine request is signed. An agent is told to go (410) only by what a reconcile has published: a coordinator that has
just started makes everyone wait instead.
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

from meshwright import signing
from meshwright.protocol import PROTOCOL_VERSION, VERSION_HEADER, MeshRequest, ReportReply, WorkerReport
from meshwright_operator.cache import Cache, JobKey
from meshwright_operator.coordinator.board import Board, encode
from meshwright_operator.coordinator.limits import LARGEST_POLLS
from meshwright_operator.metrics import OperatorMetrics
from meshwright_operator.tokens import Tokens

MAX_BODY_BYTES = 256 << 10
BODY_SECONDS = 10.0
HUNG_UP = 499
"""In the metrics, for a client that went away before it was answered."""

Message = TypeVar("Message", MeshRequest, WorkerReport)


@dataclass(frozen=True, slots=True)
class Caller:
    """A request whose sender holds the job's token."""

    endpoint: str
    key: JobKey
    board: Board
    token: str = field(repr=False)
    signature: str
    date: int
    body: bytes

    def seal(self, status: int, body: object) -> dict[str, str]:
        """The headers that make an answer genuine."""
        return signing.answer_headers(self.token, self.signature, status, body if isinstance(body, bytes) else b"")


Handler = Callable[[Caller], Awaitable[bytes | None]]


class Coordinator:
    """The boards of all jobs, and the endpoints that agents use."""

    def __init__(
        self,
        cache: Cache,
        tokens: Tokens,
        metrics: OperatorMetrics,
        notify: Callable[[JobKey, bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`notify(key, urgent)` is called when an agent told something; urgent when a decision may depend on it."""
        self._clock = clock
        self._cache = cache
        self._tokens = tokens
        self._metrics = metrics
        self._notify = notify
        self._boards: dict[str, Board] = {}
        self.synced = False
        """Whether the cache holds every job, so that a job that is not in it does not exist."""

    def board(self, uid: str) -> Board:
        """The board of the job with this uid."""
        return self._boards.setdefault(uid, Board(self._clock))

    async def forget(self, uid: str) -> None:
        """Drops the board of a job that is gone; its agents are told to go."""
        if (board := self._boards.pop(uid, None)) is not None:
            await board.publish(None, {}, closed=True)

    def known(self) -> list[str]:
        """The uids of jobs with a board."""
        return list(self._boards)

    def application(self) -> web.Application:
        """The web application."""
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        base = "/v1/jobs/{namespace}/{name}/{uid}"
        application.router.add_post(f"{base}/mesh", self._counted("mesh", self._mesh))
        application.router.add_post(f"{base}/report", self._counted("report", self._report))
        return application

    def _counted(self, endpoint: str, handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def counting(request: web.Request) -> web.Response:
            code = 500
            try:
                response = await self._answered(endpoint, handler, request)
                code = response.status
                return response
            except asyncio.CancelledError:
                code = HUNG_UP
                raise
            except web.HTTPException as refusal:
                code = refusal.status
                raise
            finally:
                self._metrics.coordinator_requests.labels(endpoint, str(code)).inc()

        return counting

    async def _answered(self, endpoint: str, handler: Handler, request: web.Request) -> web.Response:
        """The handler's answer, or its refusal, signed for the one who asked."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"the body did not arrive within {BODY_SECONDS:g} s") from None
        caller = self._authorise(endpoint, request, body)
        try:
            answer = await handler(caller)
        except web.HTTPException as refusal:
            refusal.headers.update(caller.seal(refusal.status, refusal.body))
            raise
        if answer is None:
            return web.Response(status=204, headers=caller.seal(204, b""))
        return web.Response(body=answer, headers=caller.seal(200, answer), content_type="application/json")

    async def _mesh(self, caller: Caller) -> bytes | None:
        hello = self._admitted(caller, MeshRequest)
        board = caller.board
        if board.polls(hello.worker) >= LARGEST_POLLS:
            raise _too_many(1.0)
        with board.polling(hello):
            self._notify(caller.key, True)
            document = await board.newer(hello)
        if document is not None:
            return document
        if board.superseded(hello):
            raise _gone()
        return None

    async def _report(self, caller: Caller) -> bytes:
        report = self._admitted(caller, WorkerReport)
        self._notify(caller.key, caller.board.hear(report))
        return encode(ReportReply(generation=caller.board.generation))

    def _admitted(self, caller: Caller, kind: type[Message]) -> Message:
        """The message, if its sender is one of the job's pods, asks not too often, and says it for the first time."""
        message = _parse(kind, caller.body)
        board, worker, incarnation = caller.board, message.worker, message.incarnation
        if board.superseded(message):
            raise _gone()
        if (seconds := board.limits.wait(worker)) > 0:
            raise _too_many(seconds)
        if not board.limits.is_new(caller.endpoint, worker, incarnation, caller.date):
            raise web.HTTPConflict(text="this request, or a later one of the same pod, was made before")
        return message

    def _authorise(self, endpoint: str, request: web.Request, body: bytes) -> Caller:
        namespace, name, uid = (request.match_info[part] for part in ("namespace", "name", "uid"))
        token = self._tokens.token(namespace, name, uid)
        path = f"/v1/jobs/{namespace}/{name}/{uid}/{endpoint}"
        try:
            date, signature = signing.check_request(token, request.method, path, request.headers, body)
        except signing.ClockError as error:
            # Signed: an agent follows this clock, and must know whose it is.
            raise _sealed(web.HTTPUnauthorized(text=str(error)), token, request) from None
        except signing.SignatureError as error:
            raise web.HTTPUnauthorized(text=f"not signed with this job's token: {error}") from None
        version = request.headers.get(VERSION_HEADER, "1")
        if version != str(PROTOCOL_VERSION):
            text = f"this coordinator speaks version {PROTOCOL_VERSION} of the protocol, the agent {version[:16]!r}"
            raise web.HTTPUpgradeRequired(text=f"{text}: use a worker image of the operator's release")
        if not self.synced:
            raise web.HTTPServiceUnavailable(text="starting", headers={"Retry-After": "1"})
        key = JobKey(namespace, name)
        job = self._cache.jobs.get(key)
        if job is None or job["metadata"].get("uid") != uid:
            raise web.HTTPNotFound(text="no such job")
        return Caller(endpoint, key, self.board(uid), token, signature, date, body)


def _sealed(refusal: web.HTTPException, token: str, request: web.Request) -> web.HTTPException:
    signature = request.headers[signing.AUTHORIZATION].partition(" ")[2].strip()
    body = refusal.body if isinstance(refusal.body, bytes) else b""
    refusal.headers.update(signing.answer_headers(token, signature, refusal.status, body))
    return refusal


def _too_many(seconds: float) -> web.HTTPTooManyRequests:
    return web.HTTPTooManyRequests(text="too many requests of this worker", headers={"Retry-After": str(ceil(seconds))})


def _gone() -> web.HTTPGone:
    return web.HTTPGone(text="superseded: a newer incarnation of this worker exists, or the job wants no pods")


def _parse(kind: type[Message], body: bytes) -> Message:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise web.HTTPBadRequest(text=problems) from None
