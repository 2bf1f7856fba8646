"""What passes between the agent and one rank's process: the task it gets, the events it tells, how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from meshwright.protocol.messages import RunConfig


@dataclass(frozen=True, slots=True)
class RankTask:
    """One rank of one mesh generation. Picklable: it travels to the forked process."""

    run: RunConfig
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
    """Directory of this job's checkpoints; None when it keeps none."""
    data_dir: str | None
    """Mounted root of the data volume; None when the data is in the image."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How a mixture of experts was used in one step, over all tokens of the global batch."""

    layer: int
    imbalance: float
    """Choices of the busiest expert over the mean; 1 when balanced."""
    dropped: float
    """Part of the choices that found their expert full."""
    auxiliary_loss: float
    """Mean over sequences, not weighted; 1 when balanced."""
    z_loss: float
    """Mean over tokens, not weighted."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished optimizer step, as every rank knows it. Times in seconds."""

    step: int
    loss: float
    """Mean loss per token over the global batch."""
    gradient_norm: float
    learning_rate: float
    tokens: int
    """Tokens of the global batch, without what rows are padded with."""
    samples: int
    """Sequences consumed since the beginning of the run."""
    seconds: float
    data_seconds: float
    model_flops: float = 0.0
    """Floating-point operations of the whole job's step: 6·N + 12·L·d·s a token."""
    hardware_flops: float = 0.0
    """The same with what was recomputed."""
    peak_flops: float | None = None
    """What the job's GPUs could do in a second, in bf16; None where they are not known."""
    evaluation_loss: float | None = None
    """Mean loss per token on documents that are never trained on, after this step; None when it was not evaluated."""
    experts: tuple[ExpertLoad, ...] = ()
    """Mixture by mixture, in the order of layers."""
    pipeline_bubble: float | None = None
    """Part of a step in which the pipeline's ranks wait, simulated with measured times; None where none were."""


class RankEvents(Protocol):
    """What a training rank tells its agent, and asks of it. Called from the rank's main thread."""

    def phase(self, name: str, seconds: float) -> None:
        """A phase of the start is over: `data`, `rendezvous`, `build`, `load`, `first-step`."""

    def running(self, step: int) -> None:
        """Start-up is over; the next step to run is `step + 1`."""

    def step(self, report: StepReport) -> None:
        """A step is finished."""

    def checkpoint(self, step: int, path: str, seconds: float) -> None:
        """The checkpoint of `step` is durable and complete. Told by rank 0 alone."""

    def stop_requested(self) -> bool:
        """Whether this pod was told to go away (SIGTERM)."""


class Outcome(StrEnum):
    """How training ended without an error."""

    COMPLETE = "Complete"
    """Every step is done and the last checkpoint is durable."""
    STOPPED = "Stopped"
    """A pod of the job drains: all ranks stopped after the same step and saved it."""
