"""Waits for the threads of gloo, which have tensors of a collective for a moment after it is done."""

from __future__ import annotations

import time
from pathlib import Path

from tests.patience import patient

NAME = "pt_gloo_runloop"
LOOKS = 3
"""How often in a row none may run: one that waits for the interpreter's lock looks as if it slept."""


def wait_for_gloo() -> None:
    """Wait until no thread of gloo is about to free anything. Only those are left that wait for another rank."""
    idle, deadline = 0, time.monotonic() + patient(10)
    while idle < LOOKS and time.monotonic() < deadline:
        time.sleep(0.002 * 4**idle)  # without the interpreter's lock, which they need
        idle = 0 if _any_runs() else idle + 1


def _any_runs() -> bool:
    for thread in Path("/proc/self/task").iterdir():
        try:
            _, _, rest = (thread / "stat").read_text().partition("(")
        except OSError:  # it has ended
            continue
        name, _, fields = rest.rpartition(")")
        if name == NAME and fields.split()[0] == "R":
            return True
    return False
