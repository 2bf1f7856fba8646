"""The coordinator's HTTP endpoints (the protocol is documented in `meshwright.protocol`).

The token is checked before anything else is looked at, a body is bounded, and an agent is told to go (410) only by what
a reconcile has published: a coordinator that has just started makes everyone wait instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from meshwright.protocol import MeshRequest, ReportReply, WorkerReport
from meshwright_operator.cache import Cache, JobKey
from meshwright_operator.coordinator.board import Board
from meshwright_operator.metrics import OperatorMetrics
from meshwright_operator.tokens import Tokens

MAX_BODY_BYTES = 256 << 10
HUNG_UP = 499
"""In the metrics, for a client that went away before it was answered."""

Message = TypeVar("Message", bound=BaseModel)

log = logging.getLogger(__name__)


class Coordinator:
    """The boards of all jobs, and the endpoints that agents use."""

    def __init__(
        self, cache: Cache, tokens: Tokens, metrics: OperatorMetrics, notify: Callable[[JobKey, bool], None]
    ) -> None:
        """`notify(key, urgent)` is called when an agent told something; urgent when a decision may depend on it."""
        self._cache = cache
        self._tokens = tokens
        self._metrics = metrics
        self._notify = notify
        self._boards: dict[str, Board] = {}
        self.synced = False
        """Whether the cache holds every job, so that a job that is not in it does not exist."""

    def board(self, uid: str) -> Board:
        """The board of the job with this uid."""
        return self._boards.setdefault(uid, Board())

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

    def _counted(
        self, endpoint: str, handler: Callable[[web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def counting(request: web.Request) -> web.Response:
            code = 500
            try:
                response = await handler(request)
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

    async def _mesh(self, request: web.Request) -> web.Response:
        key, board = self._authorise(request)
        hello = await _body(request, MeshRequest)
        if board.superseded(hello.worker, hello.incarnation):
            raise _gone()
        with board.polling(hello):
            self._notify(key, True)
            document = await board.newer(hello)
        if document is not None:
            return web.json_response(document.wire())
        if board.superseded(hello.worker, hello.incarnation):
            raise _gone()
        return web.Response(status=204)

    async def _report(self, request: web.Request) -> web.Response:
        key, board = self._authorise(request)
        report = await _body(request, WorkerReport)
        if board.superseded(report.worker, report.incarnation):
            raise _gone()
        self._notify(key, board.hear(report))
        return web.json_response(ReportReply(generation=board.generation).wire())

    def _authorise(self, request: web.Request) -> tuple[JobKey, Board]:
        namespace, name, uid = (request.match_info[part] for part in ("namespace", "name", "uid"))
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not self._tokens.valid(token, namespace, name, uid):
            raise web.HTTPUnauthorized(text="no or wrong token for this job")
        if not self.synced:
            raise web.HTTPServiceUnavailable(text="starting", headers={"Retry-After": "1"})
        key = JobKey(namespace, name)
        job = self._cache.jobs.get(key)
        if job is None or job["metadata"].get("uid") != uid:
            raise web.HTTPNotFound(text="no such job")
        return key, self.board(uid)


def _gone() -> web.HTTPGone:
    return web.HTTPGone(text="superseded: a newer incarnation of this worker exists, or the job wants no pods")


async def _body(request: web.Request, kind: type[Message]) -> Message:
    try:
        return kind.model_validate_json(await request.read())
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise web.HTTPBadRequest(text=problems) from None
