"""Lets agents' requests pass only in the process that leads.

Every replica listens for agents, because the Service selects all of them. A replica that does not lead answers 503 and
closes the connection, so that the agent's next request opens another one, which may reach the leader. When the leader
hands over, its open polls get the same answer: no poll is cut, and the agent polls the next leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

RETRY_AFTER_SECONDS = 1
POLL_SUFFIX = "/mesh"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LeadershipGate:
    """Closed until `open`, and again after `close`."""

    def __init__(self) -> None:
        self._is_open = False
        self._closed = asyncio.Event()

    def open(self) -> None:
        """Let requests pass: this process leads."""
        self._is_open = True
        self._closed.clear()

    def close(self) -> None:
        """Answer open polls and all further requests with 503."""
        self._is_open = False
        self._closed.set()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Pass the request to its handler while the gate is open."""
        if not self._is_open:
            return _unavailable()
        if not request.path.endswith(POLL_SUFFIX):
            return await handler(request)
        answer = asyncio.ensure_future(handler(request))
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({answer, closed}, return_when=asyncio.FIRST_COMPLETED)
            # An answer that is ready is delivered even if the gate closes at the same time.
            return answer.result() if answer.done() else _unavailable()
        finally:
            answer.cancel()
            closed.cancel()


def _unavailable() -> web.Response:
    response = web.Response(
        status=503, text="this replica does not lead", headers={"Retry-After": str(RETRY_AFTER_SECONDS)}
    )
    response.force_close()
    return response
