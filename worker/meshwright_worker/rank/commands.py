"""Commands from the agent to a rank's process that holds its state between generations: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.rank.task import RankTask

TASK = TypeAdapter(RankTask[NativeRun])


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the current generation, and hold the state."""

    generation: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on in another generation, with the state that the process holds."""

    task: RankTask[NativeRun]
    environment: dict[str, str]


Command = Leave | Resume


def encode_leave(generation: int) -> bytes:
    """Encode a command to leave a generation."""
    return json.dumps({"leave": generation}).encode() + b"\n"


def encode_resume(task: RankTask[NativeRun], environment: Mapping[str, str]) -> bytes:
    """Encode a command to go on in the task's generation."""
    command = {"resume": TASK.dump_python(task, mode="json"), "environment": dict(environment)}
    return json.dumps(command).encode() + b"\n"


def decode(line: bytes) -> Command:
    """Decode a command.

    Raises:
        ValueError: it is none.
    """
    match json.loads(line):
        case {"leave": int(generation)}:
            return Leave(generation)
        case {"resume": task, "environment": dict(environment)}:
            return Resume(TASK.validate_python(task), environment)
    raise ValueError(f"not a command: {line[:200]!r}")
