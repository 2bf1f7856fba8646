"""Waits for the threads of gloo, which have tensors of a collective for a moment after it is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.patience import patient

NAME = "pt_gloo_runloop"
LOOKS = 3
"""How often in a row none may run: one that waits for the interpreter's lock looks as if it slept."""
SMALL = 1.01
"""A count that grows by less is no collective's tensor that is left."""


def most_of(most: int, count: Callable[[], int]) -> int:
    """The larger one of the most bytes so far and those of now."""
    now = count()
    if now > SMALL * most:
        wait_for_gloo()
        now = count()
    return max(most, now)


def wait_for_gloo() -> None:
    """Wait until no thread of gloo is about to free anything. Only those are left that wait for another rank."""
    if not _states():
        return
    idle, deadline = 0, time.monotonic() + patient(10)
    while idle < LOOKS and time.monotonic() < deadline:
        time.sleep(0.002 * 4**idle)  # without the interpreter's lock, which they need
        idle = 0 if "R" in _states() else idle + 1


def _states() -> set[str]:
    """What the threads of gloo do, as the kernel says."""
    states = set()
    for thread in Path("/proc/self/task").iterdir():
        try:
            name, _, fields = (thread / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if name == NAME:
            states.add(fields.split()[0])
    return states
