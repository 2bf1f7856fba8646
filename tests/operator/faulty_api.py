"""A proxy before the API server that breaks what passes, as a seed says: what an operator meets over months."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from enum import StrEnum

import aiohttp
from aiohttp import web

from tests.operator.proxy import Proxy, Request

SHARE = 0.15
"""The share of the requests that meet a fault."""
SLOW_SECONDS = 1.5


class Fault(StrEnum):
    """What may happen to a request."""

    DROPPED = "dropped"
    """The connection breaks before the server sees the request."""
    ANSWER_LOST = "answer lost"
    """The server has done what was asked, and nobody hears of it."""
    CONFLICT = "409"
    """Another writer came first."""
    EXPIRED = "410"
    """The resourceVersion of a watch, or the continue token of a list, is too old."""
    THROTTLED = "429"
    """Too many requests, with Retry-After."""
    BROKEN = "5xx"
    HALF_OPEN = "half-open"
    """A watch that stays connected, and through which nothing comes."""
    SLOW = "slow"
    """The answer takes its time."""


STATUS = {Fault.CONFLICT: (409, "Conflict"), Fault.EXPIRED: (410, "Expired"), Fault.THROTTLED: (429, "TooManyRequests")}


class FaultyProxy(Proxy):
    """Forwards most requests, and breaks the others until `heal`."""

    def __init__(self, target: str, session: aiohttp.ClientSession, seed: int) -> None:
        super().__init__(target, session)
        self._random = random.Random(seed)
        self._healthy = True
        self.faults: Counter[Fault] = Counter()
        """How often each happened."""

    def harm(self) -> None:
        """From now on requests break."""
        self._healthy = False

    def heal(self) -> None:
        """From now on all requests pass, and half-open watches end."""
        self._healthy = True
        self.break_watches()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        fault = self._drawn(request)
        if fault is None:
            return await super()._forward(request)
        self.faults[fault] += 1
        if fault is Fault.SLOW:
            await asyncio.sleep(self._random.uniform(0.0, SLOW_SECONDS))
            return await super()._forward(request)
        if fault is Fault.HALF_OPEN:
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.Event().wait()
        self.requests.append(Request(request.method, request.path))
        if fault is Fault.DROPPED:
            return _cut(request)
        if fault is Fault.ANSWER_LOST:
            await self._done(request)
            return _cut(request)
        code, reason = STATUS.get(fault) or (self._random.choice((500, 502, 503, 504)), "InternalError")
        headers = {"Retry-After": "1"} if fault is Fault.THROTTLED else {}
        status = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": f"injected {fault}"}
        return web.Response(status=code, headers=headers, body=json.dumps(status), content_type="application/json")

    def _drawn(self, request: web.Request) -> Fault | None:
        """The fault that this request meets, of those that the server itself could produce."""
        if self._healthy or self._random.random() > SHARE:
            return None
        possible = [Fault.DROPPED, Fault.THROTTLED, Fault.BROKEN, Fault.SLOW]
        if request.query.get("watch") == "true":
            possible += [Fault.EXPIRED, Fault.HALF_OPEN]
        elif request.method == "GET":
            possible += [Fault.EXPIRED] if request.query.get("continue") else []
        else:
            possible += [Fault.ANSWER_LOST]
            possible += [Fault.CONFLICT] if request.method in ("PATCH", "PUT") else []
        return self._random.choice(possible)

    async def _done(self, request: web.Request) -> None:
        """The server does what was asked."""
        headers = {k: v for k, v in request.headers.items() if k.lower() in ("authorization", "content-type")}
        async with self._session.request(
            request.method,
            self._target + request.path_qs,
            data=await request.read() or None,
            headers=headers,
            ssl=False,
        ) as answer:
            await answer.read()


def _cut(request: web.Request) -> web.Response:
    """The connection breaks."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
