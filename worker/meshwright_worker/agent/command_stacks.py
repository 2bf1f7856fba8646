"""Asks the processes of a user's command for the stacks of their threads.

Python's fault handler writes them to standard error when the process gets SIGABRT, which ends it. It is active if
`PYTHONFAULTHANDLER` is set, as the agent does unless the container sets the variable itself.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path

ENABLE = {"PYTHONFAULTHANDLER": "1"}
MAX_PROCESSES = 64


def abort_with_stacks(guard: int) -> list[int]:
    """Make the Python processes below `guard` write their stacks and exit. Returns their process ids.

    Processes that do not handle SIGABRT are left alone: they would write nothing.
    """
    asked = []
    for pid in _descendants(guard):
        if _handles(pid, signal.SIGABRT):
            with contextlib.suppress(OSError, ValueError):
                # A core file of a rank may be as large as the memory of the node.
                resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
                os.kill(pid, signal.SIGABRT)
                asked.append(pid)
    return asked


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    waiting = [pid]
    while waiting and len(found) < MAX_PROCESSES:
        parent = waiting.pop(0)
        with contextlib.suppress(OSError, ValueError):
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            waiting += [int(child) for child in children]
        found += [parent] if parent != pid else []
    return found


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    except (OSError, StopIteration, IndexError):
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)
