"""HTTP of the operator: serving an application on an address, and the application of health and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from meshwright_operator.metrics.operator_metrics import OperatorMetrics
from meshwright_operator.settings import Address


@asynccontextmanager
async def serve_application(application: web.Application, address: Address) -> AsyncIterator[int]:
    """Serves until the block ends; gives the port in use.

    A handler whose client went away is cancelled, so that a long poll never outlives its agent.
    """
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, address.host or None, address.port, reuse_address=True)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def health_application(
    metrics: OperatorMetrics, healthy: Callable[[], bool], not_ready: Callable[[], str]
) -> web.Application:
    """/metrics, /healthz and /readyz of the operator; `not_ready` says why it is not ready, or nothing when it is.

    Healthy: it waits to lead, or the last three resync periods saw a full listing. Ready: it leads, has listed
    everything, answers agents and its watches live, so that a service sends agents to the leader alone.
    """

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
