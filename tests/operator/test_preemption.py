"""Which replicas elastic jobs give up for a job of higher priority."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.cluster.pod_resources import Resources
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.scheduling.preemption import Holder, choose_victims

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
