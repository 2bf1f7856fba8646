"""Serves an aiohttp application to clients that are not trusted.

The server accepts connections itself, because asyncio's own server accepts as many as come, knows no source addresses
before a TLS handshake and does not count connections whose handshake fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from meshwright_operator.http.admission import Admission
from meshwright_operator.http.connection import READ_BYTES, Connection, Phase
from meshwright_operator.http.limits import ConnectionLimits, TokenBucket
from meshwright_operator.http.tls_connection import TlsConnection

BACKLOG = 1024
ACCEPTED_AT_ONCE = 16
"""Connections that are accepted before the event loop does other work."""
REFUSED_AT_ONCE = 4
REFUSAL_PAUSE_SECONDS = 0.002
"""After this many refusals the server pauses, so that refusing connections takes at most a few percent of a core."""
EXHAUSTED_PAUSE_SECONDS = 1.0
SWEEP_SECONDS = 1.0
PARSER_BYTES = 8 << 10
"""How much of a body aiohttp buffers before it stops reading, halved."""
LINGER_SECONDS = 1.0
"""How long the rest of a body is received and dropped after the answer, so that the client can read the answer."""
MAX_LINE_BYTES = 4096
"""Longest request line, and longest header."""
ERROR_RECORDS_PER_SECOND = 0.1
ERROR_RECORDS_AT_ONCE = 10.0
"""Log records of requests that fail with an internal error."""
RESET_ON_CLOSE = struct.pack("ii", 1, 0)

log = logging.getLogger(__name__)


class _ClientErrors(logging.Filter):
    """Drops the records of malformed requests, and all but a few of the others: any client could fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._bucket = TokenBucket(ERROR_RECORDS_PER_SECOND, ERROR_RECORDS_AT_ONCE, time.monotonic())

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging."""
        error = record.exc_info[1] if record.exc_info else None
        # aiohttp fails with an error of its own on some headers, such as `Expect` with bytes that are not UTF-8.
        return not isinstance(error, HttpProcessingError) and self._bucket.take(time.monotonic()) == 0


_http_log = logging.getLogger("meshwright_operator.http.requests")
_http_log.addFilter(_ClientErrors())


def verify(request: web.Request, owner: Hashable) -> None:
    """Record that the request has a valid signature of this owner. Otherwise its connection is closed after it."""
    if (connection := _connection_of(request)) is not None:
        connection.verified(owner)


def tolerate(request: web.Request) -> None:
    """Keep the request's connection open, although the request is not accepted. Works once for each connection."""
    if (connection := _connection_of(request)) is not None and not connection.tolerated:
        connection.tolerated = connection.accepted = True


def _connection_of(request: web.Request) -> Connection | None:
    transport = request.transport
    protocol = transport.get_protocol() if isinstance(transport, asyncio.Transport) else None
    return protocol if isinstance(protocol, Connection) else None


class GuardedServer:
    """An application, the sockets that it listens on, and its connections."""

    def __init__(
        self,
        application: web.Application,
        limits: ConnectionLimits,
        closed: Callable[[str], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`closed(reason)` is called for each connection that the server refuses or closes."""
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._count_closed = closed
        self._tls = tls
        self.admission = Admission(limits, self._loop.time)
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._waiting: dict[Phase, dict[Connection, None]] = {Phase.HEAD: {}, Phase.IDLE: {}}
        """Connections with a deadline. Each phase has one time limit, so that the first is due first."""
        self._silent: dict[socket.socket, Connection] = {}
        """Connections whose client has sent nothing yet."""
        application.middlewares.append(_guard)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=0.5,
            logger=_http_log,
            auto_decompress=False,
            lingering_time=LINGER_SECONDS,
            read_bufsize=PARSER_BYTES,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
        )

    @asynccontextmanager
    async def serve(self, listeners: list[socket.socket]) -> AsyncIterator[None]:
        """Serve on these sockets, which are listening, until the block ends."""
        await self._runner.setup()
        tasks = [asyncio.create_task(self._accept(listener), name="accept") for listener in listeners]
        tasks.append(asyncio.create_task(self._sweep(), name="connection timeouts"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for listener in listeners:
                listener.close()
            for connection in list(self._silent.values()):
                connection.close("")
            await self._runner.cleanup()

    def phase_changed(self, connection: Connection) -> None:
        """Set the connection's deadline."""
        for waiting in self._waiting.values():
            waiting.pop(connection, None)
        if (waiting_now := self._waiting.get(connection.phase)) is not None:
            seconds = self._limits.head_seconds if connection.phase is Phase.HEAD else self._limits.idle_seconds
            connection.deadline = self._loop.time() + seconds
            waiting_now[connection] = None

    def verified(self, connection: Connection, owner: Hashable) -> None:
        """Count the connection for its owner, no longer for its source."""
        self.admission.verify(connection, owner)

    def closed(self, connection: Connection, reason: str) -> None:
        """Forget the connection."""
        for waiting in self._waiting.values():
            waiting.pop(connection, None)
        self.admission.remove(connection)
        if reason:
            self._count_closed(reason)

    async def _accept(self, listener: socket.socket) -> None:
        refused = accepted = 0
        while True:
            try:
                client, address = await self._loop.sock_accept(listener)
            except OSError as error:
                if error.errno != errno.ECONNABORTED:  # out of descriptors or memory
                    self._count_closed("exhausted")
                    await asyncio.sleep(EXHAUSTED_PAUSE_SECONDS)
                continue
            source = str(address[0]).removeprefix("::ffff:")
            if reason := self.admission.refusal(source):
                self._count_closed(reason)
                _reset(client)
                refused += 1
                if refused % REFUSED_AT_ONCE == 0:
                    await asyncio.sleep(REFUSAL_PAUSE_SECONDS)
            else:
                self._start(client, source)
                accepted += 1
                if accepted % ACCEPTED_AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _start(self, client: socket.socket, source: str) -> None:
        handler = self._runner.server
        assert handler is not None
        connection = Connection(self, source, self._limits.head_bytes, handler)
        self.admission.add(connection)
        self.phase_changed(connection)
        client.setblocking(False)
        connection.silent = lambda: self._stop_waiting(client)
        self._silent[client] = connection
        # A client that says nothing has no TLS connection, parser, task or timer: it costs a socket.
        self._loop.add_reader(client, self._begin, client, connection)

    def _stop_waiting(self, client: socket.socket) -> None:
        self._loop.remove_reader(client)
        self._silent.pop(client, None)
        client.close()

    def _begin(self, client: socket.socket, connection: Connection) -> None:
        """The client has sent something, or closed its end."""
        self._loop.remove_reader(client)
        self._silent.pop(client, None)
        connection.silent = None
        connection.connecting = self._loop.create_task(self._connect(client, connection))

    async def _connect(self, client: socket.socket, connection: Connection) -> None:
        """Make the transport, with a TLS handshake if there is a certificate."""
        tls = TlsConnection(connection, self._tls, self._limits.head_seconds) if self._tls is not None else None
        transport: asyncio.Transport | None = None
        try:
            transport, _ = await self._loop.connect_accepted_socket(lambda: tls or connection, client)
            if tls is not None:
                await tls.handshake
                if connection.transport is None:  # lost before the handshake ended
                    connection.close("handshake")
        except (OSError, asyncio.CancelledError) as error:  # ssl.SSLError is an OSError
            connection.close("handshake")
            if transport is not None:
                transport.abort()
            else:
                client.close()
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _sweep(self) -> None:
        """Close connections whose time is up."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = self._loop.time()
            for phase, waiting in self._waiting.items():
                while waiting and (connection := next(iter(waiting))).deadline <= now:
                    connection.close(f"{phase.value}_timeout")


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Close the connection after a request that was not accepted."""
    connection = _connection_of(request)
    if connection is None:
        raise web.HTTPServiceUnavailable(text="the connection is closed")
    connection.request_started()
    try:
        response = await handler(request)
    except web.HTTPException as http_error:
        if not connection.accepted:
            http_error.force_close()
        raise
    finally:
        connection.request_ended()
    if not connection.accepted:
        response.force_close()
    return response


def _reset(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    client.close()


class ListenError(Exception):
    """The process cannot listen on an address. The message names the address and the fix."""


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on this address; on all interfaces, IPv4 and IPv6, if the host is empty.

    Raises:
        OSError: Another process has the port, or the host is not an address of this machine.
    """
    if not host and socket.has_dualstack_ipv6():
        sockets = [socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)]
    else:
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)  # noqa: S104 - every interface, if no address is set
        sockets = []
        for family, *_, address in dict.fromkeys(found):
            sockets.append(socket.create_server((address[0], address[1]), family=family, backlog=BACKLOG))
    for listener in sockets:
        listener.setblocking(False)
    return sockets
