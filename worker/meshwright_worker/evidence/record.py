"""The record of one failed rank, and its files. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

HANG = "Hang"
"""Kind of a rank that was killed because it made no progress. The other kinds are those of `FailureKind`."""

RECORD_FILE = "failure.json"
LOG_FILE = "log.txt"
STACKS_FILE = "stacks.txt"
VERSION = 1

MAX_PHASES = 32
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
"""The beginning of a thread's stack, as Python's fault handler writes it."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """What is known about a rank that failed or was killed. Secrets are masked."""

    job: str
    namespace: str
    pod: str
    worker: int
    incarnation: int
    generation: int
    rank: int
    kind: str
    """Kind of the failure, or `Hang`."""
    message: str
    time: str
    """When it was recorded, RFC 3339."""
    exit_code: int | None = None
    """Exit code; minus the number of the signal that killed it; None if it was alive."""
    step: int | None = None
    """Last step that it completed in this generation."""
    idle_seconds: float = 0.0
    """Time since its last progress."""
    process_state: str = ""
    """State letter of its process (proc(5)), if it was alive."""
    phases: tuple[tuple[str, float], ...] = ()
    """Name and seconds of each phase of its start."""
    log: str = ""
    """The end of its output."""
    stacks: str = ""
    """The stacks of its threads; empty if there are none."""

    def description(self) -> dict[str, Any]:
        """Everything but log and stacks, for JSON."""
        fields = asdict(self)
        del fields["log"], fields["stacks"]
        phases = [{"name": name, "seconds": round(seconds, 3)} for name, seconds in self.phases[:MAX_PHASES]]
        return {"version": VERSION, **fields, "phases": phases}

    def files(self) -> dict[str, bytes]:
        """The files of the record, by name. The description comes last: with it, the record is complete."""
        found = {LOG_FILE: self.log.encode(errors="replace")}
        if self.stacks:
            found[STACKS_FILE] = self.stacks.encode(errors="replace")
        found[RECORD_FILE] = (json.dumps(self.description(), indent=2) + "\n").encode()
        return found


def current_thread_first(text: str) -> str:
    """The stacks that Python's fault handler wrote, first that of the thread which the signal interrupted.

    That is usually the thread that trains.
    """
    head, *threads = _THREAD.split(text)
    return head + "".join(sorted(threads, key=lambda thread: not thread.startswith("Current thread")))
