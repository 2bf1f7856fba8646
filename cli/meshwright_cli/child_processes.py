"""Programs started for as long as this process lives: their own process groups, logs in files, nothing left behind.

Each program leads a session of its own, so that Ctrl-C in the terminal reaches only this process, which then stops them
in reverse order; and the kernel sends each a SIGTERM should this process die without doing so (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
STOP_SECONDS = 15.0


class ProgramEndedError(Exception):
    """A program exited unexpectedly. The message has the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Program:
    """A running program, the leader of its own process group."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    def check(self) -> None:
        """Raise `ProgramEndedError` unless it is still running."""
        code = self.process.returncode
        if code is not None:
            raise ProgramEndedError(f"the {self.name} exited with code {code}; its last lines:\n{self.tail(20)}")

    def tail(self, lines: int) -> str:
        """The last lines of its log."""
        return tail(self.log, lines)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group, if it still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Send SIGTERM to the leader, so that it can clean up, then SIGKILL to what is left of the group."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.process.wait()
        self.signal(signal.SIGKILL)
        await self.process.wait()


class Programs:
    """The programs of one run. Leaving the context stops them in reverse order."""

    def __init__(self) -> None:
        self._started: list[Program] = []

    async def __aenter__(self) -> Programs:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Program:
        """Start a program with its output appended to `log`.

        Args:
            name: what people call it, such as `operator`.
            argv: command line.
            log: file for stdout and stderr.
            env: variables to add to this process's own.

        Raises:
            OSError: the command cannot be run.
        """
        with log.open("ab") as output:
            process = await spawn(argv, output, output, env)
        program = Program(name, process, log)
        self._started.append(program)
        return program

    async def output(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> str:
        """Run a program until it exits and return its stdout. Its stderr is appended to `log`.

        Raises:
            ProgramEndedError: its exit code is not 0.
        """
        with log.open("ab") as errors:
            process = await spawn(argv, asyncio.subprocess.PIPE, errors, env)
        program = Program(name, process, log)
        self._started.append(program)
        out, _ = await process.communicate()
        self._started.remove(program)
        if process.returncode:
            program.check()
        return out.decode(errors="replace")

    async def stop(self) -> None:
        """Stop every program in reverse order."""
        while self._started:
            await self._started[-1].stop()
            self._started.pop()

    def check(self) -> None:
        """Raise `ProgramEndedError` if one of them has exited."""
        for program in self._started:
            program.check()


async def spawn(
    argv: Sequence[str], stdout: IO[bytes] | int, stderr: IO[bytes], env: Mapping[str, str] | None
) -> asyncio.subprocess.Process:
    """Start a process that leads its own session and does not outlive this one."""
    parent = os.getpid()
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **(env or {})},
        start_new_session=True,
        preexec_fn=lambda: exit_with_parent(parent),
    )


def exit_with_parent(parent: int) -> None:
    """In a new child: ask the kernel for SIGTERM when the parent dies, and exit if it has died already."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def tail(path: Path, lines: int) -> str:
    """The last lines of a text file, read from its end. Empty if the file does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 400 * lines))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
