"""Log lines as text or as JSON, one object per line: time, level, message, and fields.

A reconcile sets the fields `job` and `generation` once, for everything it calls. Tokens are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

FORMATS = ("text", "json")
STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "settings"}

_subject: ContextVar[dict[str, object] | None] = ContextVar("subject", default=None)


@contextmanager
def log_context(**fields: object) -> Iterator[None]:
    """Adds these fields to every line that is logged inside the block, also by the functions it calls."""
    token = _subject.set({**(_subject.get() or {}), **fields})
    try:
        yield
    finally:
        _subject.reset(token)


class TextFormatter(logging.Formatter):
    """One line per record, with its fields as `key=value`. Values with spaces are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, followed by its traceback, if any."""
        text = "".join(f" {key}={_value(value)}" for key, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname.lower():7} {_one_line(record.getMessage())}{text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the traceback as a field."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "logger": record.name,
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str, style: str = "text") -> None:
    """Sends records of `level` and above to standard error, in one of `FORMATS`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Records of libraries below warning are about their internals.
    for name in ("kopf", "aiohttp", "kubernetes", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    given = {k: v for k, v in vars(record).items() if k not in STANDARD and not k.startswith(("k8s_", "_"))}
    return {**(_subject.get() or {}), **given}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _value(value: object) -> str:
    text = str(value)
    return repr(text) if not text.isprintable() or not text or any(c in ' "' for c in text) else text


def _one_line(message: str) -> str:
    """The message with control characters escaped: an event may repeat what a user's pod has written."""
    return message if message.isprintable() else repr(message)[1:-1]
