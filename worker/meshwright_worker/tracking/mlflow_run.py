"""A run of MLflow, in a tracking server or in files.

MLflow cannot take back a step. Steps that the run has are therefore not sent again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
# A tracker that failed is tried again anyway. By default MLflow tries for minutes, in which steps wait.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from meshwright_worker.tracking.records import Event, Start, metrics_of
from meshwright_worker.tracking.run_state import RunState
from meshwright_worker.tracking.sink import Sink

FOLDER = "mlflow"
RUN, REACHED = "mlflowRun", "samples"
"""`REACHED`: the metric of which every step has a value. A loss that is not finite is left out."""


class Mlflow(Sink):
    """One run over all starts of a job."""

    def __init__(self, start: Start) -> None:
        spec = start.spec.mlflow
        assert spec is not None
        self._client = MlflowClient(spec.uri or (Path(start.directory) / FOLDER).resolve().as_uri())
        state = RunState(start.directory)
        self._run = str(state.get(RUN) or "")
        if not self._run:
            self._run = state.put(RUN, self._create(spec.experiment, start.name))
        history = self._client.get_metric_history(self._run, REACHED)
        self._last = max((metric.step for metric in history), default=0)

    def step(self, record: dict[str, Any]) -> None:
        """Send the numbers of a step, unless the run has it."""
        step = int(record["step"])
        if step <= self._last:
            return
        at = int(1000 * float(record.get("time", time.time())))
        metrics = [Metric(name, value, at, step) for name, value in metrics_of(record).items()]
        self._client.log_batch(self._run, metrics=metrics)
        self._last = step

    def event(self, event: Event) -> None:
        """Set a tag for an event."""
        text = f"{event.event} after step {event.step}: {event.ranks} ranks, {event.replicas} replicas"
        self._client.set_tag(self._run, f"meshwright.generation.{event.generation}", text)

    def close(self) -> None:
        """Everything is already sent."""

    def _create(self, experiment: str, name: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        try:
            identity = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        except MlflowException:
            # Another job created it in between.
            found = self._client.get_experiment_by_name(experiment)
            if found is None:
                raise
            identity = found.experiment_id
        return str(self._client.create_run(identity, run_name=name).info.run_id)
