"""The error that a rank of the user's command records with torch's `@record`, in the file that torchrun names too."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from meshwright.printable import printable

VARIABLE = "TORCHELASTIC_ERROR_FILE"
MAX_BYTES = 1 << 20
MAX_LINES = 20


def recorded_error(path: Path) -> list[str]:
    """The lines of the error in a file, without its stack. Empty if there is none, or if it is not valid."""
    try:
        # The command may have put a pipe there, which nobody writes to.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = json.loads(file.read(MAX_BYTES)) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except (OSError, ValueError, RecursionError):
        return []
    message = found.get("message") if isinstance(found, dict) else None
    if isinstance(message, dict):
        message = message.get("message")
    # A file's name that is not UTF-8 is in JSON as characters that no report can have.
    return [printable(line) for line in message.splitlines()[:MAX_LINES]] if isinstance(message, str) else []


def with_recorded_error(tail: Sequence[str], path: Path | None) -> tuple[str, ...]:
    """The last lines of a rank's output, with the error that it has recorded unless they have it already.

    A rank that logs much while it exits, or whose logging swallows exceptions, does not end with its error.
    """
    error = recorded_error(path) if path is not None else []
    if not error or any(line.rstrip().endswith(error[0]) for line in tail):
        return tuple(tail)
    return (*tail, *error)
