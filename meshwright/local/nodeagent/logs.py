"""Container logs: files in the format of the Container Runtime Interface, read as `kubectl logs` asks for them."""

from __future__ import annotations

import asyncio
import datetime
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.local import clock

_POLL_SECONDS = 0.1
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The query of a log request."""

    follow: bool = False
    tail_lines: int | None = None
    since: datetime.datetime | None = None
    timestamps: bool = False
    limit_bytes: int | None = None
    previous: bool = False

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> LogOptions:
        """Read PodLogOptions as a kubelet gets them.

        Raises:
            ValueError: A field that is no number or time; the message names it.
        """
        since = None
        if "sinceSeconds" in query:
            since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=_number(query, "sinceSeconds"))
        elif "sinceTime" in query:
            try:
                since = clock.parse(query["sinceTime"])
            except ValueError as error:
                raise ValueError(f"sinceTime: {query['sinceTime']!r} is not RFC 3339") from error
        return cls(
            follow=query.get("follow") == "true",
            tail_lines=_number(query, "tailLines") if "tailLines" in query else None,
            since=since,
            timestamps=query.get("timestamps") == "true",
            limit_bytes=_number(query, "limitBytes") if "limitBytes" in query else None,
            previous=query.get("previous") == "true",
        )


def _number(query: Mapping[str, str], field: str) -> int:
    text = query[field]
    if not text.isdigit():
        raise ValueError(f"{field}: {text!r} is not a whole number of 0 or more")
    return int(text)


async def stream(path: Path, options: LogOptions, ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    """The log's text in pieces; with `follow` until `ended()` and everything was read."""
    left = options.limit_bytes
    async for record in _records(path, options, ended):
        text = _render(record, options)
        if text is None:
            continue
        if left is not None:
            text = text[:left]
            left -= len(text)
        yield text
        if left == 0:
            return


async def _records(path: Path, options: LogOptions, ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    position, rest = 0, b""
    if options.tail_lines is not None:
        records, position = await asyncio.to_thread(_tail, path, options.tail_lines)
        for record in records:
            yield record
    while True:
        over = ended()
        data = await asyncio.to_thread(_read, path, position)
        position += len(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
        if data:
            continue
        if over or not options.follow:
            return
        await asyncio.sleep(_POLL_SECONDS)


def _read(path: Path, position: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read(_CHUNK)
    except FileNotFoundError:
        return b""


def _tail(path: Path, count: int) -> tuple[list[bytes], int]:
    """The records of the last lines, and the position after them."""
    kept: deque[list[bytes]] = deque(maxlen=count)
    position, parts = 0, list[bytes]()
    for record in _complete(path):
        position += len(record) + 1
        parts.append(record)
        if record.split(b" ", 3)[2:3] != [b"P"]:
            kept.append(parts)
            parts = []
    if parts:
        kept.append(parts)
    return [record for line in kept for record in line], position


def _complete(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line[:-1]
    except FileNotFoundError:
        return


def _render(record: bytes, options: LogOptions) -> bytes | None:
    """One record as it goes to the reader; None when it is too old or damaged."""
    parts = record.split(b" ", 3)
    if len(parts) < 4:
        return None
    stamp, _, flag, text = parts
    if options.since is not None and clock.parse(stamp.decode()) < options.since:
        return None
    head = stamp + b" " if options.timestamps else b""
    return head + text + (b"" if flag == b"P" else b"\n")
