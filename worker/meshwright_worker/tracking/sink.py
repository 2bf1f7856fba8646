"""What a tracker does with records. A sink may raise any error: the tracking process counts it, and continues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from meshwright_worker.tracking.records import Event


class Sink(ABC):
    """One tracker. It is created when tracking starts, and writes no step twice over all starts of a job."""

    @abstractmethod
    def step(self, record: dict[str, Any]) -> None:
        """Write the numbers of a step."""

    @abstractmethod
    def event(self, event: Event) -> None:
        """Write a start, a restart or a change of size."""

    @abstractmethod
    def close(self) -> None:
        """Write what is buffered."""
