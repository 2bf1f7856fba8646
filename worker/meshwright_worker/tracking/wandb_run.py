"""A run of Weights & Biases, online or as files for `wandb sync`.

A service cannot take back a step. Steps that were sent before a restart are therefore not sent again.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import wandb

from meshwright_worker.tracking.records import Event, Start, metrics_of
from meshwright_worker.tracking.run_state import RunState
from meshwright_worker.tracking.sink import Sink

LAST_STEP = "wandbStep"


class Wandb(Sink):
    """One run over all starts of a job."""

    def __init__(self, start: Start) -> None:
        spec = start.spec.wandb
        assert spec is not None
        self._state = RunState(start.directory)
        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            id=self._state.run_id(),
            name=start.name,
            dir=start.directory,
            mode="offline" if spec.offline else "online",
            resume="allow",
            settings=wandb.Settings(console="off", x_disable_stats=True, silent=True),
        )
        self._last = max(int(self._state.get(LAST_STEP) or 0), int(self._run.step or 0) - 1)

    def step(self, record: dict[str, Any]) -> None:
        """Send the numbers of a step, unless it was sent before."""
        step = int(record["step"])
        if step <= self._last:
            return
        # Stored first: after a crash in between, the step is missing and not there twice.
        self._last = self._state.put(LAST_STEP, step)
        self._run.log(metrics_of(record), step=step)

    def event(self, event: Event) -> None:
        """Add an event to the run's summary."""
        self._run.summary[f"meshwright/events/{event.generation}"] = asdict(event)

    def close(self) -> None:
        """Send what is buffered."""
        self._run.finish()
