"""Container logs: files in the format of the Container Runtime Interface, read with the options of `kubectl logs`."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright_local.kube import timestamps

_POLL_SECONDS = 0.1
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The query of a log request: PodLogOptions."""

    follow: bool
    previous: bool
    timestamps: bool
    tail_lines: int | None
    limit_bytes: int | None
    since: datetime.datetime | None

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> LogOptions:
        """Parse a query.

        Raises:
            ValueError: A field is not a number or time; the message names it.
        """
        numbers: dict[str, int] = {}
        for name in {"tailLines", "limitBytes", "sinceSeconds"} & set(query):
            if not query[name].isdigit():
                raise ValueError(f"{name}: {query[name]!r} is not an integer of at least 0")
            numbers[name] = int(query[name])
        since = None
        if "sinceSeconds" in numbers:
            since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=numbers["sinceSeconds"])
        elif "sinceTime" in query:
            try:
                since = timestamps.parse(query["sinceTime"])
            except ValueError as error:
                raise ValueError(f"sinceTime: {query['sinceTime']!r} is not RFC 3339") from error
        follow, previous, stamped = (query.get(name) == "true" for name in ("follow", "previous", "timestamps"))
        return cls(follow, previous, stamped, numbers.get("tailLines"), numbers.get("limitBytes"), since)


async def stream(path: Path, options: LogOptions, ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield the log's text in chunks; with `follow` until `ended()` and everything is read."""
    position, tail, left = 0, options.tail_lines, options.limit_bytes
    while left is None or left > 0:
        over = ended()
        data = await asyncio.to_thread(_read, path, position, _CHUNK if tail is None else -1)
        position += len(data)
        records = data.split(b"\n")[:-1]
        if tail is not None:
            records, tail = _last(records, tail), None
        text = b"".join(_render(record, options) for record in records)[:left]
        left = None if left is None else left - len(text)
        if text:
            yield text
        if not data and (over or not options.follow):
            return
        if not data:
            await asyncio.sleep(_POLL_SECONDS)


def _read(path: Path, position: int, size: int) -> bytes:
    """Return complete records after a position. Every record is shorter than the requested size."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            data = file.read(size)
    except FileNotFoundError:
        return b""
    return data[: data.rfind(b"\n") + 1]


def _last(records: list[bytes], count: int) -> list[bytes]:
    """Return the records of the last lines. A line ends with a record marked as full."""
    ends = [index for index, record in enumerate(records) if record.split(b" ", 3)[2:3] == [b"F"]]
    return records[ends[-count - 1] + 1 :] if len(ends) > count else records


def _render(record: bytes, options: LogOptions) -> bytes:
    """Return one record as the reader gets it; empty if it is too old or damaged."""
    stamp, *rest = record.split(b" ", 3)
    if len(rest) < 3 or (options.since is not None and timestamps.parse(stamp.decode()) < options.since):
        return b""
    _, flag, text = rest
    return (stamp + b" " if options.timestamps else b"") + text + (b"" if flag == b"P" else b"\n")
