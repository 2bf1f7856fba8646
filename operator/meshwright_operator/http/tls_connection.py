"""The TLS of one accepted connection, which costs little memory and must finish its handshake soon.

asyncio gives each TLS connection a read buffer of 256 KiB. With two connections per agent, this would be 512 MiB for
1,000 workers. Requests are small, so a buffer of one TLS record is enough.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol

BUFFER_BYTES = 17 << 10
"""A TLS record: 16 KiB and its overhead (RFC 8446, section 5.2)."""
SHUTDOWN_SECONDS = 1


class TlsConnection(SSLProtocol):
    """The server's side of a connection. `connection` is made when the handshake has succeeded."""

    max_size = BUFFER_BYTES

    def __init__(self, connection: asyncio.BaseProtocol, context: ssl.SSLContext, handshake_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.handshake: asyncio.Future[None] = loop.create_future()
        """Done when the handshake has ended. An `OSError` if it failed."""
        super().__init__(
            loop,
            connection,
            context,
            self.handshake,
            server_side=True,
            ssl_handshake_timeout=handshake_seconds,  # type: ignore[arg-type]  # a float works, too
            ssl_shutdown_timeout=SHUTDOWN_SECONDS,
        )
