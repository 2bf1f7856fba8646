"""Times of a job's ranks in a step, from the agents' last reports; their median, and the rank that computes longest.

A slow rank makes all others wait, so step times do not show which one it is. The time that a rank computes itself does.
The values come from users' pods: what cannot be a time is ignored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from meshwright.layout import Layout
from meshwright.protocol.messages import WorkerReport

LONGEST_SECONDS = 86400.0
"""Longer times are ignored."""
FEWEST_RANKS = 3
"""With fewer ranks, the median does not tell which one is slow."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Recent times of one rank in a step, in seconds."""

    rank: int
    worker: int
    compute: float
    """Forward and backward passes, without waits."""
    data: float = 0.0
    """Wait for data."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Dimension -> wait for communication."""


def rank_times(reports: Iterable[WorkerReport], generation: int) -> list[RankTimes]:
    """The times of a generation's ranks. Ranks of agents before 0.2 report none."""
    found = []
    for report in reports:
        for process in report.ranks if report.generation == generation else ():
            compute, data = process.compute_seconds, process.data_seconds
            if compute is None or not 0 < compute <= LONGEST_SECONDS or process.rank < 0:
                continue
            waits = {name: seconds for name, seconds in process.waits.items() if 0 <= seconds <= LONGEST_SECONDS}
            data = data if data is not None and 0 <= data <= LONGEST_SECONDS else 0.0
            found.append(RankTimes(process.rank, report.worker, compute, data, waits))
    return found


def by_stage(times: Iterable[RankTimes], layout: Layout) -> dict[int, list[RankTimes]]:
    """Pipeline stage -> the times of its ranks. Ranks that the layout does not have are left out."""
    stages: dict[int, list[RankTimes]] = defaultdict(list)
    for entry in times:
        if entry.rank < layout.world_size:
            stages[layout.coordinates(entry.rank).pipeline].append(entry)
    return stages


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
    """Return the compute times of a generation's ranks. None if too few report them."""
    times = rank_times(reports, generation)
    if len(times) < FEWEST_RANKS:
        return None
    slowest = max(times, key=lambda entry: (entry.compute, entry.rank))
    return ComputeTimes(median(entry.compute for entry in times), slowest.compute, slowest.rank)
