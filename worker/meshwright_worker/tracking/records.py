"""Records between rank 0 and the tracking process, one JSON object per line, and the numbers of a step."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from meshwright.api.tracking import TrackingSpec
from meshwright_worker.rank.task import StepReport

FOLDER = "tracking"
"""Directory below that of the job's checkpoints."""
LINES = "steps.jsonl"


class Start(BaseModel):
    """The first line: what to write, and where training continues."""

    spec: TrackingSpec
    directory: str
    """Directory of the trackers' files."""
    name: str
    """Name of the run in services."""
    generation: int
    step: int
    """Training continues after this step."""
    ranks: int
    replicas: int
    again: bool = False
    """Whether only the tracking process starts again: the ranks did not, so there is no event."""


@dataclass(frozen=True, slots=True)
class Event:
    """A start, a restart or a change of size, after a step."""

    step: int
    event: str
    """`Start`, `Restart` or `Rescale`."""
    generation: int
    ranks: int
    replicas: int


def step_record(report: StepReport, generation: int) -> dict[str, Any]:
    """Return the numbers of a step. Numbers that are not finite are left out, because JSON has none."""
    record: dict[str, Any] = {
        "time": round(time.time(), 3),
        "generation": generation,
        "loss": report.loss,
        "learningRate": report.learning_rate,
        "gradientNorm": report.gradient_norm,
        "tokensPerSecond": report.tokens / report.seconds if report.seconds > 0 else None,
        # The end of a step that a lost rank interrupted has no time.
        "stepSeconds": report.seconds or None,
        "dataSeconds": report.data_seconds if report.seconds else None,
        "samples": report.samples,
        "evaluationLoss": report.evaluation_loss,
        "pipelineBubble": report.pipeline_bubble,
    }
    if report.times is not None and report.times.bubble is not None:
        record["pipelineBubble"] = report.times.bubble
    if report.peak_flops and report.seconds > 0:
        record["mfu"] = report.model_flops / (report.peak_flops * report.seconds)
    return {"step": report.step, **{name: value for name, value in record.items() if _finite(value)}}


def metrics_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record for services, without step and time."""
    return {name: float(value) for name, value in record.items() if name not in ("step", "time")}


def tracking_directory(checkpoint_dir: str) -> Path:
    """Return the directory of the trackers' files."""
    return Path(checkpoint_dir) / FOLDER


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
