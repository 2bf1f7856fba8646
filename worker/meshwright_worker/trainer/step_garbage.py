"""Collects Python's garbage at the same steps on all ranks.

A collection stops a rank for milliseconds, whenever it has created enough objects. Ranks do so at different times, and
all others wait for each of them in the next collective.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class StepGarbage:
    """Collects after every `every` steps and at no other time; None leaves it to Python."""

    def __init__(self, every: int | None) -> None:
        self._every = every

    @contextmanager
    def controlled(self) -> Iterator[None]:
        """Turn automatic collections off in the block. Objects from before it are not searched again in it."""
        if self._every is None or not gc.isenabled():
            yield
            return
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
            gc.unfreeze()

    def after(self, step: int) -> None:
        """Collect, if that is due after `step`."""
        if self._every is not None and step % self._every == 0:
            gc.collect()
