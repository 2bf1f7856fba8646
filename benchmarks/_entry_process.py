"""Runs entries of a benchmark in another process, one after the other.

An error of CUDA leaves its process without a usable device, and a crash ends it. Neither may cost the other entries
their results: the next entry gets a new process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

Outcome = tuple[Any, Any, str]
"""A setting and its results, or None twice and what went wrong."""
Run = Callable[[Any, int, bool], Outcome]


class EntryProcess:
    """The process, started when it is first needed.

    Args:
        run: what it runs: given an entry, a number of steps, and whether it is to be quick, returns a setting, its
            steps, and what went wrong.
        limit: seconds for an entry.
    """

    def __init__(self, run: Run, limit: float) -> None:
        self._run, self._limit = run, limit
        self._context = multiprocessing.get_context("spawn")
        self._started: tuple[SpawnProcess, Connection] | None = None

    def outcome(self, entry: Any, steps: int, *, quick: bool) -> Outcome:
        """What an entry came to."""
        process, connection = self._started = self._started or self._start()
        try:
            connection.send((entry, steps, quick))
            if not connection.poll(self._limit):
                return self._lost(f"did not end within {self._limit:.0f} s")
            outcome: Outcome = connection.recv()
        except (EOFError, OSError):
            process.join()
            return self._lost(f"its process ended with exit code {process.exitcode}")
        if "CUDA" in outcome[2]:
            self.close()
        return outcome

    def close(self) -> None:
        """End the process."""
        if self._started is not None:
            process, connection = self._started
            connection.close()
            process.kill()
            process.join()
        self._started = None

    def _start(self) -> tuple[SpawnProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._run), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _lost(self, problem: str) -> Outcome:
        self.close()
        return None, None, problem


def _serve(connection: Connection, run: Run) -> None:
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(run(*request))
