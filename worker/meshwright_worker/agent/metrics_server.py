"""Serves /metrics for Prometheus, /timeline for reports and /healthz for probes, on the pod's address.

Any pod of the cluster can connect. Connections take memory and descriptors of the agent, so their number and their
duration are bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from meshwright.addresses import join_host_port
from meshwright.metrics.exporter import CONTENT_TYPE
from meshwright_worker.agent.metrics import WorkerMetrics

MAX_CONNECTIONS = 32
"""Open connections. When there are more, the oldest one is closed: a scrape takes milliseconds."""
CONNECTION_SECONDS = 120.0
"""Time after which a connection is closed, whatever it does. Prometheus connects again."""
FLUSH_SECONDS = 10.0
"""The last part of this time, in which an answer that is being sent can be completed."""

log = logging.getLogger(__name__)


class _Connections:
    """The open connections, the oldest first."""

    def __init__(self) -> None:
        self._open: OrderedDict[_Connection, None] = OrderedDict()

    def add(self, connection: _Connection) -> None:
        self._open[connection] = None
        while len(self._open) > MAX_CONNECTIONS:
            self._open.popitem(last=False)[0].abort()

    def discard(self, connection: _Connection) -> None:
        self._open.pop(connection, None)


class _Connection(asyncio.Protocol):
    """Passes everything on to aiohttp's protocol, and closes the connection in time."""

    def __init__(self, inner: asyncio.Protocol, connections: _Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._timers: list[asyncio.TimerHandle] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        later = asyncio.get_running_loop().call_later
        closing = max(CONNECTION_SECONDS - FLUSH_SECONDS, CONNECTION_SECONDS / 2)
        self._timers = [later(closing, transport.close), later(CONNECTION_SECONDS, transport.abort)]
        self._inner.connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers:
            timer.cancel()
        self._connections.discard(self)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def abort(self) -> None:
        """Close the connection without sending what is left."""
        if self._transport is not None:
            self._transport.abort()


class MetricsServer:
    """A running server."""

    def __init__(self, runner: web.AppRunner, server: asyncio.Server) -> None:
        self._runner = runner
        self._server = server

    @property
    def addresses(self) -> list[Any]:
        """The addresses on which it listens."""
        return [listener.getsockname() for listener in self._server.sockets]

    async def cleanup(self) -> None:
        """Stop, and close all connections."""
        self._server.close()
        await self._runner.cleanup()


async def start_metrics_server(metrics: WorkerMetrics, address: str, port: int) -> MetricsServer | None:
    """Serve until the returned server is cleaned up. Return None if the port is in use: metrics never stop training."""

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()

    async def timeline(_: web.Request) -> web.Response:
        ranks = {str(rank): asdict(one) for rank, one in metrics.timelines.items()}
        return web.json_response({"ranks": ranks})

    app.add_routes([web.get("/metrics", scrape), web.get("/timeline", timeline), web.get("/healthz", health)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    serve: Callable[[], asyncio.Protocol] | None = runner.server
    assert serve is not None
    connections = _Connections()
    try:
        server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(serve(), connections), address, port
        )
    except OSError as error:
        log.warning("cannot serve metrics on %s: %s", join_host_port(address, port), error.strerror)
        await runner.cleanup()
        return None
    return MetricsServer(runner, server)
