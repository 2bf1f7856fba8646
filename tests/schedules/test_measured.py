"""The measured timeline of a step: read from untrusted pods, put together over ranks, drawn as a simulated one."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from meshwright.schedules.measured import (
    MAX_SLOTS,
    MICROSECOND,
    RankTimeline,
    measured_step,
    read_stored,
    read_timelines,
    slot_text,
    stored_text,
)
from meshwright.schedules.registry import generate
from meshwright.schedules.simulator import ActionCosts, simulate

COSTS = ActionCosts(1.0, 1.2, 0.8)


def measured(name: str, ranks: int = 4, micro_batches: int = 8, step: int = 12) -> list[RankTimeline]:
    """What the ranks of a pipeline would report if they ran as simulated, each with the end of the step as its zero."""
    simulation = simulate(generate(name, ranks, micro_batches), COSTS)
    found = []
    for stage, slots in enumerate(simulation.timeline):
        times = [
            (slot_text(one.slot), round((one.start - simulation.makespan) / MICROSECOND),
             round((one.end - one.start) / MICROSECOND))
            for one in slots
        ]  # fmt: skip
        found.append(RankTimeline(step, stage, ranks, times))
    return found


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_the_timeline_of_ranks_that_run_as_simulated_is_the_simulated_one(name: str) -> None:
    schedule = generate(name, 4, 8)
    found = measured_step(measured(name))
    assert found is not None
    assert found.step == 12
    assert found.schedule.ranks == schedule.ranks
    assert found.schedule.stages == schedule.stages
    assert found.timeline.bubble == pytest.approx(simulate(schedule, COSTS).bubble, abs=1e-5)


def test_the_latest_step_that_every_rank_has_is_taken() -> None:
    ranks = [*measured("1f1b", step=2), *measured("1f1b", step=52)[:3]]
    found = measured_step(ranks)
    assert found is not None
    assert found.step == 2
    assert measured_step(ranks[:3]) is None
    assert measured_step([]) is None


def test_what_agents_store_is_read_back() -> None:
    ranks = measured("zb-h1")
    text = "".join(map(stored_text, ranks))
    assert read_stored(text) == ranks
    assert measured_step(read_stored(text)) == measured_step(ranks)
    damaged = f"{text[: len(text) // 2]}\n{{\n[[[\nnull\n[1]\nerror: no such file\n"
    assert 0 < len(read_stored(damaged)) < len(ranks)
    assert read_stored("[" * 100_000) == []


def test_what_a_pod_serves_is_read_back() -> None:
    ranks = measured("zb-h1")
    document = json.loads(json.dumps({"ranks": {str(index): asdict(one) for index, one in enumerate(ranks)}}))
    assert read_timelines(document) == ranks


GOOD = asdict(measured("1f1b", 2, 2)[0])


@pytest.mark.parametrize("value", [
    None, [], {"ranks": []}, "text", {"ranks": {"0": None}}, {"ranks": {"0": {}}},
    *({"ranks": {"0": {**GOOD, **change}}} for change in (
        {"slots": [["X0.0", 0, 1]]}, {"slots": [["F0.0", "now", 1]]}, {"slots": [["F0.0", 0]]}, {"slots": 5},
        {"slots": [["F0.0", 0, -1]]}, {"slots": [["F0.0", 1e300, 1]]}, {"slots": [["F9999999.0", 0, 1]]},
        {"slots": [["F0.0", 0, 1]] * (MAX_SLOTS + 1)}, {"stage": 2}, {"stage": -1}, {"stages": 10**9}, {"step": "x"},
    )),
])  # fmt: skip
def test_what_is_no_timeline_is_left_out(value: object) -> None:
    assert read_timelines(value) == []
