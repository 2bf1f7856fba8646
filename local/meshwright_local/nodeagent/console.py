"""The streams of a container with `stdin` or `tty`: its log, and the clients that are attached to it.

Other containers write to their log without this process in between (`runtime/shim.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
from pathlib import Path

from meshwright_local.nodeagent.runtime.shim import LogStream

STDOUT, STDERR = 1, 2
_CHUNK = 65536
Output = asyncio.Queue[tuple[int, bytes] | None]


class Input:
    """The writing end of a process's stdin, which is a terminal's with `tty`."""

    tty = False
    _input: int | None = None

    def write(self, data: bytes) -> None:
        """Write to the process's stdin. Blocks while it does not read; drops data after it has closed stdin."""
        with contextlib.suppress(OSError):
            while data and self._input is not None:
                data = data[os.write(self._input, data) :]

    def close_input(self) -> None:
        """Close the process's stdin."""
        if self._input is not None:
            os.close(self._input)
        self._input = None

    def resize(self, height: int, width: int) -> None:
        """Set the size of the terminal."""
        if self.tty and self._input is not None:
            fcntl.ioctl(self._input, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


class Console(Input):
    """Input and output of one run of a container. `close` must be called once it has ended."""

    def __init__(self, log: Path, *, tty: bool) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.tty = tty
        self._clients: set[Output] = set()
        self._readers: dict[int, int] = {}
        self._pumps: list[asyncio.Task[None]] = []
        if tty:
            self._readers[STDOUT], terminal = os.openpty()
            self._input, self.child = os.dup(self._readers[STDOUT]), [terminal] * 3
        else:
            stdin, self._input = os.pipe()
            self._readers[STDOUT], stdout = os.pipe()
            self._readers[STDERR], stderr = os.pipe()
            self.child = [stdin, stdout, stderr]

    def begin(self) -> None:
        """Copy output from now on: the container has its ends of the streams."""
        for descriptor in {*self.child}:
            os.close(descriptor)
        self._pumps = [asyncio.create_task(self._pump(number, reader)) for number, reader in self._readers.items()]

    async def close(self) -> None:
        """Read the rest of the output, and tell the clients that there is no more."""
        await asyncio.gather(*self._pumps, return_exceptions=True)
        self.close_input()
        os.close(self._log)
        for client in self._clients:
            client.put_nowait(None)

    def attach(self) -> Output:
        """Return a queue of the output from now on, with None at its end."""
        client: Output = asyncio.Queue()
        self._clients.add(client)
        return client

    def detach(self, client: Output) -> None:
        """End an attachment."""
        self._clients.discard(client)

    async def _pump(self, number: int, descriptor: int) -> None:
        log = LogStream("stdout" if number == STDOUT else "stderr", self._log)
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", buffering=0)
        )
        try:
            # The end of a terminal is an input/output error.
            with contextlib.suppress(OSError):
                while data := await stream.read(_CHUNK):
                    log.feed(data)
                    for client in self._clients:
                        client.put_nowait((number, data))
            log.feed(b"")
        finally:
            transport.close()
