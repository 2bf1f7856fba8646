"""`Automatic` on the clock: what is measured changes the order of a step and no bit of what it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.api.precision import Precision
from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.actions import ActionKind, Schedule
from meshwright.schedules.measured_costs import PipelineTimes
from meshwright_worker.parallel.pipeline import auto_schedule
from meshwright_worker.parallel.pipeline.auto_schedule import (
    MEASURED_STEPS,
    WARM_UP_STEPS,
    AutoScheduleExecutor,
    Stopwatch,
)
from meshwright_worker.rank.task import RankTask, StepReport
from tests.distributed.cases import Trained, train_fully, trained
from tests.distributed.configs import small_run
from tests.distributed.mesh_cache import kept_mesh, uses_kept_mesh
from tests.distributed.rank_pool import RankPool
from tests.tiers import mostly_long

FIRST_OWN = WARM_UP_STEPS + MEASURED_STEPS + 1
"""The first step in the order of measured times."""
STEPS = FIRST_OWN

Seconds = Mapping[str, float]


def seconds(forward: float, backward_input: float, backward_weight: float) -> Seconds:
    return {
        ActionKind.FORWARD: forward,
        ActionKind.INPUT: backward_input,
        ActionKind.WEIGHT: backward_weight,
        "hop": 0.1,
    }


@dataclass
class Ordered:
    trained: Trained
    orders: list[Schedule]
    """That of the first steps, and that of the others."""
    times: PipelineTimes | None


@uses_kept_mesh
def train_in_order(task: RankTask, clocks: Sequence[Seconds] | None, warm_up: int = WARM_UP_STEPS) -> Ordered:
    """Train on random tokens; with `clocks`, rank by rank, in place of what the stopwatch says."""
    watched: list[AutoScheduleExecutor] = []
    orders: list[Schedule] = []
    set_schedule = AutoScheduleExecutor.set_schedule

    def noted(executor: AutoScheduleExecutor, schedule: Schedule) -> None:
        watched[:] = [executor]
        orders.append(schedule)
        set_schedule(executor, schedule)

    def told(watch: Stopwatch, what: str) -> float:
        return read(watch, what) if clocks is None else clocks[task.rank][what]

    read = Stopwatch.seconds
    with (
        kept_mesh(task) as mesh,
        patch.object(AutoScheduleExecutor, "set_schedule", noted),
        patch.object(Stopwatch, "seconds", told),
        patch.object(auto_schedule, "WARM_UP_STEPS", warm_up),
    ):
        done = trained(task.run, mesh, STEPS)
    return Ordered(done, orders, watched[0].times)


def run_of(**more: Any) -> NativeRun:
    parallelism = {"schedule": "Automatic", "activation_limit": 3, **more.pop("parallelism", {})}
    layout = {"pipeline": 2, "micro_batches": 8, "batch": 16, "parallelism": parallelism}
    return small_run(**{**layout, **more})


SKEWED = [
    (seconds(4.0, 1.0, 1.0), seconds(1.0, 1.0, 4.0)),
    (seconds(4.0, 4.0, 1.0), seconds(1.0, 1.0, 4.0)),
]
"""What the clocks of the first and of the last stage say."""
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "a mixture with dropout": ({"mixture": "DeepSeek-V3", "training": {"dropout": 0.1}}, 1),
    "bf16 and ZeRO-3": ({"data": 2, "zero": 3, "precision": Precision.BF16, "layers": 2}, 2),
}
"""How a run is laid out, and how many of `SKEWED` it is tried with."""


def equal(one: Trained, other: Trained) -> bool:
    same = all(torch.equal(one.parameters[name], other.parameters[name]) for name in one.parameters)
    results = [(r.loss, r.gradient_norm, r.experts) for r in one.results]
    return same and results == [(r.loss, r.gradient_norm, r.experts) for r in other.results]


@pytest.mark.parametrize("name", mostly_long(LAYOUTS, lambda name: name != "bf16 and ZeRO-3"))
def test_other_times_give_other_orders_and_the_same_bits(pool: RankPool, name: str) -> None:
    layout, tried = LAYOUTS[name]
    run = run_of(**layout)
    world = run.layout.world_size
    of_stage = [run.layout.coordinates(rank).pipeline for rank in range(world)]
    unmeasured = pool.run(train_in_order, run, None, 99)
    assert [len(rank.orders) for rank in unmeasured] == [1] * world
    found = [unmeasured[0].orders[0]]
    for skewed in SKEWED[:tried]:
        # No two ranks read the same.
        clocks = [
            {what: (1 + 0.02 * rank) * one for what, one in skewed[stage].items()}
            for rank, stage in enumerate(of_stage)
        ]
        ranks = pool.run(train_in_order, run, clocks)
        orders = [rank.orders for rank in ranks]
        assert orders == [orders[0]] * world
        assert ranks[0].times is not None
        assert [rank.times for rank in ranks] == [ranks[0].times] * world
        first, own = orders[0]
        assert first == found[0]
        found.append(own)
        for rank, other in zip(ranks, unmeasured, strict=True):
            assert equal(rank.trained, other.trained)
        assert [r.bubble is None for r in ranks[0].trained.results] == [n < FIRST_OWN - 1 for n in range(1, STEPS + 1)]
    assert len({order.render(0) for order in found}) == 1 + tried


def train_by_clock(task: RankTask, clocks: Sequence[Seconds], die_after: int | None) -> list[StepReport]:
    """`train`, with checkpoints, told the times of `clocks`."""
    with patch.object(Stopwatch, "seconds", lambda _, what: clocks[task.rank][what]):
        return train_fully(task, -1, None, die_after)[1].reports


@pytest.mark.long
def test_a_resumed_run_repeats_the_bits_in_another_order(pool: RankPool, tmp_path: Path, text: Path) -> None:
    run = run_of(steps=6, every=2)
    directories = {"data_dir": text, "checkpoint_dir": tmp_path}
    pool.run(train_by_clock, run, SKEWED[0], 5, **directories)
    resumed, *_ = pool.run(train_by_clock, run, SKEWED[1], None, **directories)
    straight, *_ = pool.run(train_by_clock, run, SKEWED[0], None, data_dir=text, checkpoint_dir=tmp_path / "straight")
    assert resumed[0].step in (3, 5)  # the save of step 4 was perhaps not durable yet
    for report, other in zip(reversed(resumed), reversed(straight), strict=False):
        assert (report.step, report.loss, report.gradient_norm) == (other.step, other.loss, other.gradient_norm)
    assert [report.pipeline_bubble is None for report in straight] == [True, True, False, False, False, False]


def test_a_stage_of_more_layers_is_measured_to_take_longer(pool: RankPool) -> None:
    run = run_of(layers=8, parallelism={"layer_split": [7, 1]}, hidden_size=64)
    one, other = pool.run(train_in_order, run, None)
    assert one.times is not None
    assert one.times == other.times
    heavy, light = one.times.costs
    assert heavy.forward > light.forward > 0
    assert heavy.backward_input > light.backward_input > 0
    assert heavy.backward_weight > light.backward_weight > 0
    assert one.times.hop > 0
    assert one.orders == other.orders
