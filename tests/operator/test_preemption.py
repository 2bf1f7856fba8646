"""Which replicas elastic jobs give up for a job of higher priority, and which preemptible jobs stop for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.cluster.pod_resources import Resources
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.scheduling.preemption import Holder, Victim, choose_victims, freed_by

GPUS = Resources(gpus=8, pods=1)


def holder(name: str, replicas: int, least: int = 1, priority: int = 0, start: int = 0) -> Holder:
    """A job whose replicas have a node each."""
    nodes = [{f"n{start + replica}": GPUS} for replica in range(replicas)]
    return Holder(JobKey("default", name), f"uid-{name}", priority, replicas, least, nodes)


def needs(nodes: int) -> Callable[[Mapping[str, Resources]], bool]:
    return lambda freed: sum(amount.gpus for amount in freed.values()) >= 8 * nodes


def chosen(holders: list[Holder], priority: int, nodes: int) -> dict[str, int]:
    return {victim.key.name: victim.replicas for victim in choose_victims(holders, priority, needs(nodes))}


def test_no_more_is_taken_than_is_needed() -> None:
    assert chosen([holder("a", 4)], 1, 2) == {"a": 2}


def test_nothing_is_taken_below_the_minimum_or_if_it_does_not_help() -> None:
    assert chosen([holder("a", 4, least=3)], 1, 2) == {}
    assert chosen([holder("a", 4, least=3), holder("b", 2, start=4)], 1, 2) == {"a": 3, "b": 1}


def test_a_job_of_the_same_priority_gives_up_nothing() -> None:
    assert chosen([holder("a", 4, priority=1)], 1, 1) == {}


def test_a_job_that_fills_gives_its_own_priority_what_it_has_above_its_replicas() -> None:
    fills = replace(holder("a", 4, priority=1), filled_from=3)
    assert chosen([fills], 1, 1) == {"a": 3}
    assert chosen([fills], 1, 2) == {}
    assert chosen([fills], 2, 2) == {"a": 2}
    assert chosen([fills], 0, 1) == {}


def test_a_job_that_was_resized_gives_nothing_to_its_own_priority_until_its_pause_ends() -> None:
    rests = replace(holder("a", 4, priority=1), filled_from=1, rests_until=datetime(2026, 1, 1, tzinfo=UTC))
    assert chosen([rests], 1, 1) == {}
    assert chosen([rests], 2, 1) == {"a": 3}


def test_the_lowest_priority_gives_first() -> None:
    assert chosen([holder("a", 2, priority=1), holder("b", 2, start=2)], 2, 1) == {"b": 1}


def test_the_job_with_most_above_its_minimum_gives_first() -> None:
    assert chosen([holder("a", 3), holder("b", 5, start=3)], 1, 2) == {"b": 3}


def test_a_job_whose_nodes_do_not_help_keeps_them() -> None:
    useful = holder("useful", 2, start=10)
    victims = choose_victims([holder("large", 5), useful], 1, lambda freed: "n11" in freed)
    assert {victim.key.name: victim.replicas for victim in victims} == {"useful": 1}


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2)), max_size=5), st.integers(1, 12))
def test_victims_are_enough_and_keep_their_minimum(sizes: list[tuple[int, int, int]], nodes: int) -> None:
    holders = [
        holder(f"j{number}", replicas, least, priority, start=10 * number)
        for number, (replicas, least, priority) in enumerate(sizes)
    ]
    victims = choose_victims(holders, 2, needs(nodes))
    by_uid = {one.uid: one for one in holders}
    available = sum(max(0, one.replicas - one.min_replicas) for one in holders if one.priority < 2)
    assert bool(victims) == (available >= nodes)
    if victims:
        assert sum(by_uid[victim.uid].replicas - victim.replicas for victim in victims) == nodes
    for victim in victims:
        assert by_uid[victim.uid].priority < 2
        assert victim.replicas >= by_uid[victim.uid].min_replicas


def whole(name: str, nodes: int, priority: int = 0, start: int = 0, started: str = "", **fields: Any) -> Holder:
    """A preemptible job that is not elastic, with a node for each worker."""
    used = {f"n{start + number}": GPUS for number in range(nodes)}
    key = JobKey("default", name)
    return Holder(key, f"uid-{name}", priority, 1, 1, preemptible=True, started=started, used=used, **fields)


def test_replicas_are_taken_before_a_job_stops() -> None:
    assert chosen([whole("p", 2, start=10), holder("a", 3)], 1, 2) == {"a": 1}
    assert chosen([whole("p", 2, start=10), holder("a", 2)], 1, 3) == {"a": 1, "p": 0}


def test_replicas_that_are_not_needed_once_a_job_stops_are_kept() -> None:
    assert chosen([whole("p", 3, start=10), holder("a", 2)], 1, 3) == {"p": 0}


def test_the_lowest_priority_stops_first_then_the_smallest_that_is_enough_then_the_latest() -> None:
    assert chosen([whole("small", 1, 1), whole("large", 4, 0, start=10)], 2, 1) == {"large": 0}
    assert chosen([whole("large", 4), whole("small", 2, start=10), whole("tiny", 1, start=20)], 1, 2) == {"small": 0}
    old, new = (
        whole("old", 1, started="2026-01-01T00:00:00Z"),
        whole("new", 1, start=10, started="2026-01-02T00:00:00Z"),
    )
    assert chosen([old, new], 1, 1) == {"new": 0}


def test_nobody_stops_in_vain_or_for_the_same_priority() -> None:
    assert chosen([whole("a", 2), whole("b", 2, start=10)], 1, 5) == {}
    assert chosen([whole("a", 2, priority=1)], 1, 1) == {}


def test_a_job_that_stops_already_stays_the_only_victim() -> None:
    holders = [whole("first", 1), whole("later", 1, start=10, started="2026-01-02T00:00:00Z")]
    (first, _) = holders
    again = choose_victims(holders, 1, needs(1), [Victim(first.key, first.uid, 0)])
    assert [victim.key.name for victim in again] == ["first"]


def test_spare_nodes_of_a_job_that_stops_may_be_used() -> None:
    assert set(freed_by((), [whole("a", 1, spares=["s1"])])) == {"n0", "s1"}
    assert set(freed_by([holder("a", 2)])) == {"n1"}


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.sampled_from("abc")), max_size=6),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2)), max_size=3),
    st.integers(1, 16),
)
def test_victims_are_enough_and_none_of_them_stops_in_vain(
    stoppable: list[tuple[int, int, str]], sizes: list[tuple[int, int, int]], nodes: int
) -> None:
    wholes = [
        whole(f"p{number}", count, priority, start=100 + 10 * number, started=started)
        for number, (count, priority, started) in enumerate(stoppable)
    ]
    elastic = [
        holder(f"e{number}", replicas, min(least, replicas), priority, start=10 * number)
        for number, (replicas, least, priority) in enumerate(sizes)
    ]
    by_uid = {one.uid: one for one in (*wholes, *elastic)}
    victims = choose_victims([*wholes, *elastic], 2, needs(nodes))
    lower = [one for one in by_uid.values() if one.priority < 2]
    replicas = sum(one.replicas - one.min_replicas for one in lower)
    assert bool(victims) == (replicas + sum(len(one.used) for one in lower) >= nodes)

    def freed(without: str = "") -> int:
        left = [victim for victim in victims if victim.uid != without]
        return sum(len(by_uid[v.uid].used) if not v.replicas else by_uid[v.uid].replicas - v.replicas for v in left)

    stopping = [by_uid[victim.uid] for victim in victims if not victim.replicas]
    assert all(by_uid[victim.uid].priority < 2 for victim in victims)
    if victims:
        assert freed() >= nodes
    assert not stopping or replicas < nodes, "elastic jobs are enough"
    for one in stopping:
        assert freed(one.uid) < nodes, "it stops in vain"
        for other in (one for one in wholes if one.priority < 2 and one not in stopping):
            assert other.priority >= one.priority or freed(one.uid) + len(other.used) < nodes, "the other one is enough"
