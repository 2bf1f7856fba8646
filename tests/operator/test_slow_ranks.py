"""A rank that computes longer than its peers: when it is reported, and when it is not."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

import pytest

from meshwright.api.status import SlowRank
from meshwright.protocol.messages import AgentState, RankProcess
from meshwright_operator.decide.agents import Agents
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.stragglers import compute_times
from tests.operator.builders import NOW, agents, ago, observed, report, running_status
from tests.tiers import mostly_long

# TP 2 x PP 2 x DP 2 on four workers of two ranks: stage 0 has ranks 0, 1, 4, 5; stage 1 has ranks 2, 3, 6, 7.
EVEN = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def received(seconds: tuple[float, ...]) -> Agents:
    reports = [
        report(
            worker,
            AgentState.RUNNING,
            ranks=[
                RankProcess(rank=rank, pid=1, step=7, compute_seconds=seconds[rank])
                for rank in (2 * worker, 2 * worker + 1)
            ],
        )
        for worker in range(4)
    ]
    return replace(agents(reports), compute=compute_times(reports, 1))


def judged(seconds: tuple[float, ...], known: SlowRank | None = None, later: float = 0.0) -> Decision:
    now = NOW + timedelta(seconds=later)
    return decide(observed(status=running_status(slow_rank=known), received=received(seconds), now=now))


def events(decision: Decision) -> list[str]:
    return [event.message for event in decision.events if event.reason == "SlowRank"]


SLOW = (1.0, 1.0, 1.0, 1.0, 1.0, 1.8, 1.0, 1.0)


def test_a_slow_rank_is_reported_once_after_a_minute() -> None:
    first = judged(SLOW)
    slow = first.status.slow_rank
    assert slow is not None
    assert (slow.rank, slow.worker, slow.node, slow.confirmed) == (5, 2, "n2", False)
    assert events(first) == []
    assert first.requeue_after is not None
    assert first.requeue_after <= 60
    second = judged(SLOW, slow, later=61)
    assert second.status.slow_rank is not None
    assert second.status.slow_rank.confirmed
    assert second.status.slow_rank.since == slow.since
    assert [message.partition(" long")[0] for message in events(second)] == [
        "Rank 5 (worker 2 on n2) has computed 1.8 times as"
    ]
    assert events(judged(SLOW, second.status.slow_rank, later=90)) == []


def test_what_an_agent_said_long_ago_and_ranks_that_cannot_be_are_left_out() -> None:
    found = received(SLOW)
    old = {**found.reports, 2: replace(found.reports[2], age=20.0)}
    slow = decide(observed(status=running_status(), received=replace(found, reports=old))).status.slow_rank
    assert slow is None, "the report of rank 5 is old"
    process = RankProcess(rank=-1, pid=1, step=7, compute_seconds=9.0)
    hostile = report(3, AgentState.RUNNING, ranks=[process])
    reports = {**found.reports, 3: replace(found.reports[3], report=hostile)}
    slow = decide(observed(status=running_status(), received=replace(found, reports=reports))).status.slow_rank
    assert slow is not None
    assert slow.rank == 5


@pytest.mark.parametrize(("ratio", "slow"), [(1.4, False), (1.5, True)])
def test_a_rank_that_was_not_slow_must_take_half_as_long_again(ratio: float, slow: bool) -> None:
    assert (judged((*EVEN[:5], ratio, *EVEN[6:])).status.slow_rank is not None) is slow


@pytest.mark.parametrize(("ratio", "stays"), [(1.3, True), (1.2, False)])
def test_it_is_slow_until_it_is_clearly_not(ratio: float, stays: bool) -> None:
    known = SlowRank(rank=5, worker=2, node="n2", generation=1, since=ago(100), confirmed=True)
    decision = judged((*EVEN[:5], ratio, *EVEN[6:]), known)
    assert (decision.status.slow_rank == known) is stays
    assert decision.status.slow_rank is None or stays


def test_another_generation_begins_again() -> None:
    known = SlowRank(rank=5, worker=2, node="n2", generation=9, since=ago(100), confirmed=True)
    slow = judged(SLOW, known).status.slow_rank
    assert slow is not None
    assert (slow.generation, slow.confirmed) == (1, False)


def test_stages_differ_by_design() -> None:
    """All ranks of the last stage compute twice as long, because they have the output projection."""
    assert judged((1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0)).status.slow_rank is None
    slow = judged((1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 3.2, 2.0)).status.slow_rank
    assert slow is not None
    assert slow.rank == 6


def test_times_from_a_pod_that_cannot_be_are_ignored() -> None:
    assert judged((*EVEN[:5], 1e300, *EVEN[6:])).status.slow_rank is None


@pytest.mark.parametrize("seed", mostly_long(range(20), lambda seed: seed < 4))
def test_noise_of_a_busy_machine_is_not_a_slow_rank(seed: int) -> None:
    """Twenty healthy runs of ten minutes, in which each rank's recent time is off by up to 15%."""
    drawn, known = random.Random(seed), None
    for second in range(0, 600, 5):
        decision = judged(tuple(drawn.uniform(0.85, 1.15) for _ in range(8)), known, later=float(second))
        known = decision.status.slow_rank
        assert events(decision) == []
