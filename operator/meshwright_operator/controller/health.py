"""/metrics, /healthz and /readyz of the operator.

Healthy: it waits to lead, or the last three resync periods saw a full listing. Ready: it leads, has listed everything,
answers agents and its watches live, so that a service sends agents to the leader alone.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from meshwright_operator.metrics.operator_metrics import OperatorMetrics


def health_application(
    metrics: OperatorMetrics, healthy: Callable[[], bool], not_ready: Callable[[], str]
) -> web.Application:
    """The web application; `not_ready` says why the operator is not ready, or nothing when it is."""

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok") if healthy() else web.Response(status=503, text="no full listing for too long")

    async def readyz(_: web.Request) -> web.Response:
        reason = not_ready()
        return web.Response(status=503, text=reason) if reason else web.Response(text="ok")

    application = web.Application()
    application.router.add_get("/metrics", exposition)
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/readyz", readyz)
    return application
