"""The plan of a random job against every other strategy for it, and the operator's plan against the command's."""

from __future__ import annotations

import pytest

from meshwright.planner.errors import PlanError
from meshwright.planner.hardware import Hardware
from meshwright.planner.plan import Plan, make_plans, new_plans, running_plan
from meshwright_operator.planning.request import PlanFailure, PlanRequest, solve
from tests.planner.builders import choose_plan
from tests.planner.search.exhaustive import RandomJob, faster_strategy, random_job
from tests.randomness import first_seed, runs
from tests.tiers import mostly_long

OFTEN, ALWAYS = 100, 3
"""Jobs of the long tier, and of those the ones that always run. `make fuzz RUNS=1000` draws more."""
TOLERANCE = 1.01
CPU_SECONDS = 5.0
SEEDS = mostly_long(
    range(first_seed(), first_seed() + runs(OFTEN)), often=lambda seed: seed < first_seed() + min(runs(ALWAYS), ALWAYS)
)


def plans_of(job: RandomJob) -> list[Plan]:
    try:
        return make_plans(job.spec, job.inventory)
    except PlanError:
        return []


@pytest.mark.parametrize("seed", [pytest.param(20139, id="recomputation hides launches and gradients")])
def test_no_strategy_is_more_than_a_percent_faster_than_the_plan_of_a_job_that_once_had_one(seed: int) -> None:
    check_against_all(random_job(seed))


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", SEEDS)
def test_no_strategy_is_more_than_a_percent_faster(seed: int) -> None:
    check_against_all(random_job(seed))


def check_against_all(job: RandomJob) -> None:
    """The plan takes at most a percent longer than every other strategy."""
    plans = plans_of(job)
    if not plans:
        pytest.skip("the job has no plan")
    estimate = plans[0].estimate
    assert estimate is not None
    faster = faster_strategy(job, plans[0], estimate.seconds / TOLERANCE * (1 - 1e-9))
    assert faster is None, f"{plans[0].strategy} is slower than {faster}"


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", SEEDS)
def test_the_operator_and_the_command_agree_and_a_running_job_keeps_its_plan(seed: int) -> None:
    job = random_job(seed)
    hardware = Hardware.of(job.inventory, job.spec.workers.gpus_per_worker)
    answer = solve(PlanRequest.new(job.spec, hardware), CPU_SECONDS)
    if isinstance(answer, PlanFailure):
        with pytest.raises(PlanError) as raised:
            new_plans(job.spec, hardware)
        assert str(raised.value) == answer.message
        return
    chosen, _ = choose_plan(job.spec, job.inventory)
    assert list(answer) == plans_of(job)
    assert chosen.layout in [one.layout for one in answer]
    kept = running_plan(job.spec, Hardware(), chosen.to_status())
    assert kept.strategy == chosen.strategy
    assert kept.run_config(job.spec) == chosen.run_config(job.spec)
