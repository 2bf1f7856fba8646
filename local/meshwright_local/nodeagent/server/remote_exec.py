"""`kubectl exec`: runs a command in a container, with its streams over a WebSocket.

The protocol is Kubernetes' `v5.channel.k8s.io` (and v4, which cannot close stdin): each binary message begins
with a channel byte: 0 stdin, 1 stdout, 2 stderr, 3 the final status, 4 terminal size, 255 close a channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from subprocess import DEVNULL

import orjson
from aiohttp import WSMsgType, web

from meshwright_local.nodeagent.console import Input
from meshwright_local.nodeagent.container import Container
from meshwright_local.nodeagent.runtime.process import Process

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")

STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = b"\x00", b"\x01", b"\x02", b"\x03", b"\x04", b"\xff"
_CHUNK = 65536


async def serve(request: web.Request, container: Container, command_line: Sequence[str]) -> web.WebSocketResponse:
    """Run a command and forward its streams until it ends. Kill it if the client disconnects.

    Raises:
        StartError: The container does not run, or does not have the command.
    """
    socket = web.WebSocketResponse(protocols=PROTOCOLS)
    with _Streams(request.query) as streams:
        # Started before the handshake, so that a failure to start is an HTTP error that kubectl shows.
        process = await container.start_exec(command_line, streams.child, tty=streams.tty)
        streams.close_child()
        feeding: asyncio.Task[None] | None = None
        try:
            await socket.prepare(request)
            feeding = asyncio.create_task(_feed(socket, process, streams))
            await asyncio.gather(*(_pump(socket, reader, channel) for channel, reader in streams.readers.items()))
            code = await process.wait()
            with contextlib.suppress(ConnectionError):
                await socket.send_bytes(ERROR + orjson.dumps(status_of(code)))
                await socket.close()
        finally:
            process.kill()
            if feeding is not None:
                feeding.cancel()
    return socket


async def _feed(socket: web.WebSocketResponse, process: Process, streams: _Streams) -> None:
    async for message in socket:
        if message.type is not WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[:1], message.data[1:]
        if channel == STDIN and data:
            await asyncio.to_thread(streams.write, data)
        elif channel == CLOSE and data == STDIN:
            streams.close_input()
        elif channel == RESIZE and streams.tty:
            size = orjson.loads(data)
            streams.resize(size.get("Height", 0), size.get("Width", 0))
    process.kill()


async def _pump(socket: web.WebSocketResponse, descriptor: int, channel: bytes) -> None:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(descriptor), "rb", buffering=0)
    )
    try:
        # The end of a terminal is an input/output error.
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await socket.send_bytes(channel + data)
    finally:
        transport.close()


def status_of(code: int) -> dict[str, object]:
    """Return the Status that the client gets at the end."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


class _Streams(Input, contextlib.ExitStack):
    """The file descriptors of one command: the child's three, and ours. A terminal takes the place of all three.

    The query selects them by the kubelet's names (`input`, `output`, `error`) or the API's.
    """

    def __init__(self, query: Mapping[str, str]) -> None:
        super().__init__()
        wanted = {name for name, value in query.items() if value in ("1", "true")}
        self.tty = "tty" in wanted
        self.child = [DEVNULL, DEVNULL, DEVNULL]
        self.readers: dict[bytes, int] = {}
        if self.tty:
            self.readers[STDOUT], terminal = os.openpty()
            self._input, self.child = os.dup(self.readers[STDOUT]), [terminal] * 3
        else:
            if wanted & {"stdin", "input"}:
                self.child[0], self._input = os.pipe()
            if wanted & {"stdout", "output"}:
                self.readers[STDOUT], self.child[1] = os.pipe()
            if wanted & {"stderr", "error"}:
                self.readers[STDERR], self.child[2] = os.pipe()
        for release in (self.close_child, self.close_input):
            self.callback(release)
        for descriptor in self.readers.values():
            self.callback(os.close, descriptor)

    def close_child(self) -> None:
        """Close the descriptors that the child has inherited."""
        for descriptor in {*self.child} - {DEVNULL}:
            os.close(descriptor)
        self.child = [DEVNULL, DEVNULL, DEVNULL]
