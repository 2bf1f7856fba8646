"""A process that saves and is killed at a byte: a fork of the test, whose files and connections count what they write.

A byte that reaches the kernel is one unit, and so is each flush, rename and removal. The process gets SIGKILL in the
middle of a write, after the part of it that is still allowed.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Units:
    """What the process has written so far; kills it at `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.count = limit, 0

    def take(self, wanted: int) -> int:
        """How many of so many units may still be written."""
        allowed = min(wanted, self.limit - self.count)
        self.count += allowed
        return allowed

    def write(self, data: Any, write: Callable[[Any], int]) -> int:
        """Write the part of `data` that is allowed, and die if that is not all."""
        view = memoryview(data).cast("B")
        allowed = self.take(len(view))
        if allowed == len(view):
            return write(view)
        while allowed:
            written = write(view[:allowed])
            view, allowed = view[written:], allowed - written
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("alive")

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, as one unit."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.take(1):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call


def count_files(units: Units) -> None:
    """Count what this process writes to files from now on, and what it does to directories."""

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            return units.write(data, super().write)

    real = io.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "b" in mode and ("w" in mode or "x" in mode):
            return io.BufferedWriter(Raw(file, mode.replace("b", "")))
        return real(file, mode, *args, **kwargs)

    builtins.open = io.open = opened
    for owner, names in ((os, ("fsync", "mkdir", "unlink", "rename")), (Path, ("rename", "mkdir"))):
        for name in names:
            setattr(owner, name, units.counted(getattr(owner, name)))
    shutil.rmtree = units.counted(shutil.rmtree)  # type: ignore[assignment]


def count_connections(units: Units) -> None:
    """Count what this process sends from now on."""
    send = socket.socket.send

    def counted(self: socket.socket, data: Any, *flags: int) -> int:
        return units.write(data, lambda part: send(self, part, *flags))

    socket.socket.send = counted  # type: ignore[method-assign,assignment]
    # asyncio would otherwise send several buffers at once, past the count.
    if hasattr(socket.socket, "sendmsg"):
        socket.socket.sendmsg = lambda self, buffers, *rest: counted(self, b"".join(buffers))  # type: ignore[method-assign,assignment]


def save_and_die(save: Callable[[], None], limit: int, count: Callable[[Units], None]) -> int | None:
    """Run `save` in a fork that dies after `limit` units. None if it did, otherwise how many `save` needs."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            units = Units(limit)
            # A fork has none of the threads that torch's parallel loops would wait for.
            torch.set_num_threads(1)
            count(units)
            save()
            os.write(write, str(units.count).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    answer = os.read(read, 64)
    os.close(read)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if answer:
        return int(answer)
    assert code == -signal.SIGKILL, code
    return None
