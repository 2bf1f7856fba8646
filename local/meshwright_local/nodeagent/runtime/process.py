"""The agent's side of a container process: start it under a shim, signal or kill it, and get its exit code."""

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
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright_local.nodeagent.runtime.mount_namespace import FileSystemView

_SHIM = """
import socket, sys
sys.path.insert(0, sys.argv[1])
from meshwright_local.nodeagent.runtime.shim import Shim
Shim(socket.socket(fileno=int(sys.argv[2]))).run()
"""


class StartError(Exception):
    """The command could not be executed; the message names the command and the cause."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """The process to run. Without `log`, its output goes to the streams given to `Process.start`."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    log: Path | None = None
    tty: bool = False
    view: FileSystemView | None = None
    """Its view of the file system; None: that of the machine."""
    join: int | None = None
    """Pid of a process whose view it shares."""


class Process:
    """One running command and all its descendants.

    None of them outlives this process, however it ends: see the shim.
    """

    def __init__(self, shim: subprocess.Popen[bytes], reader: asyncio.StreamReader, control: asyncio.StreamWriter):
        self.pid = 0
        self.shim_pid = shim.pid
        """Pid of the shim, from which all of them descend."""
        self.ended = asyncio.create_task(self._follow(shim, reader))
        """Returns the exit code. Do not cancel it."""
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._control = control

    @classmethod
    async def start(cls, spec: ProcessSpec, streams: Sequence[int] = (subprocess.DEVNULL,) * 3) -> Process:
        """Run a command under a new shim, with three streams as in `subprocess` unless it has a log.

        Raises:
            StartError: The command does not exist or is not executable, or its view cannot be mounted.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # A spawn takes about a millisecond, so it needs no thread.
            shim = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-I", "-S", "-c", _SHIM, str(Path(__file__).parents[3]), str(theirs.fileno())],
                stdin=streams[0],
                stdout=streams[1],
                # Errors of the shim itself go to this process's stderr; a container with a log does not write there.
                stderr=None if spec.log else streams[2],
                env={},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        process = cls(shim, *await asyncio.open_unix_connection(sock=ours))
        process._send_command(asdict(spec))
        try:
            await asyncio.shield(process._started)
        except asyncio.CancelledError:
            process._control.close()
            raise
        return process

    @property
    def running(self) -> bool:
        """Whether any of its processes is left."""
        return not self.ended.done()

    async def wait(self) -> int:
        """Return the exit code once all its processes are gone: 128 plus the signal number if a signal ended it."""
        return await asyncio.shield(self.ended)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal only to the main process, as a container runtime does."""
        self._send_command({"signal": int(number)})

    def kill(self) -> None:
        """Kill everything at once."""
        self._send_command({"kill": True})

    def _send_command(self, command: dict[str, object]) -> None:
        if not self._control.is_closing():
            self._control.write(json.dumps(command, default=str).encode() + b"\n")

    async def _follow(self, shim: subprocess.Popen[bytes], reader: asyncio.StreamReader) -> int:
        # Without an exit code the shim was killed. Its container died with it, except for processes outside the group.
        code, why = -int(signal.SIGKILL), "the shim died"
        with contextlib.suppress(ConnectionError):
            async for line in reader:
                message = json.loads(line)
                why, code = message.get("error", why), message.get("code", code)
                if "pid" in message:
                    self.pid = message["pid"]
                    self._started.set_result(None)
        if self.pid and code == -signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        await asyncio.to_thread(shim.wait)
        self._control.close()
        if not self.pid:
            self._started.set_exception(StartError(why))
        return code if code >= 0 else 128 - code
