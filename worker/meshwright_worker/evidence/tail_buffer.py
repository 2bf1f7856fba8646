"""The end of a stream, in memory of a fixed size."""

from __future__ import annotations

from collections import deque

LOG_BYTES = 65536
"""How much of the end of a failed rank's log is recorded."""
MARGIN_BYTES = 8192
"""What is kept in addition, so that a secret at the beginning is complete when it is masked."""
CUT = "[earlier lines are left out]\n"


class TailBuffer:
    """The last bytes of a stream."""

    def __init__(self, size: int = LOG_BYTES + MARGIN_BYTES) -> None:
        self._size = size
        self._chunks: deque[bytes] = deque()
        self._bytes = 0
        self.cut = False
        """Whether the beginning is missing."""
        self.written = 0
        """Bytes of the entire stream so far."""

    def feed(self, chunk: bytes) -> None:
        """Append bytes, and forget the oldest that do not fit."""
        self._chunks.append(chunk)
        self._bytes += len(chunk)
        self.written += len(chunk)
        while self._bytes - len(self._chunks[0]) >= self._size:
            self._bytes -= len(self._chunks.popleft())
            self.cut = True

    def text(self) -> str:
        """The content as text. Progress bars end their updates with a carriage return: these are lines too."""
        content = b"".join(self._chunks)
        if len(content) > self._size:
            self.cut, content = True, content[-self._size :]
        return content.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def last_lines(text: str, size: int, *, cut: bool = False) -> str:
    """The last complete lines of a text, of at most `size` bytes of UTF-8. The first line says if some are left out.

    Args:
        text: lines.
        size: bytes.
        cut: whether the beginning of the first line is missing already.
    """
    encoded = text.encode(errors="replace")
    if len(encoded) <= size and not cut:
        return text
    room = max(0, size - len(CUT))
    kept = encoded[max(0, len(encoded) - room) :].decode(errors="ignore")
    begins = len(encoded) > room and not text[: len(text) - len(kept)].endswith("\n")
    if (cut or begins) and "\n" in kept:
        kept = kept.partition("\n")[2]
    return CUT + kept if room else ""
