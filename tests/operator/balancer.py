"""A Service in front of several replicas, as far as connections go."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def service(ports: list[int], scheme: str = "http") -> AsyncIterator[str]:
    """A Service: every connection goes to the next of these ports that accepts it. Gives its URL."""
    order = itertools.count()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            return
        finally:
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in ports:
            try:
                backend = await asyncio.open_connection("127.0.0.1", ports[next(order) % len(ports)])
            except OSError:
                continue
            await asyncio.gather(copy(reader, backend[1]), copy(backend[0], writer))
            return
        writer.close()

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
