"""Stores the last measured timeline of a pipeline next to the job's checkpoints, for reports after its pods are gone.

A rank's agent writes it when the rank exits. It is small, and replaces the one before. Failures are only logged.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from meshwright.schedules.measured import STORED_DIRECTORY, RankTimeline, stored_name, stored_text
from meshwright_worker.agent.volume_writes import VolumeWrites

log = logging.getLogger(__name__)


class TimelineWriter:
    """Writes the timelines of this pod's ranks. Without a checkpoint volume it does nothing."""

    def __init__(self, checkpoint_dir: str | None) -> None:
        self._directory = Path(checkpoint_dir) / STORED_DIRECTORY if checkpoint_dir else None
        self._written: dict[int, RankTimeline] = {}
        self._writes = VolumeWrites()

    def write(self, timeline: RankTimeline | None) -> None:
        """Store a rank's timeline, if there is one that is not stored yet."""
        if self._directory is None or timeline is None or self._written.get(timeline.stage) == timeline:
            return
        self._written[timeline.stage] = timeline
        directory = self._directory
        self._writes.start("timeline", lambda: _write(directory, timeline))

    async def flush(self) -> None:
        """Wait until everything is written, for a limited time."""
        await self._writes.flush()


def _write(directory: Path, timeline: RankTimeline) -> None:
    final = directory / stored_name(timeline.stage)
    hidden = final.with_name(f".writing-{os.getpid()}-{final.name}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        hidden.write_text(stored_text(timeline))
        hidden.replace(final)
    except OSError as error:
        log.warning("the timeline of stage %d is not stored: %s", timeline.stage, error)
