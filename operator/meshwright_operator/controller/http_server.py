"""HTTP servers: serves an application on an address, and defines the application for health and metrics."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from aiohttp import web

from meshwright_operator.http.limits import ConnectionLimits, connections_for_descriptors
from meshwright_operator.http.server import GuardedServer, ListenError, listening_sockets
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.settings import Address


@asynccontextmanager
async def serve_application(
    application: web.Application,
    address: Address,
    *,
    limits: ConnectionLimits | None = None,
    closed: Callable[[str], None] = lambda _: None,
    tls: ssl.SSLContext | None = None,
    flag: str = "",
) -> AsyncIterator[int]:
    """Serves until the block ends, and yields the port in use.

    A handler is cancelled when its client disconnects, so that a long poll never outlives its agent. The connection is
    closed after each request that the handler did not accept with `http.server.verify`.

    Args:
        application: The application.
        address: The address to listen on.
        limits: The limits of connections.
        closed: Called with the reason for each connection that the server refuses or closes.
        tls: The server's certificate; None serves plain HTTP.
        flag: The option that sets the address, for the message of an error.

    Raises:
        ListenError: The address cannot be used.
    """
    limits = limits or ConnectionLimits()
    limits = replace(limits, total=connections_for_descriptors(limits.total))
    try:
        listeners = listening_sockets(address.host, address.port)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else error.strerror or str(error)
        raise ListenError(
            f"cannot listen on {address.host or '*'}:{address.port} ({flag}): {reason}: stop the process that uses it, "
            f"or set {flag} to another address"
        ) from None
    async with GuardedServer(application, limits, closed, tls).serve(listeners):
        yield listeners[0].getsockname()[1]


def health_application(
    metrics: OperatorMetrics, healthy: Callable[[], bool], not_ready: Callable[[], str]
) -> web.Application:
    """Serves /metrics, /healthz and /readyz.

    The process is healthy while it makes progress, however slow the API server is. It is ready if its cache is up to
    date: it listed everything within the last three resync periods, and its watches are live. Whether it leads does not
    matter, so that a rolling update does not wait for the lease; a replica that does not lead turns agents away.

    Args:
        metrics: The metrics to serve.
        healthy: Whether the process is healthy.
        not_ready: Returns why the process is not ready; an empty string if it is.
    """

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=await metrics.scrape(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok") if healthy() else web.Response(status=503, text="no progress while listing")

    async def readyz(_: web.Request) -> web.Response:
        reason = not_ready()
        return web.Response(status=503, text=reason) if reason else web.Response(text="ok")

    application = web.Application()
    application.router.add_get("/metrics", exposition)
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/readyz", readyz)
    return application
