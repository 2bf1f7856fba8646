"""The order of a parameter server's events: never staler than the bound, and never stuck."""

from __future__ import annotations

import random

import pytest

from meshwright_worker.local_sgd.bounded_staleness import StalenessGate


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
@pytest.mark.parametrize("islands", [1, 2, 3, 6])
@pytest.mark.parametrize("seed", range(10))
def test_no_gradient_is_staler_than_the_bound_and_an_island_can_always_continue(
    bound: int, islands: int, seed: int
) -> None:
    chance = random.Random(seed)
    gate = StalenessGate(bound)
    reading: set[int] = set()
    for _ in range(200):
        able = [i for i in range(islands) if (gate.may_write(i) if i in reading else gate.may_read(i))]
        assert able
        island = chance.choice(able)
        if island in reading:
            gate.write(island)
            reading.remove(island)
        else:
            gate.read(island)
            reading.add(island)
    staleness = [event.staleness for event in gate.events if event.kind == "write"]
    assert max(staleness) <= bound
    assert max(staleness) == bound or bound >= islands


def test_the_first_reader_never_waits_to_write() -> None:
    gate = StalenessGate(1)
    gate.read(3)
    gate.read(1)
    assert not gate.may_read(2)
    assert gate.may_write(3)
    assert gate.may_write(1)
    gate.write(1)
    gate.read(2)
    assert gate.may_write(3)
    assert not gate.may_write(2)
