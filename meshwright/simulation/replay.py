"""A job's ledger as the inputs of a simulation: how often it failed, and what each failure and save cost it.

Failures are random again: the simulation says what a job with this rate and these times is expected to lose, and in
which range. How much training is redone is not taken from the ledger, but follows from the checkpoint interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.api.goodput import TimeCause
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.simulation.inputs import FaultKind, Inputs, Saves
from meshwright.simulation.run import RESCALED
from meshwright.simulation.setting import Policy, Setting

PLANNED = frozenset({"NodeDrained", RESCALED, "Rebalanced", "SpecChanged", "JobPreempted"})
"""Causes of restarts that no failure has. The ranks save a checkpoint first."""
NOT_SIMULATED = (TimeCause.QUEUED, TimeCause.SUSPENDED)
"""Time that depends on the cluster and the user, and not on the job."""


class ReplayError(ValueError):
    """The status has too little to simulate the job again."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A job's ledger, and the setting with which its run is simulated again."""

    seconds: Mapping[str, float]
    """Seconds of each cause, as booked."""
    setting: Setting

    @property
    def goodput(self) -> float:
        """Training over the time that is simulated."""
        total = sum(value for cause, value in self.seconds.items() if cause not in NOT_SIMULATED)
        return self.seconds.get(TimeCause.TRAINING, 0.0) / total if total else 0.0


def replay(status: ParallelTrainingJobStatus, every_steps: int | None, setting: Setting) -> Replay:
    """Take the failures and times of a job from its status.

    Args:
        status: The job's status.
        every_steps: Steps between its checkpoints. None if it has none.
        setting: The job's size and recovery.

    Raises:
        ReplayError: the job has no ledger, or has not finished a step.
    """
    ledger = status.goodput
    if ledger is None:
        raise ReplayError("`status.goodput` is missing: only jobs that an operator from 0.2 on has run have it")
    seconds = {entry.cause: entry.milliseconds / 1000.0 for entry in ledger.booked}
    training, steps = seconds.get(TimeCause.TRAINING, 0.0), ledger.furthest_step
    if training <= 0 or not steps:
        raise ReplayError("`status.goodput` has no `Training` with steps: the job has not finished a step")
    step = training / steps
    counts = {entry.cause: entry.count for entry in status.restarts}
    failures = sum(count for cause, count in counts.items() if cause not in PLANNED)
    active = training + seconds.get(TimeCause.REDONE_STEPS, 0.0) + seconds.get(TimeCause.CHECKPOINT_STALL, 0.0)
    interval = every_steps * step if every_steps is not None else math.inf
    return Replay(
        seconds,
        replace(
            setting,
            mtbf=active / max(failures, 1) if counts else math.inf,
            interval=interval,
            step=step,
            work=training,
            horizon=math.inf,
            rates=(),
            units=1,
            nodes_per_unit=setting.nodes,
            policy=Policy(),
            inputs=_inputs(seconds, counts, failures, active / interval),
        ),
    )


def _inputs(seconds: Mapping[str, float], counts: Mapping[str, int], failures: int, saves: float) -> Inputs:
    """The mean times of the ledger. Where nothing was lost, the ledger's time of it is 0 too."""
    restarts = sum(count for cause, count in counts.items() if cause != RESCALED)
    restart = seconds.get(TimeCause.RESTARTING, 0.0) / max(restarts, 1)
    resize = seconds.get(TimeCause.RESCALING, 0.0) / max(counts.get(RESCALED, 0), 1)
    detection = seconds.get(TimeCause.DETECTING, 0.0) / max(failures, 1)
    faults = {
        cause: FaultKind(
            share=count / max(failures, 1),
            cause=cause,
            planned=cause in PLANNED,
            detection=0.0 if cause in PLANNED else detection,
            restart=resize if cause == RESCALED else restart,
        )
        for cause, count in counts.items()
        if count
    }
    return Inputs(
        faults=faults or {"none": FaultKind(share=0.0, cause="RankFailure", detection=0.0)},
        saves=Saves(stall=seconds.get(TimeCause.CHECKPOINT_STALL, 0.0) / saves if saves >= 1 else 0.0, durable=0.0),
        start=seconds.get(TimeCause.STARTING, 0.0),
        save_before_stop=0.0,
    )
