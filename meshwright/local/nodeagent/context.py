"""What the parts of one running pod share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import aiohttp

from meshwright.local.events import EventRecorder
from meshwright.local.nodeagent.fields import PodPlace
from meshwright.local.nodeagent.references import References
from meshwright.local.resources import Object


@dataclass(slots=True)
class PodContext:
    """A pod on this node: its object, its place, its directories and whom it talks to."""

    pod: Object
    """The newest version of the object that is known."""
    place: PodPlace
    directory: Path
    temporary: Path
    references: References
    recorder: EventRecorder
    session: aiohttp.ClientSession
    restart_pause: float
    """Seconds before the second restart of a container; doubled each time. The first restart is immediate."""
    changed: Callable[[], None]
    """To be called whenever the state of a container changed."""
    volumes: dict[str, Path] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        """The directory its containers start in."""
        return self.directory / "home"

    def log_directory(self, container: str) -> Path:
        """Where a container's logs are, one file per restart: `0.log`, `1.log`, ..."""
        return self.directory / "logs" / container

    def event(self, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Tell people what happened to the pod."""
        self.recorder.emit(self.pod, kind, reason, message)
