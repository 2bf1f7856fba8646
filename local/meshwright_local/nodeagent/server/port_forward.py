"""`kubectl port-forward`: connections to ports of a pod, as streams of SPDY in the messages of one WebSocket.

For each connection the client opens two streams with the same request id: one for data, and one for an error. The
server connects to the pod's address, so only what listens there is reachable, and not what listens at 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

from meshwright.api.objects import KubeObject
from meshwright_local.nodeagent.runtime.handlers import connect
from meshwright_local.nodeagent.server import spdy

PROTOCOL = "SPDY/3.1+portforward.k8s.io"
_CHUNK = 32768
_HEADERS = ("streamtype", "port", "requestid")


async def serve(request: web.Request, pod: KubeObject) -> web.WebSocketResponse:
    """Forward connections until the client disconnects."""
    socket = web.WebSocketResponse(protocols=(PROTOCOL,), max_msg_size=0)
    await socket.prepare(request)
    forwarder = _Forwarder(socket, pod)
    try:
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                await forwarder.receive(message.data)
    except ValueError:
        await socket.close(code=1002)
    finally:
        await forwarder.close()
    return socket


@dataclass(slots=True)
class _Connection:
    """The streams of one forwarded connection, by their type, and what the client has sent; None is its end."""

    port: int
    streams: dict[str, int] = field(default_factory=dict)
    received: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)


class _Forwarder:
    """All connections of one client."""

    def __init__(self, socket: web.WebSocketResponse, pod: KubeObject) -> None:
        self._socket, self._pod = socket, pod
        self._spdy = spdy.Spdy()
        self._connections: dict[str, _Connection] = {}
        self._data: dict[int, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def receive(self, data: bytes) -> None:
        """Handle what the client has sent; raises ValueError for what is no SPDY."""
        for frame in self._spdy.feed(data):
            if frame.kind == spdy.SYN_STREAM:
                await self._open(frame)
            elif frame.kind == spdy.PING:
                await self._send(spdy.pong(frame.data))
            elif frame.kind in (spdy.DATA, spdy.RST_STREAM) and frame.stream in self._data:
                received = self._data[frame.stream].received
                if frame.data:
                    received.put_nowait(frame.data)
                if frame.flags & spdy.FIN or frame.kind == spdy.RST_STREAM:
                    received.put_nowait(None)

    async def close(self) -> None:
        """End every connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _open(self, frame: spdy.Frame) -> None:
        headers = {name.lower(): value for name, value in (frame.headers or {}).items()}
        kind, port, number = (headers.get(name, "") for name in _HEADERS)
        if kind not in ("data", "error") or not port.isdigit():
            raise ValueError(f"a stream without type or port: {headers}")
        await self._send(self._spdy.reply(frame.stream))
        connection = self._connections.setdefault(number or port, _Connection(int(port)))
        connection.streams[kind] = frame.stream
        if kind == "data":
            self._data[frame.stream] = connection
        if len(connection.streams) == 2:
            del self._connections[number or port]
            self._start(self._forward(connection))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, connection: _Connection) -> None:
        data, error = connection.streams["data"], connection.streams["error"]
        failure, metadata = b"", self._pod["metadata"]
        try:
            await self._copy(connection, data)
        except OSError as problem:
            place = f"port {connection.port} to pod {metadata['name']}, uid {metadata['uid']}"
            failure = f"error forwarding {place}: {problem}".encode()
        finally:
            self._data.pop(data, None)
        with contextlib.suppress(ConnectionError):
            await self._send(spdy.data_frame(data, b"", end=True))
            await self._send(spdy.data_frame(error, failure, end=True))

    async def _copy(self, connection: _Connection, stream: int) -> None:
        reader, writer = await connect(self._pod["status"]["podIP"], connection.port)
        sending = asyncio.create_task(_write(connection, writer))
        try:
            while part := await reader.read(_CHUNK):
                await self._send(spdy.data_frame(stream, part))
        except ConnectionError:
            pass  # either side may end it at any time
        finally:
            sending.cancel()
            writer.close()

    async def _send(self, frame: bytes) -> None:
        await self._socket.send_bytes(frame)


async def _write(connection: _Connection, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while (part := await connection.received.get()) is not None:
            writer.write(part)
            await writer.drain()
        writer.write_eof()
