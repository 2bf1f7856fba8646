"""Lets agents' requests pass only in the process that leads.

Every replica listens for agents, because the Service selects all of them. A replica that does not lead answers 503 and
closes the connection, so that the agent's next request opens another one, which may reach the leader. While another
replica leads, the answer asks for no delay: the agent tries again with its own backoff, which begins with 0.25 s.
When the leader hands over, its open polls get the same answer: no poll is cut, and the agent polls the next leader.

The Service cannot select the leader only. A pod on standby that is not ready would keep a rolling update from ending,
make the Deployment unavailable, and use up the PodDisruptionBudget. A label or an EndpointSlice of the leader needs
rights in the operator's namespace that nothing else needs. In an upgrade, and in a rollback, the Service would have no
endpoint until a pod that writes it leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

RETRY_AFTER_SECONDS = 1
POLL_SUFFIX = "/mesh"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LeadershipGate:
    """Closed until `open`, and again after `close`.

    Args:
        other_leads: Whether another replica leads, as far as this one knows.
    """

    def __init__(self, other_leads: Callable[[], bool] = lambda: False) -> None:
        self._other_leads = other_leads
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
            return self._unavailable()
        if not request.path.endswith(POLL_SUFFIX):
            return await handler(request)
        answer = asyncio.ensure_future(handler(request))
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({answer, closed}, return_when=asyncio.FIRST_COMPLETED)
            # An answer that is ready is delivered even if the gate closes at the same time.
            return answer.result() if answer.done() else self._unavailable()
        finally:
            answer.cancel()
            closed.cancel()

    def _unavailable(self) -> web.Response:
        # Without a leader, thousands of agents must not ask again all the time.
        headers = {} if self._other_leads() else {"Retry-After": str(RETRY_AFTER_SECONDS)}
        response = web.Response(status=503, text="this replica does not lead", headers=headers)
        response.force_close()
        return response
