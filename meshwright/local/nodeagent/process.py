"""The agent's side of a container process: start it under a shim, signal it, kill all of it, learn how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_SHIM = Path(__file__).with_name("shim.py")


class StartError(Exception):
    """The command could not be executed; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run. Without `log`, output goes to the streams given to `Process.start`."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    log: Path | None = None
    tty: bool = False


Stream = int | IO[bytes] | None


class Process:
    """One running command and everything that descends from it.

    Nothing of it outlives this object's process, whatever way that ends: see the shim.
    """

    def __init__(self, pid: int, shim: subprocess.Popen[bytes], reader: asyncio.StreamReader, control: Any) -> None:
        self.pid = pid
        self._shim = shim
        self._control: asyncio.StreamWriter = control
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiter = asyncio.create_task(self._follow(reader))

    @classmethod
    async def start(
        cls,
        spec: ProcessSpec,
        *,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = subprocess.DEVNULL,
        stderr: Stream = None,
    ) -> Process:
        """Run a command under a shim of its own.

        `stderr` None lets complaints of the shim itself reach this process's own; it serves no container with a log.

        Raises:
            StartError: There is no such command, or it may not be executed.
        """
        ours, shim = _spawn_shim(stdin, stdout, stderr)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        order = {
            "argv": list(spec.argv),
            "env": dict(spec.env),
            "cwd": str(spec.cwd),
            "log": str(spec.log) if spec.log else None,
            "tty": spec.tty,
        }
        writer.write(json.dumps(order).encode() + b"\n")
        try:
            answer = json.loads(await reader.readline() or b'{"error": "the shim died"}')
        except (ConnectionError, asyncio.CancelledError):
            writer.close()
            raise
        if "error" in answer:
            writer.close()
            await asyncio.to_thread(shim.wait)
            raise StartError(answer["error"])
        return cls(answer["pid"], shim, reader, writer)

    @property
    def shim_pid(self) -> int:
        """Pid of the process that all of it descends from."""
        return self._shim.pid

    @property
    def running(self) -> bool:
        """Whether anything of it is left."""
        return not self._ended.done()

    async def wait(self) -> int:
        """The exit code once every process of it is gone; 128 plus the number when a signal ended it."""
        return await asyncio.shield(self._ended)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the main process alone, as a container runtime does."""
        self._order({"signal": int(number)})

    def kill(self) -> None:
        """Kill everything at once."""
        self._order({"kill": True})

    def _order(self, order: dict[str, object]) -> None:
        if self.running and not self._control.is_closing():
            self._control.write(json.dumps(order).encode() + b"\n")

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        line = b""
        with contextlib.suppress(ConnectionError):
            line = await reader.readline()
        if line:
            code = int(json.loads(line)["code"])
        else:
            # Somebody killed the shim; its container died with it, up to processes that left the group.
            code = 128 + signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        await asyncio.to_thread(self._shim.wait)
        self._control.close()
        if not self._ended.done():
            self._ended.set_result(code)


def _spawn_shim(stdin: Stream, stdout: Stream, stderr: Stream) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a shim; returns our end of its socket. A spawn takes about a millisecond, so it needs no thread."""
    ours, theirs = socket.socketpair()
    with theirs:
        shim = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SHIM), str(theirs.fileno())],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={},
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    return ours, shim
