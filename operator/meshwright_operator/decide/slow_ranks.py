"""A rank that computes longer in each step than its peers do, so that all others wait for it.

Peers are the ranks of the same pipeline stage: those of other stages have other layers, and compute longer or shorter
by design. A rank's own time has no waits in it, so that only the slow one stands out, and not those that wait for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from meshwright.api.status import SlowRank
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.events import WARNING
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.stragglers import FEWEST_RANKS, LONGEST_SECONDS
from meshwright_operator.text import sentences
from meshwright_operator.timestamps import format_time, seconds_since

SLOW_RATIO = 1.5
"""A rank is slow from this ratio of its time to the median of its peers' on."""
STILL_SLOW_RATIO = 1.25
"""A rank that was slow is so down to this ratio."""
CONFIRMED_SECONDS = 60.0
"""A rank that is slow for this long is reported."""


@dataclass(frozen=True, slots=True)
class _RankTime:
    """A rank's compute time of a step, in seconds, and those of its peers."""

    rank: int
    worker: int
    seconds: float
    peers: Sequence[float]

    @property
    def ratio(self) -> float:
        """Its time over the median of its peers'."""
        return self.seconds / median(self.peers)


def report(decision: Decision) -> None:
    """Write the slowest rank to status, and post an event once it has been slow for long enough."""
    observed, known = decision.observed, decision.status.slow_rank
    if known is not None and known.generation != observed.mesh.generation:
        known = None
    slow = _slow_rank(observed, known)
    if slow is None:
        decision.status.slow_rank = None
        return
    if known is None or known.rank != slow.rank:
        node = next((worker.node for worker in observed.workers if worker.index == slow.worker), "")
        since, generation = format_time(observed.now), observed.mesh.generation
        known = SlowRank(rank=slow.rank, worker=slow.worker, node=node, generation=generation, since=since)
    waited = seconds_since(known.since, observed.now)
    if not known.confirmed and waited >= CONFIRMED_SECONDS:
        known = known.model_copy(update={"confirmed": True})
        decision.add_event("SlowRank", _message(known, slow.ratio, waited), WARNING)
    elif not known.confirmed:
        decision.requeue_within(CONFIRMED_SECONDS - waited)
    decision.status.slow_rank = known


def _message(slow: SlowRank, ratio: float, waited: float) -> str:
    who = f"Rank {slow.rank} (worker {slow.worker} on {slow.node})"
    return sentences(
        f"{who} has computed {ratio:.1f} times as long per step as the other ranks of its stage for {waited:.0f} s, "
        "and all others wait for it",
        "Check clocks, temperature and other processes of its node, or cordon the node to move its workers",
    )


def _slow_rank(observed: Observed, known: SlowRank | None) -> _RankTime | None:
    """The rank that was slow if it still is, otherwise the slowest one if it is slow."""
    compute = observed.agents.compute
    if compute is None or compute.ratio < STILL_SLOW_RATIO:
        return None  # no rank takes much longer than others, whatever its stage
    slowest: _RankTime | None = None
    for times in _times_by_stage(observed).values():
        if len(times) < FEWEST_RANKS - 1:
            continue
        for rank in {
            max(times, key=lambda found: times[found]),
            known.rank if known is not None else -1,
        } & times.keys():
            (seconds, worker), peers = times[rank], [other[0] for number, other in times.items() if number != rank]
            found = _RankTime(rank, worker, seconds, peers)
            if known is not None and rank == known.rank and found.ratio >= STILL_SLOW_RATIO:
                return found
            if found.ratio >= SLOW_RATIO and (slowest is None or found.ratio > slowest.ratio):
                slowest = found
    return slowest


def _times_by_stage(observed: Observed) -> dict[int, dict[int, tuple[float, int]]]:
    """Pipeline stage -> rank -> its compute time and its worker. The times come from users' pods."""
    layout = observed.plan.layout
    stages: dict[int, dict[int, tuple[float, int]]] = defaultdict(dict)
    for worker, received in observed.agents.reports.items():
        if not received.fresh or received.report.generation != observed.mesh.generation:
            continue
        for process in received.report.ranks:
            seconds = process.compute_seconds
            if seconds is not None and 0 < seconds <= LONGEST_SECONDS and 0 <= process.rank < layout.world_size:
                stages[layout.coordinates(process.rank).pipeline][process.rank] = seconds, worker
    return stages
