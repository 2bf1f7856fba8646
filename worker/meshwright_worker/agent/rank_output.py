"""Output of ranks: written line by line to the pod's log with the rank as a prefix; the last lines are kept for
failures.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable

TAIL_LINES = 40
MAX_LINE = 8192
CHUNK = 65536
# Progress bars end their updates with a carriage return.
_END_OF_LINE = re.compile(rb"\r\n|\n|\r")


class OutputPump:
    """Reads one rank's output until its end. Writes only entire lines, since many ranks share the pod's log."""

    def __init__(self, rank: int, write_line: Callable[[str], None]) -> None:
        self._prefix = f"[rank {rank}] "
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
            self.tail.append(text)
            self._write_line(self._prefix + text)
