"""`status.goodput` of a ParallelTrainingJob: what the time of the job was spent on."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel, Count, Time

MAX_TIME_CAUSES = 32


class TimeCause(StrEnum):
    """What a job spends time on. At each moment, exactly one of these."""

    QUEUED = "Queued"
    """The job waits for nodes."""
    STARTING = "Starting"
    """From the nodes to the first step: pods, agents, processes, rendezvous, load. At a first start or a resumption."""
    TRAINING = "Training"
    """Steps that nobody had done before."""
    REDONE_STEPS = "RedoneSteps"
    """Steps that had been done before a restart, and were not in the checkpoint."""
    CHECKPOINT_STALL = "CheckpointStall"
    """Steps stood still for a save."""
    DETECTING = "Detecting"
    """From the last step of a generation that failed to the operator's verdict."""
    RESTARTING = "Restarting"
    """From the verdict to the first step again."""
    RESCALING = "Rescaling"
    """From the decision to resize an elastic job to the first step with the new size."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is true."""


class BookedTime(ApiModel):
    """Time of one cause."""

    cause: Annotated[str, Field(min_length=1, max_length=64)]
    """`Queued`, `Starting`, `Training`, `RedoneSteps`, `CheckpointStall`, `Detecting`, `Restarting`, `Rescaling` or
    `Suspended`."""
    milliseconds: Count
    """Time of this cause before `since`."""
    gpu_milliseconds: Count | None = None
    """The same for each GPU of the job's pods."""


class GoodputStatus(ApiModel):
    """What the time of the job was spent on. Each millisecond from the creation of the job to `since` is booked to
    one cause, and the time after `since` is that of `cause`.
    """

    cause: Annotated[str, Field(max_length=64)] = ""
    """What the job spends time on now. Empty once it has finished."""
    since: Time | None = None
    """Time up to which all time is booked: while steps run, when the last one was booked, else when `cause` began."""
    booked: Annotated[
        list[BookedTime], Field(max_length=MAX_TIME_CAUSES, json_schema_extra={"x-list-map-key": "cause"})
    ] = []
    """Time by cause."""
    step: Count | None = None
    """Last step of this mesh generation whose time is booked. Not set before its first step."""
    furthest_step: Count = 0
    """The highest step that the job ever reached. Steps up to this one are redone after a restart."""
    stall_milliseconds: Count = 0
    """The part of this mesh generation's checkpoint stalls that is booked."""
    gpus: Count | None = None
    """GPUs of the job's pods."""
    gpus_since: Time | None = None
    """Since when they are as many."""
    gpu_milliseconds: Count | None = None
    """GPU time between `since` and `gpusSince`."""


def gpu_milliseconds_by_cause(ledger: GoodputStatus, passed: int) -> dict[str, int]:
    """GPU time by cause, `passed` milliseconds after the number of GPUs last changed.

    What is not booked yet counts for the present cause.
    """
    totals = {entry.cause: entry.gpu_milliseconds or 0 for entry in ledger.booked}
    if ledger.cause and ledger.gpus_since is not None:
        unbooked = (ledger.gpu_milliseconds or 0) + (ledger.gpus or 0) * passed
        totals[ledger.cause] = totals.get(ledger.cause, 0) + unbooked
    return totals
