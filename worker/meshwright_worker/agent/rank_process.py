"""Live rank processes: reads their pipes, waits for their exit, and turns both into events in order."""

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

# A process that a rank left behind may keep its pipes open; the rank's last output arrives long before this.
OUTPUT_DRAIN_SECONDS = 1.0


EVENT_BYTES = 1 << 20
"""Maximum size of an event: a step's event has an entry for each mixture layer, and there may be a thousand."""


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


async def supervise(
    handle: RankHandle, generation: int, event_queue: EventQueue, write_line: Callable[[str], None]
) -> None:
    """Turn one rank's output and exit into events. The last is `RankExited`, after every message of the rank."""
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
        except ValueError:  # also raised for a line that is too long
            log.warning("rank %d wrote an event that cannot be read: %.200r", rank, line)
            continue
        event_queue.put_nowait(RankMessageReceived(generation, rank, message))


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
