"""`kubectl exec`: a command in a running container, its streams over a WebSocket.

The protocol is Kubernetes' `v5.channel.k8s.io` (and v4, which lacks the closing of stdin): each binary message begins
with a channel byte: 0 stdin, 1 stdout, 2 stderr, 3 the final status, 4 terminal size, 255 close a channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
from collections.abc import Mapping
from dataclasses import dataclass
from subprocess import DEVNULL

import orjson
from aiohttp import WSMsgType, web

from meshwright.local.nodeagent.container import Container
from meshwright.local.nodeagent.process import Process

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")

_STDIN, _STDOUT, _STDERR, _ERROR, _RESIZE, _CLOSE = b"\x00", b"\x01", b"\x02", b"\x03", b"\x04", b"\xff"
_CHUNK = 65536


@dataclass(frozen=True, slots=True)
class ExecOptions:
    """What is run and which streams are wanted."""

    command: list[str]
    stdin: bool
    stdout: bool
    stderr: bool
    tty: bool

    @classmethod
    def parse(cls, command: list[str], query: Mapping[str, str]) -> ExecOptions:
        """Read the query, in the kubelet's words (`input`, `output`, `error`) or the API's."""

        def wanted(*names: str) -> bool:
            return any(query.get(name) in ("1", "true") for name in names)

        return cls(
            command, wanted("input", "stdin"), wanted("output", "stdout"), wanted("error", "stderr"), wanted("tty")
        )


async def serve(request: web.Request, container: Container, options: ExecOptions) -> web.WebSocketResponse:
    """Run the command and carry its streams until it ends or the client goes away, which kills it.

    Raises:
        StartError: The container does not run, or has no such command.
    """
    # Started before the handshake, so that a failure to start is an HTTP error that kubectl shows.
    streams = _Terminal() if options.tty else _Pipes(options)
    try:
        process = await container.start_beside(
            options.command, stdin=streams.child[0], stdout=streams.child[1], stderr=streams.child[2], tty=options.tty
        )
    except BaseException:
        streams.close()
        raise
    finally:
        streams.close_child()
    socket = web.WebSocketResponse(protocols=PROTOCOLS)
    try:
        await socket.prepare(request)
        await _carry(socket, process, streams)
    finally:
        process.kill()
        streams.close()
    return socket


async def _carry(socket: web.WebSocketResponse, process: Process, streams: _Streams) -> None:
    feeding = asyncio.create_task(_feed(socket, process, streams))
    try:
        await asyncio.gather(*(_pump(socket, reader, channel) for channel, reader in streams.readers.items()))
        code = await process.wait()
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(_ERROR + orjson.dumps(_status(code)))
            await socket.close()
    finally:
        feeding.cancel()


async def _feed(socket: web.WebSocketResponse, process: Process, streams: _Streams) -> None:
    async for message in socket:
        if message.type is not WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[:1], message.data[1:]
        if channel == _STDIN and data:
            await asyncio.to_thread(streams.write, data)
        elif channel == _CLOSE and data == _STDIN:
            streams.close_input()
        elif channel == _RESIZE:
            size = orjson.loads(data)
            streams.resize(int(size.get("Height", 0)), int(size.get("Width", 0)))
    process.kill()


async def _pump(socket: web.WebSocketResponse, descriptor: int, channel: bytes) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(descriptor), "rb", buffering=0)
    )
    try:
        # A terminal's end shows as an input/output error.
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await socket.send_bytes(channel + data)
    finally:
        transport.close()


def _status(code: int) -> dict[str, object]:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


class _Streams:
    """The descriptors of one command: the child's three, and ours."""

    def __init__(self) -> None:
        self.child: tuple[int, int, int] = (DEVNULL, DEVNULL, DEVNULL)
        self.readers: dict[bytes, int] = {}
        self._input: int | None = None

    def write(self, data: bytes) -> None:
        """Write to the command's input; blocks while it does not read. What it no longer wants is dropped."""
        while data and self._input is not None:
            try:
                data = data[os.write(self._input, data) :]
            except OSError:
                return

    def close_input(self) -> None:
        """The command's input ends."""
        if self._input is not None and self._input not in self.readers.values():
            os.close(self._input)
        self._input = None

    def resize(self, rows: int, columns: int) -> None:
        """The client's terminal has another size."""

    def close_child(self) -> None:
        """Close what the child has by now."""
        for descriptor in {*self.child} - {DEVNULL}:
            os.close(descriptor)
        self.child = (DEVNULL, DEVNULL, DEVNULL)

    def close(self) -> None:
        """Close what is ours."""
        self.close_input()
        for descriptor in self.readers.values():
            os.close(descriptor)
        self.readers.clear()


class _Pipes(_Streams):
    def __init__(self, options: ExecOptions) -> None:
        super().__init__()
        stdin, stdout, stderr = self.child
        if options.stdin:
            stdin, self._input = os.pipe()
        if options.stdout:
            self.readers[_STDOUT], stdout = os.pipe()
        if options.stderr:
            self.readers[_STDERR], stderr = os.pipe()
        self.child = (stdin, stdout, stderr)


class _Terminal(_Streams):
    def __init__(self) -> None:
        super().__init__()
        master, slave = os.openpty()
        self._master = master
        self._input = master
        self.readers[_STDOUT] = master
        self.child = (slave, slave, slave)

    def resize(self, rows: int, columns: int) -> None:
        """Tell the terminal, which tells the programs in it."""
        if self.readers:
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
