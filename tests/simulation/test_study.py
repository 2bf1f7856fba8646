"""Many runs: the interval of their goodput, and what variants of a job are worth."""

import math
from dataclasses import replace

import pytest

from meshwright.rules.checkpoint_interval import best_interval_seconds, useful_share
from meshwright.simulation.inputs import FaultKind, Inputs, Phases, Saves, mean
from meshwright.simulation.setting import Policy, Setting, up_time
from meshwright.simulation.study import (
    best,
    costs,
    enough,
    interval_rows,
    ladder,
    minimum_rows,
    rung_rows,
    spare_rows,
    study,
)
from meshwright.simulation.study import tier_rows as tiers

RIGID = Setting(
    mtbf=8 * 3600.0,
    interval=3600.0,
    step=10.0,
    horizon=60 * 86400.0,
    inputs=Inputs(
        faults={"stop": FaultKind(share=1.0, cause="PodLost", detection=300.0)},
        phases=Phases(spawn=0.0, rendezvous=0.0, load=0.0),
        saves=Saves(stall=30.0, durable=0.0),
        start=0.0,
    ),
)
CLUSTER = Setting(
    mtbf=6 * 3600.0, interval=1200.0, step=10.0, horizon=60 * 86400.0, gpus=512, units=8, nodes_per_unit=8
)


def test_the_interval_of_the_mean_contains_the_exact_value() -> None:
    expected = useful_share(3600.0, 30.0, RIGID.mtbf, 300.0)
    inside = 0
    for seed in range(20):
        result = study(RIGID, 20, 1000 * seed)
        inside += abs(result.goodput - expected) <= result.error
        low, high = result.between(lambda one: one.goodput)
        assert low < result.goodput < high
    assert inside >= 16  # 95% of 20 is 19


def test_the_best_of_the_simulated_intervals_is_the_one_of_the_formula() -> None:
    rows = interval_rows(RIGID, 60)
    steps = best_interval_seconds(30.0, RIGID.mtbf) / 10.0
    assert [row.name for row in rows if row.is_job] == ["360"]
    assert int(best(rows).name) == pytest.approx(steps, abs=1) or best(rows).result.goodput < (
        next(row for row in rows if int(row.name) == round(steps)).result.goodput + 0.002
    )


def test_jobs_without_checkpoints_or_failures_have_no_best_interval() -> None:
    assert interval_rows(replace(RIGID, interval=math.inf), 2) == []
    assert interval_rows(replace(RIGID, mtbf=math.inf), 2) == []


def test_spare_nodes_help_until_there_are_enough() -> None:
    rows = spare_rows(CLUSTER, 15)
    goodputs = [row.result.goodput for row in rows]
    assert goodputs == sorted(goodputs)
    assert rows[0].is_job
    assert goodputs[-1] - goodputs[-2] < 0.001
    chosen = enough(rows, lambda result: result.per_node)
    assert 0 < int(chosen.name) <= int(rows[-1].name)


def test_smaller_sizes_help_until_none_is_reached() -> None:
    rows = minimum_rows(CLUSTER, 15)
    assert (rows[0].name, rows[0].is_job) == ("8", True)
    assert rows[1].result.goodput > rows[0].result.goodput
    assert int(rows[-1].name) <= min(one.fewest_units for one in rows[-1].result.outcomes)


def test_each_rung_is_worth_something_or_costs_only_its_copies() -> None:
    rows = rung_rows(CLUSTER, 4, 20)
    values = [row.result.goodput for row in rows]
    assert len(values) == 7
    # Only the copies in memory cost something: at most their overhead.
    for before, after in zip(values, values[1:], strict=False):
        assert after >= before - 0.011
    assert values[-1] > values[0] + 0.05
    alone = [name for name, _, _ in ladder(replace(CLUSTER, units=1), 2)]
    assert len(alone) == 5
    assert alone[2] == "2 spare nodes"


def test_the_rung_of_the_job_is_marked() -> None:
    rows = rung_rows(replace(CLUSTER, policy=Policy(spares=2)), 2, 2)
    assert [row.name for row in rows if row.is_job] == ["2 spare nodes"]


def test_the_job_that_keeps_state_in_memory_is_among_rungs_and_checkpoints() -> None:
    own = Policy(spares=2, shrinks=True, at_once=True, in_memory=True, continues=True, state_units=2)
    setting = replace(CLUSTER, policy=own)
    assert [row.name for row in rung_rows(setting, 2, 2) if row.is_job] == ["other replicas continue at once"]
    assert [row.name for row in tiers(setting, 2) if row.is_job] == ["storage, and state in ranks that are left"]
    copies = replace(own, state_units=None, copy_steps=10, continues=False)
    assert [row.fields for row in rung_rows(replace(CLUSTER, policy=copies), 2, 2) if row.is_job] == [
        "recovery.inMemory: true"
    ]


def test_costs_of_a_failure_follow_from_the_policy() -> None:
    found = {cost.kind: cost for cost in costs(CLUSTER)}
    # On average half an interval, and the time until a checkpoint is complete.
    assert found["process"].redone == pytest.approx(1200.0 / 2 + 60.0, abs=1.0)
    assert (found["process"].detecting, found["process"].waiting) == (3.0, 0.0)
    assert found["node"].waiting == pytest.approx(mean(CLUSTER.inputs.faults["node"].repair), rel=0.01)
    kept = {cost.kind: cost for cost in costs(replace(CLUSTER, policy=Policy(spares=2, in_memory=True)))}
    assert kept["process"].redone < CLUSTER.step
    assert kept["process"].restarting == pytest.approx(found["process"].restarting - 120.0 + 15.0, abs=0.1)
    assert kept["node"].waiting == 0.0
    assert kept["hang"] == found["hang"]


def test_without_checkpoints_a_failure_costs_half_of_the_run_on_average() -> None:
    found = {cost.kind: cost.redone for cost in costs(replace(CLUSTER, interval=math.inf))}
    assert found["process"] == found["node"] == pytest.approx(CLUSTER.horizon / 2, rel=0.01)
    found = {cost.kind: cost.redone for cost in costs(replace(CLUSTER, interval=math.inf, work=86400.0))}
    assert found["process"] == pytest.approx(86400.0 / 2, rel=0.01)


def test_copies_in_memory_are_rows_with_their_interval() -> None:
    rows = tiers(replace(CLUSTER, policy=Policy(spares=4)), 5)
    assert [row.is_job for row in rows] == [True, False, False, False]
    every_step, every_ten = rows[1].result.goodput, rows[2].result.goodput
    assert every_ten > every_step  # a tenth of the copies, for some steps more


def test_a_stall_as_long_as_the_time_between_failures_is_rejected() -> None:
    assert up_time(1080.0, 600.0) == 480.0
    with pytest.raises(ValueError, match="leaves no time"):
        up_time(60.0, 60.0)
