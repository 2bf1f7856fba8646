"""Memory limits of a cluster whose GPUs differ."""

from __future__ import annotations

from math import inf

import pytest

from meshwright.planner.cluster.limits import ClusterLimits, usable_memory
from tests.planner.builders import inventory, node

LARGE, SMALL = 80_000 << 20, 40_000 << 20


def limits(*nodes: tuple[int, int | None]) -> ClusterLimits:
    """The limits of nodes with these GPUs and MiB of memory per GPU."""
    found = inventory(*(node(f"n{i}", gpus=gpus, memory_mib=memory) for i, (gpus, memory) in enumerate(nodes)))
    return ClusterLimits.of(found, gpus_per_worker=1)


@pytest.mark.parametrize(
    ("gpus", "expected"), [(1, LARGE), (4, LARGE), (5, SMALL), (12, SMALL)], ids=["one", "all large", "both", "all"]
)
def test_the_largest_gpus_are_counted_first(gpus: int, expected: int) -> None:
    assert limits((4, 80_000), (8, 40_000)).memory_for(gpus) == usable_memory(expected)


def test_more_gpus_than_the_cluster_has_hold_nothing() -> None:
    assert limits((4, 80_000)).memory_for(5) == 0.0


def test_gpus_of_unknown_memory_limit_nothing() -> None:
    mixed = limits((4, 80_000), (2, None))
    assert mixed.gpus_of_unknown_memory == 2
    assert mixed.memory_for(2) == inf
    assert mixed.memory_for(6) == usable_memory(LARGE)
    assert mixed.memory_for(7) == 0.0


def test_without_nodes_nothing_is_known() -> None:
    unknown = limits()
    assert not unknown.known
    assert unknown.memory_for(1000) == inf
