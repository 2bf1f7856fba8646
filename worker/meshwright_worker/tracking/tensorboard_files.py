"""Event files of TensorBoard. A restart begins a file whose session purges the steps after the checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event as FileEvent
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from meshwright_worker.tracking.records import Event, Start, metrics_of
from meshwright_worker.tracking.sink import Sink

FOLDER = "tensorboard"


class TensorBoard(Sink):
    """Scalars by tag."""

    def __init__(self, start: Start) -> None:
        self._writer = EventFileWriter(str(Path(start.directory) / FOLDER), flush_secs=5)
        # Readers drop the steps from this one on that earlier files have.
        session = SessionLog(status=SessionLog.START)
        self._writer.add_event(FileEvent(wall_time=time.time(), step=start.step + 1, session_log=session))

    def step(self, record: dict[str, Any]) -> None:
        """Write a scalar for each number."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics_of(record).items()]
        at = float(record.get("time", time.time()))
        self._writer.add_event(FileEvent(wall_time=at, step=record["step"], summary=Summary(value=values)))

    def event(self, event: Event) -> None:
        """Write ranks and replicas as scalars, which change where the job restarts or changes its size."""
        values = [
            Summary.Value(tag=f"meshwright/{name}", simple_value=float(value))
            for name, value in (("ranks", event.ranks), ("replicas", event.replicas), ("generation", event.generation))
        ]
        # A purge drops the events of the step after the checkpoint, so the event is on that step.
        self._writer.add_event(FileEvent(wall_time=time.time(), step=event.step + 1, summary=Summary(value=values)))

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()
