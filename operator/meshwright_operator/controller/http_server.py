"""HTTP servers: serves an application on an address, and defines the application for health and metrics."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from meshwright_operator.coordinator.tls_connection import with_tls
from meshwright_operator.metrics.operator_metrics import OperatorMetrics
from meshwright_operator.settings import Address


@asynccontextmanager
async def serve_application(
    application: web.Application, address: Address, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serves until the block ends, over TLS if there is a context, and yields the port in use.

    A handler is cancelled when its client disconnects, so that a long poll never outlives its agent.
    """
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    assert runner.server is not None
    try:
        server = await asyncio.get_running_loop().create_server(
            with_tls(runner.server, tls), address.host or None, address.port, reuse_address=True
        )
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
    finally:
        await runner.cleanup()


def health_application(
    metrics: OperatorMetrics, healthy: Callable[[], bool], not_ready: Callable[[], str]
) -> web.Application:
    """Serves /metrics, /healthz and /readyz.

    The process is healthy if it waits for the lease, or if it listed everything within the last three resync periods.
    It is ready if it leads, has listed everything, serves agents, and its watches are live. So a Service sends agents
    only to the leader.

    Args:
        metrics: The metrics to serve.
        healthy: Whether the process is healthy.
        not_ready: Returns why the process is not ready; an empty string if it is.
    """

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def healthz(_: web.Request) -> web.Response:
        return (
            web.Response(text="ok") if healthy() else web.Response(status=503, text="the last full listing is too old")
        )

    async def readyz(_: web.Request) -> web.Response:
        reason = not_ready()
        return web.Response(status=503, text=reason) if reason else web.Response(text="ok")

    application = web.Application()
    application.router.add_get("/metrics", exposition)
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/readyz", readyz)
    return application
