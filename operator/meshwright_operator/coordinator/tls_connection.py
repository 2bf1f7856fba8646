"""A TLS connection to the coordinator, which costs little memory and must finish its handshake soon.

asyncio gives each TLS connection a read buffer of 256 KiB. With two connections per agent, this would be 512 MiB for
1,000 workers. Requests are small, so a buffer of one TLS record is enough.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable

BUFFER_BYTES = 17 << 10
"""A TLS record: 16 KiB and its overhead (RFC 8446, section 5.2)."""
HANDSHAKE_SECONDS = 10
SHUTDOWN_SECONDS = 1


class TlsConnection(SSLProtocol):
    """The server's side of one connection."""

    max_size = BUFFER_BYTES

    def __init__(self, connection: asyncio.Protocol, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            loop,
            connection,
            context,
            loop.create_future(),
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=SHUTDOWN_SECONDS,
        )


def with_tls(
    connections: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None
) -> Callable[[], asyncio.BaseProtocol]:
    """A factory for the connections of `asyncio`'s servers: those of `connections`, over TLS if there is a context."""
    if context is None:
        return connections
    return lambda: TlsConnection(connections(), context)
