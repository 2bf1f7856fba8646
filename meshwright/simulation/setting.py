"""One job as the simulation sees it: its size, its policy and its failure rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshwright.api.spec import RecoverySpec
from meshwright.rules.recovery_times import hang_timeout
from meshwright.simulation.inputs import Duration, FaultKind, Inputs, mean

LEAVE_SECONDS = 0.012
"""95% of the ranks that survive a loss leave their collectives within this time
(`benchmarks/results/recovery-4.json`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the job recovers: the rungs of the ladder that it may use."""

    restarts_gang: bool = False
    """Whether every failure replaces all pods, as without an operator that keeps the healthy ones."""
    spares: int = 0
    """Nodes beyond those of the job that it can use at once."""
    shrinks: bool = False
    """Whether the job continues with fewer units while nodes are missing (`elastic`)."""
    at_once: bool = False
    """Whether it does so also if a replacement is available (`elastic.onLoss: Shrink`)."""
    min_units: int = 1
    """With fewer it waits (`elastic.minReplicas`)."""
    replacement_seconds: float = 30.0
    pause_seconds: float = 300.0
    memory: bool = False
    """Whether the state is copied to the memory of other nodes, which has it after any failure of few nodes."""
    in_memory: bool = False
    """Whether ranks that are left after a loss keep their processes and state: only what was lost is restored."""
    state_units: int | None = 1
    """With `in_memory`: units that together have the whole state, of which there are several such sets. None if no rank
    has the state of another.
    """
    copy_steps: int | None = None
    """With `in_memory`: steps between the copies that ranks hold for each other. They are lost if all ranks restart."""
    continues: bool = False
    """Whether the other units continue at the next step while a lost one is restored (`in_memory` and `shrinks`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A job, its policy and its failures."""

    mtbf: float
    """Mean seconds between unplanned failures at full size, while the job runs or loads."""
    interval: float
    """Seconds of training at full size between two checkpoints."""
    step: float = 1.0
    """Seconds of a step at full size."""
    work: float = math.inf
    """Seconds of training at full size until the job is complete."""
    horizon: float = math.inf
    """Seconds after which the simulation ends if the job is not complete."""
    gpus: int = 8
    units: int = 1
    """What a lost node takes away, and what the job can lose: a replica, or a node with several replicas."""
    nodes_per_unit: int = 1
    rates: tuple[float, ...] = ()
    """Training per second with 1, 2, ... units, relative to all. Proportional to the units if left out."""
    policy: Policy = Policy()
    recovery: RecoverySpec = field(default_factory=RecoverySpec)
    inputs: Inputs = field(default_factory=Inputs)

    @property
    def nodes(self) -> int:
        """Nodes of the job at full size."""
        return self.units * self.nodes_per_unit

    def rate(self, units: int) -> float:
        """Training per second with this many units, relative to full size."""
        return self.rates[units - 1] if self.rates else units / self.units

    @property
    def rendezvous(self) -> Duration:
        """Seconds to form the process groups."""
        chosen = self.inputs.phases.rendezvous
        return 0.5 + 0.001 * self.gpus if chosen is None else chosen

    @property
    def regroup(self) -> Duration:
        """Seconds for ranks that stay to leave their process groups and form new ones."""
        chosen = self.inputs.phases.regroup
        return LEAVE_SECONDS + mean(self.rendezvous) if chosen is None else chosen

    def detection(self, kind: FaultKind) -> Duration:
        """Seconds until the operator acts on a failure."""
        return hang_timeout(self.recovery, self.step, started=True) if kind.detection is None else kind.detection


def up_time(wall_clock_mtbf: float, stall: float) -> float:
    """Mean time between failures while a job runs, from one that also counts the stall after each failure.

    Raises:
        ValueError: the stall is as long as the time between failures: the job would never run.
    """
    if stall >= wall_clock_mtbf:
        raise ValueError(f"a stall of {stall:g} s after each failure leaves no time of {wall_clock_mtbf:g} s")
    return wall_clock_mtbf - stall
