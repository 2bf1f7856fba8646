"""Rank processes: starts commands, reads ranks' pipes, waits for their exit, and turns both into events in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwright.api import labels
from meshwright_worker.agent.command_stacks import abort_with_stacks
from meshwright_worker.agent.events import EventQueue, OutputWritten, ProgressLogged, RankExited, RankMessageReceived
from meshwright_worker.command import error_file
from meshwright_worker.command.log_patterns import LogPatterns
from meshwright_worker.command.progress import CommandProgress
from meshwright_worker.command.report_line import ReportedWork, parse_line
from meshwright_worker.command.saved_checkpoints import SavedCheckpoints
from meshwright_worker.evidence.tail_buffer import TailBuffer
from meshwright_worker.rank import messages

TAIL_LINES = 40
MAX_LINE = 8192
CHUNK = 65536
# Progress bars end their updates with a carriage return.
_END_OF_LINE = re.compile(rb"\r\n|\n|\r")

OUTPUT_EVENT_SECONDS = 1.0
"""Shortest time between two events that a rank wrote output: some write thousands of lines a second."""

# A process that a rank left behind may keep its pipes open; the rank's last output arrives long before this.
OUTPUT_DRAIN_SECONDS = 1.0
VERIFY_SECONDS = 30.0
"""Time for the verification of a checkpoint that a command has reported just before it exited."""
REPORT_BYTES = MAX_LINE
"""Maximum size of a line of a report file."""
EVENT_BYTES = 1 << 20
"""Maximum size of an event: a step's event has an entry for each mixture layer, and there may be a thousand."""


FATAL_ERROR = "Fatal Python error: "
"""Begins the stacks that Python writes when a signal ends a process. They say less than the lines before."""


@dataclass(slots=True)
class RankOutput:
    """The end of what a rank's process has written: its log, and the stacks of its threads."""

    log: TailBuffer = field(default_factory=TailBuffer)
    stacks: TailBuffer = field(default_factory=TailBuffer)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self.log.written + self.stacks.written


@dataclass(slots=True)
class CurrentGeneration:
    """The generation of a process, and its rank there. Both change only while it holds its state and sends nothing."""

    number: int = 0
    rank: int = 0


class OutputPump:
    """Reads one rank's output until its end, and writes it to the pod's log with the rank as a prefix.

    Writes only entire lines, since many ranks share the log. The last lines are kept for failures.
    """

    def __init__(
        self,
        rank: int | CurrentGeneration,
        write_line: Callable[[str], None],
        on_output: Callable[[], None] = lambda: None,
        buffer: TailBuffer | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """`on_output` is called when output arrives, at most once in `OUTPUT_EVENT_SECONDS`. `buffer` gets it
        all, and `on_line` each line.
        """
        self._on_line = on_line
        self._buffer = buffer
        self._fatal = False
        self._on_output = on_output
        self._output_reported_at = float("-inf")
        self._current = rank if isinstance(rank, CurrentGeneration) else CurrentGeneration(rank=rank)
        self._write_line = write_line
        self._partial_line = b""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Read until every process has closed the other end."""
        while chunk := await reader.read(CHUNK):
            self.feed(chunk)
        self.close()

    def feed(self, chunk: bytes) -> None:
        """Take a chunk and write the lines that it completes. Splits lines longer than `MAX_LINE` bytes."""
        if self._buffer is not None:
            self._buffer.feed(chunk)
        now = time.monotonic()
        if now - self._output_reported_at >= OUTPUT_EVENT_SECONDS:
            self._output_reported_at = now
            self._on_output()
        *lines, self._partial_line = _END_OF_LINE.split(self._partial_line + chunk)
        for line in lines:
            self._emit(line)
        while len(self._partial_line) > MAX_LINE:
            self._emit(self._partial_line[:MAX_LINE])
            self._partial_line = self._partial_line[MAX_LINE:]

    def close(self) -> None:
        """Write the rest of the output as the last line."""
        if self._partial_line:
            self._emit(self._partial_line)
            self._partial_line = b""

    def _emit(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        if text.strip():
            self._fatal = self._fatal or text.startswith(FATAL_ERROR)
            if not self._fatal:
                self.tail.append(text)
            if self._on_line is not None:
                self._on_line(text)
            self._write_line(f"[rank {self._current.rank}] {text}")


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pipe:
    """The read end of a pipe."""

    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport

    def close(self) -> None:
        """Stop reading, even if a process still writes."""
        self.transport.close()


@dataclass(frozen=True, slots=True)
class RankHandle:
    """A started process and the functions to control it."""

    rank: int
    """The rank with which it started. In a later generation, `current` may have another."""
    pid: int
    wait: Callable[[], Awaitable[int]]
    """Waits until it exits; returns the exit code (negative: the signal that killed it)."""
    terminate: Callable[[], None]
    """Sends SIGTERM."""
    kill: Callable[[], None]
    """Kills it, and every process that it started."""
    output: Pipe
    events: Pipe | None
    """None for the user's command, which reports no events."""
    request_checkpoint: Callable[[], None] = lambda: None
    """Asks it for a checkpoint, if it is rank 0 of the built-in runtime and trains."""
    dump_stacks: Callable[[], object] = lambda: None
    """Makes it write the stacks of its threads. The user's command exits then."""
    stacks: Pipe | None = None
    """Where it writes them. None for the user's command, which writes them to its output."""
    commands: asyncio.WriteTransport | None = None
    """Takes commands for a process that recovers in memory (`meshwright_worker.rank.commands`)."""
    reports: Pipe | None = None
    """Where the user's command reports its progress. None for the built-in runtime."""
    close_reports: Callable[[], None] = lambda: None
    """Ends `reports` once no process has it open for writing."""
    patterns: LogPatterns | None = None
    """Finds the progress of the user's command in its log. None if nothing is searched."""
    checkpoints: SavedCheckpoints | None = None
    """Verifies and retains the checkpoints that the user's command reports. None if each counts, and all stay."""
    checkpoint_directory: str | None = None
    """Where the checkpoints are that the user's command reports with a relative path."""
    error_file: Path | None = None
    """Where the user's command records why it fails, if it uses torch's `@record`."""
    written: RankOutput = field(default_factory=RankOutput)
    """The end of what it has written."""
    current: CurrentGeneration = field(default_factory=CurrentGeneration)
    """The generation to which its messages belong, and its rank there."""


async def supervise(
    handle: RankHandle, generation: int, event_queue: EventQueue, write_line: Callable[[str], None]
) -> None:
    """Turn one rank's output and exit into events. The last is `RankExited`, after every message of the rank.

    They belong to `generation` until the handle's changes.
    """
    current = handle.current
    current.number, current.rank = generation, handle.rank
    watched = _ProgressWatch(handle, generation, event_queue) if handle.events is None else None

    def on_output() -> None:
        # The built-in runtime reports steps: its output is not progress.
        if handle.events is None:
            event_queue.put_nowait(OutputWritten(current.number, current.rank))

    pump = OutputPump(current, write_line, on_output, handle.written.log, watched.on_line if watched else None)
    readers = [asyncio.create_task(pump.run(handle.output.reader))]
    if handle.stacks is not None:
        stacks = OutputPump(current, write_line, buffer=handle.written.stacks)
        readers.append(asyncio.create_task(stacks.run(handle.stacks.reader)))
    if watched is not None and handle.reports is not None:
        readers.append(asyncio.create_task(watched.read(handle.reports.reader)))
    if handle.events is not None:
        readers.append(asyncio.create_task(_read_events(handle.events.reader, current, event_queue)))
    try:
        code = await handle.wait()
        handle.close_reports()
        await asyncio.wait(readers, timeout=OUTPUT_DRAIN_SECONDS)
        if watched is not None:
            watched.end()
            await watched.verified(VERIFY_SECONDS)
    finally:
        for reader in readers:
            reader.cancel()
        for pipe in (handle.output, handle.events, handle.stacks, handle.reports):
            if pipe is not None:
                pipe.close()
    if handle.commands is not None:
        handle.commands.close()
    pump.close()
    tail = error_file.with_recorded_error(pump.tail, handle.error_file if code else None)
    event_queue.put_nowait(RankExited(current.number, current.rank, code, tail, handle.pid))


class _ProgressWatch:
    """Turns what the user's command reports, in its report file or in its log, into events."""

    def __init__(self, handle: RankHandle, generation: int, event_queue: EventQueue) -> None:
        self._rank, self._generation, self._event_queue = handle.rank, generation, event_queue
        self._patterns = handle.patterns
        self._progress = CommandProgress(handle.checkpoint_directory)
        self._warned = False
        self._checkpoints = handle.checkpoints
        self._saved: messages.CheckpointSaved | None = None
        self._verification: asyncio.Task[None] | None = None

    def on_line(self, line: str) -> None:
        """Search a line of the log, unless the command reports its progress in its file."""
        found = self._patterns.read(line) if self._patterns is not None else None
        if found is not None:
            self._tell_logged(self._progress.messages(found, time.monotonic()))

    def _tell_logged(self, found: Iterable[messages.RankMessage]) -> None:
        for message in found:
            if isinstance(message, messages.StepDone):
                self._event_queue.put_nowait(ProgressLogged(self._generation, self._rank, message.report))

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Read the report file until no process has it open."""
        while True:
            try:
                if not (line := await reader.readline()):
                    return
                found = parse_line(line.strip())
            except ValueError as error:  # also raised for a line that is too long
                if not self._warned:
                    log.warning("rank %d wrote an invalid line to its report file, ignored: %s", self._rank, error)
                self._warned = True
                continue
            if isinstance(found, ReportedWork):
                for load in self._progress.load_messages(found, time.monotonic()):
                    self._event_queue.put_nowait(RankMessageReceived(self._generation, self._rank, load))
                continue
            self._patterns = None
            for message in self._progress.messages(found, time.monotonic()):
                if isinstance(message, messages.CheckpointSaved) and self._checkpoints is not None:
                    self._verify(self._checkpoints, message)
                else:
                    self._event_queue.put_nowait(RankMessageReceived(self._generation, self._rank, message))

    def end(self) -> None:
        """Report the last step, also if it came too soon after the one before."""
        rest = self._progress.rest(time.monotonic())
        if self._patterns is not None:
            self._tell_logged(rest)
            return
        for message in rest:
            self._event_queue.put_nowait(RankMessageReceived(self._generation, self._rank, message))

    def _verify(self, checkpoints: SavedCheckpoints, message: messages.CheckpointSaved) -> None:
        """Report a checkpoint once it is verified. While one is verified, only the newest other one waits."""
        self._saved = message
        if self._verification is None or self._verification.done():
            self._verification = asyncio.create_task(self._verify_newest(checkpoints))

    async def _verify_newest(self, checkpoints: SavedCheckpoints) -> None:
        while (message := self._saved) is not None:
            self._saved = None
            if await checkpoints.accept(message.step, message.path):
                self._event_queue.put_nowait(RankMessageReceived(self._generation, self._rank, message))

    async def verified(self, seconds: float) -> None:
        """Wait until no checkpoint is being verified; after `seconds`, stop the verification."""
        if self._verification is None:
            return
        await asyncio.wait([self._verification], timeout=seconds)
        self._verification.cancel()


async def _read_events(reader: asyncio.StreamReader, current: CurrentGeneration, event_queue: EventQueue) -> None:
    line = b""
    while True:
        try:
            line = await reader.readline()
            if not line:
                return
            message = messages.decode(line)
        except ValueError:  # also raised for a line that is too long
            log.warning("rank %d wrote an event that cannot be read: %.200r", current.rank, line)
            continue
        event_queue.put_nowait(RankMessageReceived(current.number, current.rank, message))


async def open_command_pipe() -> tuple[asyncio.WriteTransport, int]:
    """Open a pipe: returns the write end for the event loop, and the descriptor from which a process reads."""
    read, write = os.pipe2(os.O_CLOEXEC)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(write, "wb", buffering=0))
    return transport, read


async def open_pipe() -> tuple[Pipe, int]:
    """Open a pipe: returns the read end for the event loop, and the descriptor that a process writes to."""
    read, write = os.pipe2(os.O_CLOEXEC)
    reader = asyncio.StreamReader(limit=EVENT_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", buffering=0)
    )
    return Pipe(reader, transport), write


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process that may have just exited."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def process_state(pid: int) -> str:
    """Return the state letter of a process (proc(5)); empty if it does not exist or there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0][:1]
    except (OSError, IndexError):
        return ""


def command_state(guard: int) -> str:
    """Return the state letter of the user's command, which is the first child of its guard; empty if it is unknown."""
    try:
        child = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0]
    except (OSError, IndexError):
        return ""
    return process_state(int(child))


async def open_report_file(path: str) -> tuple[Pipe, int]:
    """Create the named pipe to which a command reports its progress: the read end, and a descriptor that keeps it open.

    Raises:
        OSError: it cannot be created.
    """
    os.mkfifo(path, 0o600)
    read = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    write = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    reader = asyncio.StreamReader(limit=REPORT_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", buffering=0)
    )
    return Pipe(reader, transport), write


def _closer(descriptor: int) -> Callable[[], None]:
    """A function that closes the descriptor when it is called for the first time."""
    still_open = [descriptor]

    def close() -> None:
        while still_open:
            os.close(still_open.pop())

    return close


async def _report_file(rank: int, environment: Mapping[str, str]) -> tuple[Pipe | None, Callable[[], None]]:
    """The pipe in which the command reports its progress, if it can, and a function that ends it."""
    if path := environment.get(labels.ENV_REPORT_FILE):
        try:
            reports, write = await open_report_file(path)
        except OSError as error:
            log.warning("rank %d cannot report its progress: %s", rank, error)
        else:
            return reports, _closer(write)
    return None, lambda: None


async def _start_guard(
    command: Sequence[str], environment: Mapping[str, str], lifeline: int, output: int
) -> asyncio.subprocess.Process:
    """Start the guard of a command. It stops when the other end of the pipe `lifeline` is closed.

    Raises:
        OSError: no process can be started.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        # An injected agent ignores what the user's image says to Python, and its guards do too.
        *(("-I",) if sys.flags.isolated else ()),
        *("-m", "meshwright_worker.rank.command_guard", *command),
        stdin=lifeline,
        stdout=output,
        stderr=output,
        env=dict(environment),
        start_new_session=True,
    )


async def start_command(rank: int, command: Sequence[str], environment: Mapping[str, str]) -> RankHandle:
    """Start `command` with exactly `environment` as the process of `rank`.

    It runs under a guard (`meshwright_worker.rank.command_guard`) that dies with this agent.

    Raises:
        OSError: no process can be started. If the command does not exist, this does not raise: its rank exits with 127.
    """
    with contextlib.ExitStack() as guards_ends, contextlib.ExitStack() as own_ends:
        output, output_write = await open_pipe()
        own_ends.callback(output.close)
        guards_ends.callback(os.close, output_write)
        reports, close_reports = await _report_file(rank, environment)
        own_ends.callback(close_reports)
        if reports is not None:
            own_ends.callback(reports.close)
        lifeline_read, lifeline = os.pipe2(os.O_CLOEXEC)
        own_ends.callback(os.close, lifeline)
        guards_ends.callback(os.close, lifeline_read)
        process = await _start_guard(command, environment, lifeline_read, output_write)
        own_ends.pop_all()
    handle = _handle_of_command(rank, process, kill_guard=_closer(lifeline), output=output)
    recorded = environment.get(error_file.VARIABLE)
    return replace(
        handle, reports=reports, close_reports=close_reports, error_file=Path(recorded) if recorded else None
    )


def _handle_of_command(
    rank: int, process: asyncio.subprocess.Process, *, kill_guard: Callable[[], None], output: Pipe
) -> RankHandle:
    """A command's process. `kill_guard` makes its guard kill every process of the command, and exit."""

    async def wait() -> int:
        code = await process.wait()
        kill_guard()
        return code

    def terminate() -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal_process(process.pid, signal.SIGTERM)

    return RankHandle(
        rank=rank,
        pid=process.pid,
        wait=wait,
        terminate=terminate,
        kill=kill_guard,
        output=output,
        events=None,
        dump_stacks=lambda: abort_with_stacks(process.pid),
    )
