"""The interface between the agent and a rank's process: the rank's task, its events and its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from meshwright.api.training import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol.messages import FailureHistory, MemoryCopies, MemoryRecovery
from meshwright.protocol.run_config import NativeRun, Run
from meshwright.schedules.measured import RankTimeline

RunT_co = TypeVar("RunT_co", bound=Run, covariant=True)


class InferenceRun(Run):
    """A trained model in a layout, to generate text with. It reads no training text and writes no checkpoint."""

    architecture: Architecture
    """The model."""
    training: TrainingSpec
    """Precision, seed, adapters and the length that the model was trained for."""

    @property
    def deterministic(self) -> bool:
        """See `Run.deterministic`."""
        return self.training.deterministic


ModelRun = NativeRun | InferenceRun
"""A run of one of Meshwright's own models."""


@dataclass(frozen=True, slots=True)
class RankTask(Generic[RunT_co]):
    """One rank of one mesh generation. Serializable: it is sent to the forked process."""

    run: RunT_co
    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    worker: int
    master_address: str
    master_port: int
    pod_address: str
    checkpoint_dir: str | None
    """Directory of this job's checkpoints; None if it writes none."""
    data_dir: str | None
    """Mount point of the data volume; None if the data is in the image."""
    checkpoint_uri: str | None = None
    """Prefix of this job's checkpoints in an object store; None if it has none there."""
    in_memory: bool = False
    """Whether the process holds its state when the generation is interrupted. The store is then not rank 0's."""
    job: str = ""
    """Namespace and name of the job; empty outside of a cluster."""
    image: str | None = None
    """The image of rank 0 with its digest, if the cluster says it."""
    history: FailureHistory | None = None
    """The job's failures so far. None from an operator before 0.2."""
    node_check: bool = False
    """Whether the ranks check their nodes before they meet."""
    copies: MemoryCopies | None = None
    """The copies that ranks make in host memory. None if they make none."""
    memory: MemoryRecovery | None = None
    """How the generation goes on from states that ranks hold. None if it starts from the latest checkpoint."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Load of the experts of one layer in one step, over all tokens of the global batch."""

    layer: int
    """Index of the layer in the model."""
    imbalance: float
    """Assignments to the busiest expert, divided by the mean; 1 when balanced."""
    dropped: float
    """Share of the assignments that were dropped because their expert was full."""
    auxiliary_loss: float
    """Mean over sequences, without its coefficient; 1 when balanced."""
    z_loss: float
    """Mean over tokens, without its coefficient."""


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The most memory of one kind that the rank's process used so far."""

    kind: str
    """`gpu_allocated` (by tensors), `gpu_reserved` (by torch's allocator) or `host` (resident, with shared pages)."""
    bytes: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a rank's time of a step went, in seconds. On a GPU, of the step that it has completed before."""

    compute: float
    """Forward and backward passes, without waits."""
    update: float
    """The update of the parameters, without waits."""
    checkpoint: float
    """Time for which steps stood still for a checkpoint, since the last report."""
    waits: dict[str, float]
    """Dimension -> time in which the rank waited for communication that no computation hid."""
    bubble: float | None
    """Share of the pipeline's time in which this rank waited for other stages; None without a pipeline."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """One place where checkpoints are saved. Times are seconds since 1970."""

    place: str
    """Path or URI."""
    every_steps: int | None
    """Steps between its checkpoints; None if the interval is a time."""
    interval_seconds: float | None
    """Time between its checkpoints; None if that is a number of steps, or `Auto` before the first save."""
    reason: str = ""
    """Why that is the interval, with `Auto`."""
    step: int | None = None
    """Step of its newest complete checkpoint."""
    saved_at: float | None = None
    """When that was saved."""
    error: str = ""
    """Why the last save failed; empty if it did not."""
    failing_since: float | None = None
    """Since when saves fail."""
    saving_since: float | None = None
    """Since when a save is in progress, if that delays others."""
    best_step: int | None = None
    """Step of its complete checkpoint with the lowest evaluation loss, with `keepBest`."""
    best_loss: float | None = None
    """That loss."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One completed optimizer step; the same on every rank, except for what is measured on it. Times in seconds."""

    step: int
    loss: float
    """Mean loss per token over the global batch."""
    gradient_norm: float
    """L2 norm of the gradients of all parameters, before clipping."""
    learning_rate: float
    tokens: int
    """Tokens of the global batch, without padding."""
    samples: int
    """Sequences consumed since the beginning of the run."""
    seconds: float
    data_seconds: float
    model_flops: float = 0.0
    """Floating-point operations of one step of the entire job: 6·N + 12·L·d·s per token."""
    hardware_flops: float = 0.0
    """The same plus recomputation."""
    peak_flops: float | None = None
    """Peak bf16 FLOP/s of all of the job's GPUs; None if they are not known."""
    checkpoint_stall_seconds: float = 0.0
    """Time for which all steps of this generation so far stood still for checkpoints."""
    evaluation_loss: float | None = None
    """Mean loss per token on held-out documents after this step; None if it was not evaluated."""
    experts: tuple[ExpertLoad, ...] = ()
    """One entry per mixture-of-experts layer, in the order of layers."""
    skipped: bool = False
    """Whether nothing was updated, because gradients overflowed fp16 or because of `training.anomalies`."""
    memory: tuple[MemoryPeak, ...] = ()
    """Memory of this rank."""
    times: StepTimes | None = None
    """Where the time of this rank went."""
    simulated_bubble: float | None = None
    """What the simulator predicts for the schedule if all stages take as long; None without a pipeline."""
    pipeline_bubble: float | None = None
    """Share of a step in which the pipeline's ranks are idle, simulated with measured times; None without measurements.
    """
    total_steps: int | None = None
    """Steps of the run, as a user's command reports them."""
    partial: bool = False
    """Whether it is that of a user's command: numbers that the command does not report are NaN or 0."""
    has_loss: bool = True
    """Whether the command reports the loss, which may be NaN."""
    tracking_failures: int = 0
    """Failures of experiment trackers since the last report."""
    timeline: RankTimeline | None = None
    """This rank's slots of an earlier step, if they were timed."""
    tiers: tuple[TierReport, ...] | None = None
    """Where checkpoints are saved, on rank 0, if something about that has changed."""


AT_WORK_SECONDS = 20.0
"""Time between two calls of `RankEvents.at_work`."""
LEAST_SECONDS = 0.1
"""Shortest time that is reported for a work: a rate needs one, also if the work has only begun."""


class Progress(Protocol):
    """Called after each small part of work that takes long."""

    def __call__(self, size: int = 0) -> None:
        """The part had so many bytes, if they are counted."""


def no_report(size: int = 0) -> None:
    """The `Progress` of work that nobody watches."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work that takes long, before the first step, and how much of it is done: see `RankWork` of the protocol."""

    name: str
    done: int
    total: int | None
    part: int
    parts: int
    seconds: float


class WorkEvents(Protocol):
    """Receives how much of a long work is done."""

    def at_work(self, work: Work | None = None) -> None:
        """See `RankEvents.at_work`."""


class WorkProgress:
    """Reports from time to time how much is done of work that takes long.

    Args:
        events: where to; None if nobody watches.
        clock: monotonic seconds.
    """

    def __init__(self, events: WorkEvents | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._events, self._clock = events, clock
        self._told_at = self._begun_at = clock()
        self._work = ("", 0)
        self._parts = 1
        self._is_told = False

    def begin_part(self, part: int, parts: int) -> None:
        """The work on one of several corpora begins, numbered from 1."""
        self._work, self._parts = ("", part - 1), parts

    def begin(self, name: str, total: int) -> Progress:
        """The work `name` begins, with so many bytes, which the returned `Progress` counts."""
        self._work, self._begun_at, self._is_told = (name, self._work[1]), self._clock(), False
        done = 0

        def progress(size: int = 0) -> None:
            nonlocal done
            done += size
            self(name, done, total)

        return progress

    def __call__(self, name: str, done: int, total: int | None = None) -> None:
        """So much of the work `name` is done."""
        now, (_, part) = self._clock(), self._work
        if self._work != (name, part):
            self._work, self._begun_at, self._is_told = (name, part), now, False
        # A rank that told of this work tells at once that it is done: from then on it waits for others.
        is_due = now - self._told_at >= AT_WORK_SECONDS or (self._is_told and done == total)
        if self._events is not None and is_due:
            self._told_at, self._is_told = now, done != total
            seconds = max(LEAST_SECONDS, round(now - self._begun_at, 1))
            self._events.at_work(Work(name, done, total, part + 1, self._parts, seconds))


def progress_of(events: RankEvents, clock: Callable[[], float] = time.monotonic) -> Progress:
    """A `Progress` that tells from time to time that the rank is at work."""
    told_at = clock()

    def progress(size: int = 0) -> None:
        nonlocal told_at
        if clock() - told_at >= AT_WORK_SECONDS:
            told_at = clock()
            events.at_work()

    return progress


class RankEvents(Protocol):
    """What a training rank reports to its agent, and asks it. Called from the rank's main thread."""

    def phase(self, name: str, seconds: float) -> None:
        """A start-up phase is complete: `data`, `rendezvous`, `build`, `load`, `first-step`."""

    def running(self, step: int, source: str = "") -> None:
        """Start-up is complete; the next step is `step + 1`. `source` is the checkpoint of another run that the state
        is from, if it is.
        """

    def step(self, report: StepReport) -> None:
        """A step is complete."""

    def at_work(self, work: Work | None = None) -> None:
        """Text is tokenized, or a load, a compilation, an evaluation or the wait for a save goes on: a rank that
        completes no phase or step for so long does not hang. `work` says how much is done, if that is known.
        """

    def checkpoint(self, step: int, path: str, seconds: float) -> None:
        """The checkpoint of `step` is durable and complete. Only rank 0 reports it."""

    def stop_requested(self) -> bool:
        """Return whether this pod was asked to stop (SIGTERM)."""

    def take_checkpoint_request(self) -> bool:
        """Return whether a checkpoint was requested since the last call. Only rank 0 is asked."""

    def checkpoint_begun(self, step: int) -> None:
        """The requested checkpoint is that of `step`. Only rank 0 reports it."""


class Outcome(StrEnum):
    """How training ended, if without an error."""

    COMPLETE = "Complete"
    """Every step is done and the last checkpoint is durable."""
    STOPPED = "Stopped"
    """A pod of the job is draining: all ranks stopped after the same step and saved it."""
