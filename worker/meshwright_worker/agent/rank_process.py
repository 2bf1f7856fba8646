"""Live rank processes: their pipes are read, their end is awaited, and both become events in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright_worker.agent.events import EventQueue, RankExited, RankMessageReceived
from meshwright_worker.agent.rank_output import OutputPump
from meshwright_worker.rank import messages

log = logging.getLogger(__name__)

# A process that a rank left behind may hold its pipes open; the rank's own last words are there long before.
OUTPUT_DRAIN_SECONDS = 1.0


EVENT_BYTES = 1 << 20
"""The longest event: a step's tells of each mixture of the model, and there may be a thousand."""


@dataclass(frozen=True, slots=True)
class Pipe:
    """The end of a pipe that this process reads."""

    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport

    def close(self) -> None:
        """Read no more, whoever still writes."""
        self.transport.close()


@dataclass(frozen=True, slots=True)
class RankHandle:
    """A started process and the means to reach it."""

    rank: int
    pid: int
    wait: Callable[[], Awaitable[int]]
    """Waits for its end: the exit code, minus the signal's number when killed."""
    terminate: Callable[[], None]
    """Asks it to stop (SIGTERM)."""
    kill: Callable[[], None]
    """Ends it at once, and what it started."""
    output: Pipe
    events: Pipe | None
    """None for the user's command, which tells nothing."""


async def supervise(
    handle: RankHandle, generation: int, event_queue: EventQueue, write_line: Callable[[str], None]
) -> None:
    """Turn one rank's life into events; the last is `RankExited`, after everything that the rank told."""
    pump = OutputPump(handle.rank, write_line)
    readers = [asyncio.create_task(pump.run(handle.output.reader))]
    if handle.events is not None:
        readers.append(asyncio.create_task(_read_events(handle.events.reader, handle.rank, generation, event_queue)))
    try:
        code = await handle.wait()
        await asyncio.wait(readers, timeout=OUTPUT_DRAIN_SECONDS)
    finally:
        for reader in readers:
            reader.cancel()
        for pipe in (handle.output, handle.events):
            if pipe is not None:
                pipe.close()
    pump.close()
    event_queue.put_nowait(RankExited(generation, handle.rank, code, tuple(pump.tail)))


async def _read_events(reader: asyncio.StreamReader, rank: int, generation: int, event_queue: EventQueue) -> None:
    line = b""
    while True:
        try:
            line = await reader.readline()
            if not line:
                return
            message = messages.decode(line)
        except ValueError:  # a line that is too long, too
            log.warning("rank %d wrote an event that cannot be read: %.200r", rank, line)
            continue
        event_queue.put_nowait(RankMessageReceived(generation, rank, message))


async def open_pipe() -> tuple[Pipe, int]:
    """A pipe to read from in the event loop, and the descriptor that a process is to write to."""
    read, write = os.pipe2(os.O_CLOEXEC)
    reader = asyncio.StreamReader(limit=EVENT_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", buffering=0)
    )
    return Pipe(reader, transport), write


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process that may just have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def process_state(pid: int) -> str:
    """The state letter of a process (proc(5)); empty when it is gone, or there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0][:1]
    except (OSError, IndexError):
        return ""
