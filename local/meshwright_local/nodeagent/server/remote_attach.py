"""`kubectl attach`: the streams of a container's main process, with the protocol of `remote_exec.py`.

A container without `stdin` and `tty` is followed in its log, line by line.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
from aiohttp import WSMsgType, web

from meshwright_local.nodeagent.console import STDERR, STDOUT, Console
from meshwright_local.nodeagent.container import Container
from meshwright_local.nodeagent.runtime.process import StartError
from meshwright_local.nodeagent.server import remote_exec

_POLL_SECONDS = 0.1


async def serve(request: web.Request, container: Container) -> web.WebSocketResponse:
    """Forward the streams until the container ends or the client disconnects.

    Raises:
        StartError: The container does not run.
    """
    if container.over or "running" not in container.status["state"]:
        raise StartError(f"container {container.name} is not running")
    console = container.console
    wanted = {name for name, value in request.query.items() if value in ("1", "true")}
    socket = web.WebSocketResponse(protocols=remote_exec.PROTOCOLS)
    output = _console_output(console) if console is not None else _log_output(container)
    await socket.prepare(request)
    feeding = asyncio.create_task(_feed(socket, console if wanted & {"stdin", "input"} else None))
    sending = asyncio.create_task(_send(socket, output))
    try:
        await asyncio.wait({feeding, sending}, return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            with contextlib.suppress(ConnectionError):
                await socket.send_bytes(remote_exec.ERROR + orjson.dumps(remote_exec.status_of(0)))
                await socket.close()
    finally:
        for task in (feeding, sending):
            task.cancel()
        await asyncio.gather(feeding, sending, return_exceptions=True)
        if console is not None and container.spec.get("stdinOnce") and wanted & {"stdin", "input"}:
            console.close_input()
    return socket


async def _send(socket: web.WebSocketResponse, output: AsyncIterator[tuple[int, bytes]]) -> None:
    with contextlib.suppress(ConnectionError):
        async for number, data in output:
            await socket.send_bytes((remote_exec.STDOUT if number == STDOUT else remote_exec.STDERR) + data)


async def _feed(socket: web.WebSocketResponse, console: Console | None) -> None:
    async for message in socket:
        if message.type is not WSMsgType.BINARY or not message.data or console is None:
            continue
        channel, data = message.data[:1], message.data[1:]
        if channel == remote_exec.STDIN and data:
            await asyncio.to_thread(console.write, data)
        elif channel == remote_exec.CLOSE and data == remote_exec.STDIN:
            console.close_input()
        elif channel == remote_exec.RESIZE:
            size = orjson.loads(data)
            console.resize(size.get("Height", 0), size.get("Width", 0))


async def _console_output(console: Console) -> AsyncIterator[tuple[int, bytes]]:
    client = console.attach()
    try:
        while (part := await client.get()) is not None:
            yield part
    finally:
        console.detach(client)


async def _log_output(container: Container) -> AsyncIterator[tuple[int, bytes]]:
    """Yield what a container writes to its log from now on."""
    path, position = container.log, await asyncio.to_thread(_size, container.log)
    while True:
        over = container.over or container.log != path
        data = await asyncio.to_thread(_read, path, position)
        position += len(data)
        for record in data.splitlines():
            _, stream, flag, text = record.split(b" ", 3)
            yield STDERR if stream == b"stderr" else STDOUT, text + (b"" if flag == b"P" else b"\n")
        if over and not data:
            return
        await asyncio.sleep(_POLL_SECONDS)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, position: int) -> bytes:
    """Return complete records after a position."""
    with path.open("rb") as file:
        file.seek(position)
        data = file.read()
    return data[: data.rfind(b"\n") + 1]
