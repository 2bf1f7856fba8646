"""A rank that computes longer in each step than its peers do, so that all others wait for it.

Peers are the ranks of the same pipeline stage: those of other stages have other layers, and compute longer or shorter
by design. A rank's own time has no waits in it, so that only the slow one stands out, and not those that wait for it.
"""

from __future__ import annotations

from statistics import median

from meshwright.api.status import SlowRank
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.stragglers import RankTimes, by_stage, rank_times
from meshwright_operator.kube.job_event import WARNING
from meshwright_operator.text import sentences
from meshwright_operator.timestamps import format_time, seconds_since

SLOW_RATIO = 1.5
"""A rank is slow from this ratio of its time to the median of its peers' on."""
STILL_SLOW_RATIO = 1.25
"""A rank that was slow is so down to this ratio."""
CONFIRMED_SECONDS = 60.0
"""A rank that is slow for this long is reported."""


def report(decision: Decision) -> None:
    """Write the slowest rank to status, and post an event once it has been slow for long enough."""
    observed, known = decision.observed, decision.status.slow_rank
    if known is not None and known.generation != observed.mesh.generation:
        known = None
    found = _slow_rank(observed, known)
    if found is None:
        decision.status.slow_rank = None
        return
    slow, ratio = found
    if known is None or known.rank != slow.rank:
        node = next((worker.node for worker in observed.workers if worker.index == slow.worker), "")
        since, generation = format_time(observed.now), observed.mesh.generation
        known = SlowRank(rank=slow.rank, worker=slow.worker, node=node, generation=generation, since=since)
    waited = seconds_since(known.since, observed.now)
    if not known.confirmed and waited >= CONFIRMED_SECONDS:
        known = known.model_copy(update={"confirmed": True})
        decision.add_event("SlowRank", _message(known, ratio, waited), WARNING)
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


def _slow_rank(observed: Observed, known: SlowRank | None) -> tuple[RankTimes, float] | None:
    """The rank that was slow if it still is, otherwise the slowest one if it is slow, and its time over its peers'."""
    compute = observed.agents.compute
    if compute is None or compute.ratio < STILL_SLOW_RATIO:
        return None  # no rank takes much longer than others, whatever its stage
    reports = (received.report for received in observed.agents.reports.values() if received.fresh)
    found: tuple[RankTimes, float] | None = None
    for stage in by_stage(rank_times(reports, observed.mesh.generation), observed.plan.layout).values():
        slowest = max(stage, key=lambda entry: entry.compute)
        for entry in stage if len(stage) > 1 else ():
            was_slow = known is not None and entry.rank == known.rank
            if not was_slow and entry is not slowest:
                continue
            ratio = entry.compute / median(other.compute for other in stage if other is not entry)
            if was_slow and ratio >= STILL_SLOW_RATIO:
                return entry, ratio
            if ratio >= SLOW_RATIO and (found is None or ratio > found[1]):
                found = entry, ratio
    return found
