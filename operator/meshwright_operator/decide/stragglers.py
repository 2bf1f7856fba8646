"""Compute times of a job's ranks, from the agents' last reports: their median, and the rank that takes longest.

A slow rank makes all others wait, so step times do not show which one it is. The time that a rank computes itself does.
The values come from users' pods: what cannot be a time is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from meshwright.protocol.messages import WorkerReport

LONGEST_SECONDS = 86400.0
"""Longer times are ignored."""
FEWEST_RANKS = 3
"""With fewer ranks, the median does not tell which one is slow."""


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """Recent compute times of a step, in seconds."""

    median: float
    slowest: float
    slowest_rank: int

    @property
    def ratio(self) -> float:
        """How much longer the slowest rank computes than the median."""
        return self.slowest / self.median


def compute_times(reports: Iterable[WorkerReport], generation: int) -> ComputeTimes | None:
    """Return the compute times of a generation's ranks. None if too few report them: agents before 0.2 do not."""
    found = [
        (rank.compute_seconds, rank.rank)
        for report in reports
        if report.generation == generation
        for rank in report.ranks
        if rank.compute_seconds is not None and 0 < rank.compute_seconds <= LONGEST_SECONDS and rank.rank >= 0
    ]
    if len(found) < FEWEST_RANKS:
        return None
    slowest, rank = max(found)
    return ComputeTimes(median(seconds for seconds, _ in found), slowest, rank)
