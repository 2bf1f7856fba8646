"""/metrics, /healthz and /readyz of the operator.

Healthy: it waits to lead, or the last three resync periods saw a full listing. Ready: it leads, has listed everything
and answers agents, so that a service sends them to the leader alone.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from meshwright_operator.metrics import OperatorMetrics


def health_application(
    metrics: OperatorMetrics, healthy: Callable[[], bool], ready: Callable[[], bool]
) -> web.Application:
    """The web application."""

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok") if healthy() else web.Response(status=503, text="no full listing for too long")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok") if ready() else web.Response(status=503, text="not leading yet")

    application = web.Application()
    application.router.add_get("/metrics", exposition)
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/readyz", readyz)
    return application
