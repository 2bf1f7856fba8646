"""What the operator knows of one job between two scrapes, and sums over the job's reports. In memory only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.api import conditions as names
from meshwright.api.base import MAX_SAFE_INTEGER
from meshwright.api.conditions import find, is_true
from meshwright.api.goodput import TimeCause
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.protocol.messages import Progress
from meshwright_operator.decide.admission import QUEUE_UNAVAILABLE
from meshwright_operator.decide.missing_claims import CLAIM_NOT_FOUND
from meshwright_operator.decide.stragglers import ComputeTimes
from meshwright_operator.decide.time_ledger import STEPPING

PHASES = ("queued", "starting", "training", "restarting", "suspended", "unknown")
"""The phases of a job, until it finishes."""

LONGEST_STEP_SECONDS = 86400.0
"""Longer step times in an agent's report are ignored."""


@dataclass(slots=True)
class JobRecord:
    """The state of one job from which its metrics are computed."""

    uid: str
    status: ParallelTrainingJobStatus = field(default_factory=ParallelTrainingJobStatus)
    phase: str = ""
    since: float = 0.0
    wallclock: dict[str, float] = field(default_factory=dict)
    productive: float = 0.0
    furthest_step: int | None = None
    lost_steps: int = 0
    last_step: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The job's time by cause, of its whole life, up to `seconds_at`."""
    seconds_at: float = 0.0
    exported: dict[str, float] = field(default_factory=dict)
    """The largest value of each cause so far: a counter never goes back, also if a step is reported late."""
    gpu_seconds: Mapping[str, float] = field(default_factory=dict)
    """The same as `seconds`, multiplied by GPUs."""
    exported_gpu: dict[str, float] = field(default_factory=dict)
    gpu_before: Mapping[str, float] | None = None
    """GPU seconds that this operator process has not seen pass."""
    oldest_report_at: float | None = None
    """When the oldest of its agents' last reports arrived. None while no worker runs in a mesh generation."""
    progress: Progress | None = None
    """The latest progress of the current mesh generation."""
    checkpoint_steps: int | None = None
    """Steps between checkpoints. None if the job saves none, or runs a user's command."""
    compute: ComputeTimes | None = None
    """The compute times of its ranks, while a generation runs."""
    rescales: Counter[str] = field(default_factory=Counter)
    """Rescales by direction, since the operator started."""

    def put(
        self,
        status: ParallelTrainingJobStatus,
        progress: Progress | None,
        clock: float,
        oldest_report_age: float | None = None,
        seconds: Mapping[str, float] | None = None,
        gpu_seconds: Mapping[str, float] | None = None,
        checkpoint_steps: int | None = None,
        compute: ComputeTimes | None = None,
    ) -> None:
        """Record the job's status, its latest progress, the age of its agents' oldest report, the seconds and GPU
        seconds by cause at the time `clock`, the steps between its checkpoints, and the compute times of its ranks.
        """
        self._count_rescale(self.status, status)
        self.status, self.progress, self.checkpoint_steps, self.compute = status, progress, checkpoint_steps, compute
        self.seconds, self.gpu_seconds, self.seconds_at = seconds or {}, gpu_seconds or {}, clock
        if self.gpu_before is None:
            self.gpu_before = self.gpu_seconds
        self.oldest_report_at = None if oldest_report_age is None else clock - oldest_report_age
        self._add_elapsed(clock)
        self.phase = phase_of(status)
        # The value comes from a user's pod: ignore it if it is out of range.
        if progress is None or not 0 <= progress.step <= MAX_SAFE_INTEGER:
            return
        step = progress.step
        step_seconds = progress.step_seconds if 0 <= progress.step_seconds <= LONGEST_STEP_SECONDS else 0.0
        if self.furthest_step is None:
            self.furthest_step = step
        if step > self.furthest_step:
            self.productive += (step - self.furthest_step) * step_seconds
            self.furthest_step = step
        if self.last_step is not None and step < self.last_step:
            self.lost_steps += self.last_step - step
        self.last_step = step

    def seconds_by_phase(self, clock: float) -> dict[str, float]:
        """Seconds by phase, up to the moment `clock`."""
        self._add_elapsed(clock)
        return dict(self.wallclock)

    def seconds_by_cause(self, clock: float) -> dict[str, float]:
        """Seconds by cause up to the moment `clock`; with steps, up to the last one that was reported."""
        found = dict(self.seconds)
        cause = self.status.goodput.cause if self.status.goodput is not None else ""
        if cause and cause not in STEPPING:
            found[cause] = found.get(cause, 0.0) + max(0.0, clock - self.seconds_at)
        return found

    def exported_seconds(self, clock: float) -> dict[str, float]:
        """The same for a counter."""
        return _grown(self.exported, self.seconds_by_cause(clock))

    def exported_gpu_seconds(self, clock: float) -> dict[str, float]:
        """GPU seconds by cause for a counter, up to the same moment."""
        found, goodput = dict(self.gpu_seconds), self.status.goodput
        if goodput is not None and goodput.gpus and goodput.cause and goodput.cause not in STEPPING:
            passed = max(0.0, clock - self.seconds_at)
            found[goodput.cause] = found.get(goodput.cause, 0.0) + goodput.gpus * passed
        return _grown(self.exported_gpu, found)

    def gpu_seconds_seen(self, clock: float) -> dict[str, float]:
        """The part of them that has passed since this operator process first saw the job."""
        before = self.gpu_before or {}
        return {cause: total - before.get(cause, 0.0) for cause, total in self.exported_gpu_seconds(clock).items()}

    def oldest_report_age(self, clock: float) -> float | None:
        """Age of the oldest of its agents' last reports, at the time `clock`."""
        return None if self.oldest_report_at is None else max(0.0, clock - self.oldest_report_at)

    def checkpoint_interval(self) -> float | None:
        """Seconds between checkpoints, with the recent step time. None before the first step."""
        seconds = self.progress.step_seconds if self.progress is not None else 0.0
        known = self.checkpoint_steps is not None and 0 < seconds <= LONGEST_STEP_SECONDS
        return self.checkpoint_steps * seconds if self.checkpoint_steps is not None and known else None

    def mfu(self) -> float | None:
        """Model FLOPs utilization of recent steps, as rank 0 computes it. The value comes from a user's pod."""
        value = self.progress.mfu if self.progress is not None else None
        return value if value is not None and math.isfinite(value) and 0 <= value <= 1 else None

    def _count_rescale(self, old: ParallelTrainingJobStatus, new: ParallelTrainingJobStatus) -> None:
        """Count a change of the number of ranks of an elastic job that has started."""
        if new.elastic is None or old.plan is None or new.plan is None or not (old.mesh and old.mesh.generation):
            return
        if old.plan.world_size != new.plan.world_size:
            self.rescales["up" if new.plan.world_size > old.plan.world_size else "down"] += 1

    def _add_elapsed(self, clock: float) -> None:
        if self.phase:
            self.wallclock[self.phase] = self.wallclock.get(self.phase, 0.0) + clock - self.since
        self.since = clock


def _grown(exported: dict[str, float], values: Mapping[str, float]) -> dict[str, float]:
    """Raise the exported values of a counter to these."""
    for cause, value in values.items():
        exported[cause] = max(value, exported.get(cause, 0.0))
    return exported


def is_rejected(status: ParallelTrainingJobStatus) -> bool:
    """Whether the job has never started, and will not before its spec or what the administrator allows changes."""
    ready = find(status.conditions, names.READY)
    started = status.placement is not None or (status.mesh is not None and status.mesh.generation > 0)
    waits = ready is not None and ready.reason in (CLAIM_NOT_FOUND, QUEUE_UNAVAILABLE)
    return is_true(status.conditions, names.STALLED) and not started and not waits


def phase_of(status: ParallelTrainingJobStatus) -> str:
    """The job's current phase; empty if it has finished, is being deleted, or is rejected and never started."""
    ready = find(status.conditions, names.READY)
    reason = ready.reason if ready is not None else ""
    if status.completion_time is not None or reason == "Terminating" or is_rejected(status):
        return ""
    if reason in ("Suspended", "Suspending"):
        return "suspended"
    if reason == "AgentsSilent":
        return "unknown"
    # While an edit is blocked, the job is not ready although its ranks train.
    training, _, world = status.ready_ranks.partition("/")
    if training == world and world not in ("", "0"):
        return "training"
    # The ledger knows of every wait for nodes: also for a quota, and of a job that was stopped for another one.
    waits = status.goodput is not None and status.goodput.cause == TimeCause.QUEUED
    if waits or reason in ("", "Placing", CLAIM_NOT_FOUND):
        return "queued"
    return (
        "starting" if status.mesh is None or status.mesh.generation <= 1 and not status.restart_count else "restarting"
    )
