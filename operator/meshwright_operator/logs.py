"""Log lines for people and machines: time, level, what happened, then key=value. Never a token."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LineFormatter(logging.Formatter):
    """One line per record; what was given as `extra` follows as `key=value`, quoted where it has spaces."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line, followed by the traceback if it carries one."""
        moment = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        fields = {k: v for k, v in vars(record).items() if k not in STANDARD and not k.startswith(("k8s_", "_"))}
        text = "".join(f" {key}={_value(value)}" for key, value in fields.items() if key not in ("settings",))
        line = f"{moment}Z {record.levelname.lower():7} {record.getMessage()}{text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(level: str) -> None:
    """Sends everything of `level` and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # What the libraries say below warning is about themselves.
    for name in ("kopf", "aiohttp", "kubernetes", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


def _value(value: object) -> str:
    text = str(value)
    return repr(text) if not text or any(c.isspace() or c == '"' for c in text) else text
