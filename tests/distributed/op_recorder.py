"""Watching every operation of a rank, whichever thread runs it."""

from __future__ import annotations

import threading
from typing import Any, Self

from torch.utils._python_dispatch import TorchDispatchMode

from meshwright_worker.parallel import overlapped_passes


class EveryPass(TorchDispatchMode):
    """A mode that the helper thread of an overlapped pair enters too: torch gives each thread modes of its own.

    Backward passes on the CPU run in the thread that calls them, so they are watched as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entered = 0
        self._run_second = overlapped_passes._run_second
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                overlapped_passes._run_second = self._follow
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                overlapped_passes._run_second = self._run_second

    def _follow(self, *arguments: Any) -> None:
        with self:
            self._run_second(*arguments)
