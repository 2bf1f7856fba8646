"""One accepted connection: between asyncio's transport and aiohttp's protocol, it counts bytes and watches the time.

aiohttp itself has no time limit for headers, and reads up to 256 KiB at once from every connection. Here each read has
8 KiB at most, in a buffer that all connections share.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Hashable
from typing import Protocol

READ_BYTES = 8 << 10


class Phase(enum.Enum):
    """What a connection waits for."""

    HEAD = "head"
    """The TLS handshake, or the rest of a request's headers."""
    REQUEST = "request"
    """The handler, which has time limits of its own."""
    IDLE = "idle"
    """The next request, or the client reading the last answer."""


class Keeper(Protocol):
    """The server that a connection belongs to."""

    buffer: memoryview

    def phase_changed(self, connection: Connection) -> None:
        """The connection entered its phase."""

    def verified(self, connection: Connection, owner: Hashable) -> None:
        """A request on the connection has a valid signature of this owner."""

    def closed(self, connection: Connection, reason: str) -> None:
        """The connection is closed. `reason` is empty if the client or a handler closed it."""


class Connection(asyncio.BufferedProtocol):
    """A connection of a client."""

    def __init__(self, keeper: Keeper, source: str, head_bytes: int, make: Callable[[], asyncio.Protocol]) -> None:
        """`make` makes the protocol that parses requests."""
        self.source = source
        self.phase = Phase.HEAD
        self.deadline = 0.0
        self.connecting: asyncio.Task[None] | None = None
        """The TLS handshake. Set until the transport exists."""
        self.silent: Callable[[], None] | None = None
        """Closes the socket. Set until the client has sent a byte."""
        self.tolerated = False
        """Whether it stayed open once after a request that was not accepted."""
        self.accepted = False
        """Whether it stays open after the current request."""
        self._keeper = keeper
        self._head_bytes = head_bytes
        self._received = 0
        self._make = make
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._closed = False

    @property
    def transport(self) -> asyncio.Transport | None:
        """The transport; None before the connection is made, and after it is lost."""
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self.connecting = None
        if self._closed:
            transport.abort()
            return
        self._transport = transport
        self._inner = self._make()
        self._enter(Phase.HEAD)
        self._inner.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio. The buffer is shared: `buffer_updated` is called before anything else reads."""
        del sizehint
        return self._keeper.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        self._received += nbytes
        if self.phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        if self.phase is Phase.HEAD and self._received > self._head_bytes:
            self.close("head_bytes")
        elif self._inner is not None:
            self._inner.data_received(bytes(self._keeper.buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        """See asyncio."""
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        """See asyncio."""
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """See asyncio."""
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        inner, self._inner, self._transport = self._inner, None, None
        if inner is not None:
            inner.connection_lost(exc)
        self._report_closed("")

    def request_started(self) -> None:
        """The headers are complete, and the handler begins."""
        self.accepted = False
        self._enter(Phase.REQUEST)

    def verified(self, owner: Hashable) -> None:
        """The current request has a valid signature of this owner."""
        self.accepted = True
        self._keeper.verified(self, owner)

    def request_ended(self) -> None:
        """The handler has returned an answer."""
        self._received = 0
        if not self._closed:
            self._enter(Phase.IDLE)

    def close(self, reason: str) -> None:
        """Close the connection at once, without sending what is buffered."""
        if self._closed:
            return
        self._report_closed(reason)
        if self._transport is not None:
            self._transport.abort()
        elif self.connecting is not None:
            self.connecting.cancel()
        elif self.silent is not None:
            self.silent()

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._keeper.phase_changed(self)

    def _report_closed(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            self._keeper.closed(self, reason)
