"""A schedule is one class: nothing else names the one below, and rules, planner and ranks take it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule
from meshwright.api.precision import Precision
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.crd.definition import custom_resource_definition
from meshwright.crd.rule_placement import VALIDATIONS
from meshwright.models.presets import PRESETS
from meshwright.planner.cost.accelerators import ACCELERATORS
from meshwright.planner.cost.comm_groups import group_spans
from meshwright.planner.cost.estimate import estimate, machine_for
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.cost.timeline import simulate_pipeline
from meshwright.planner.plan import make_plan
from meshwright.planner.search.best_first import search
from meshwright.planner.search.request import Pins, SearchRequest
from meshwright.rules.validation import check_spec
from meshwright.schedules.actions import ActionKind, Schedule, one
from meshwright.schedules.pipeline_layout import schedule_of
from meshwright.schedules.registry import generate, kind_of
from meshwright.schedules.schedule import (
    PipelineScheduleKind,
    PipelineShape,
    StageTimes,
    register,
    registered,
    unregister,
)
from meshwright.schedules.simulator import UNIT_COSTS, ActionCosts, simulate
from meshwright.schedules.validate import schedule_problems
from meshwright_local.apiserver.schema.cel import compile_expression
from meshwright_worker.rank.task import RankTask
from tests.distributed.cases import Trained, train_on_random_tokens
from tests.distributed.configs import small_run
from tests.distributed.mesh_cache import uses_kept_mesh
from tests.distributed.rank_pool import RankPool
from tests.planner.builders import inventory, racks
from tests.rules.specs import GOOD, changed


class LastInFirstOut(PipelineScheduleKind):
    """All forward passes, then the backward passes from the last micro-batch to the first."""

    name = "LastInFirstOut"
    short_name = "lifo"
    forwards_first = True
    micro_batches_per_rank = 2
    searched = False

    def generate(self, shape: PipelineShape, costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS) -> Schedule:
        """One stage a rank."""
        forwards, backwards = range(shape.micro_batches), reversed(range(shape.micro_batches))
        order = [(ActionKind.FORWARD, m) for m in forwards] + [(ActionKind.BACKWARD, m) for m in backwards]
        ranks = tuple(tuple(one(kind, rank, m) for kind, m in order) for rank in range(shape.ranks))
        return Schedule(self.short_name, shape.ranks, shape.micro_batches, ranks)

    def in_flight(self, shape: PipelineShape, rank: int) -> float:
        """All of them."""
        return float(shape.micro_batches)

    def _bubble(self, shape: PipelineShape, times: StageTimes) -> float:
        return (shape.ranks - 1) * times.total


TOY = LastInFirstOut.order
# Tests of other modules know this package's schedules alone: the CRD that is generated here has one more.
unregister(LastInFirstOut)


def make_known() -> None:
    """Registers the schedule unless it is."""
    if TOY not in {kind.order for kind in registered()}:
        register(LastInFirstOut)


@pytest.fixture(autouse=True, scope="module")
def known() -> Iterator[None]:
    """The schedule is registered during the tests of this module."""
    make_known()
    yield
    unregister(LastInFirstOut)


def job(**parallelism: Any) -> ParallelTrainingJobSpec:
    fields = {f"parallelism.{field}": value for field, value in parallelism.items()}
    return ParallelTrainingJobSpec.model_validate(changed(GOOD, fields))


def test_the_api_takes_its_name_and_no_unknown_one() -> None:
    spec = job(schedule="LastInFirstOut")
    assert spec.parallelism.order is TOY
    assert spec.model_dump(mode="json")["parallelism"]["schedule"] == "LastInFirstOut"
    assert TOY not in list(PipelineSchedule)
    with pytest.raises(ValueError, match="schedule"):
        job(schedule="FirstInLastOut")


def test_rules_hold_it_to_its_limits() -> None:
    assert check_spec(job(schedule="LastInFirstOut")) == []
    fields = [problem.field for problem in check_spec(job(schedule="LastInFirstOut", microBatches=2))]
    assert fields == ["parallelism.microBatches"]
    fields = [problem.field for problem in check_spec(job(schedule="LastInFirstOut", virtualStages=2))]
    assert fields == ["parallelism.virtualStages"]


def test_admission_takes_a_job_that_names_it() -> None:
    (version,) = custom_resource_definition()["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    names = schema["properties"]["parallelism"]["properties"]["schedule"]["enum"]
    assert [name for name in names if name not in list(PipelineSchedule)] == ["LastInFirstOut"]
    good, few = job(schedule="LastInFirstOut"), job(schedule="LastInFirstOut", microBatches=2)
    rules = schema["properties"]["parallelism"][VALIDATIONS]
    refused = [
        [
            rule["fieldPath"]
            for rule in rules
            if compile_expression(rule["rule"]).evaluate({"self": spec.wire()["parallelism"]}) is not True
        ]
        for spec in (good, few)
    ]
    assert refused == [[], [".microBatches"]]


def test_its_order_runs_and_waits_as_it_says() -> None:
    schedule = schedule_of(ParallelismSpec(schedule=TOY), 4, 8)
    assert schedule == generate("lifo", 4, 8)
    assert schedule_problems(schedule) == []
    shape, run = PipelineShape(4, 8), simulate(schedule)
    assert run.longest - 8 * 3 == kind_of(TOY).bubble(shape, StageTimes(1.0, 1.0, 1.0))
    assert list(run.in_flight) == [kind_of(TOY).in_flight(shape, rank) for rank in range(4)]


def test_its_ranks_are_drawn() -> None:
    assert generate("lifo", 2, 2).render(1) == "F1.0 F1.1 B1.1 B1.0"


def test_the_planner_prices_it() -> None:
    work = Workload(PRESETS["llama-3.1-70b"], 8192, 64)
    machine = machine_for(ACCELERATORS["H100-SXM5-80GB"])
    strategy = Strategy(tensor=8, pipeline=8, micro_batches=64, schedule=TOY)
    found = estimate(work, strategy, machine)
    assert found.bubble == estimate(work, Strategy(tensor=8, pipeline=8, micro_batches=64), machine).bubble
    pipeline = simulate_pipeline(work, strategy, machine, group_spans(strategy, machine.fabric, machine.runtime.order))
    closed = found.time.total - found.time.data - found.time.optimizer - 15e-3 * machine.constants.host
    assert closed == pytest.approx(pipeline.simulation.makespan, rel=0.08)


def test_a_plan_of_it_is_made_priced_and_drawn() -> None:
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    nodes = inventory(*racks(1, 2, 8, labels=labels))
    spec = job(schedule="LastInFirstOut", microBatches=None)
    plan = make_plan(spec, nodes)
    assert (plan.strategy.schedule, plan.strategy.pipeline) == (TOY, 2)
    assert plan.strategy.micro_batches >= 4, "twice as many micro-batches as ranks"
    assert any(reason.startswith("schedule LastInFirstOut: set by") for reason in plan.reasons)
    plain = make_plan(job(schedule="1F1B", microBatches=plan.strategy.micro_batches), nodes)
    assert plan.estimate is not None
    assert plain.estimate is not None
    assert plan.estimate.seconds == pytest.approx(plain.estimate.seconds)
    assert plan.estimate.memory.activations > plain.estimate.memory.activations, "all micro-batches are in flight"
    run = plan.run_config(spec)
    drawn = schedule_of(run.parallelism, run.pipeline, run.micro_batches).render(0)
    assert drawn.startswith("F0.0 F0.1 ")
    assert drawn.endswith(" B0.1 B0.0")
    again = make_plan(job(schedule="LastInFirstOut", microBatches=None), nodes, plan.to_status())
    assert again.strategy == plan.strategy


def test_a_search_of_every_degree_takes_it_where_it_is_pinned() -> None:
    machine = machine_for(ACCELERATORS["H100-SXM5-80GB"])
    work = Workload(PRESETS["llama-3-8b"], 2048, 32)
    found = search(SearchRequest(work, machine, 16, pins=Pins(schedule=TOY, pipeline=4))).best
    assert found.strategy.schedule is TOY
    assert found.strategy.micro_batches >= 8
    assert "lifo" in found.summary


@uses_kept_mesh
def train(task: RankTask, steps: int) -> Trained:
    """What a rank runs: a function of this module, so that ranks know the schedule."""
    make_known()
    result: Trained = train_on_random_tokens(task, steps)
    return result


def test_two_ranks_train_what_one_process_does() -> None:
    pool = RankPool()
    try:
        one_process = pool.run(train, small_run(micro_batches=4, precision=Precision.FP64), 2)[0]
        run = small_run(pipeline=2, micro_batches=4, precision=Precision.FP64, parallelism={"schedule": TOY})
        ranks = pool.run(train, run, 2)
    finally:
        pool.close()
    parameters = {name: tensor for rank in ranks for name, tensor in rank.parameters.items()}
    expected = [result.loss for result in one_process.results]
    assert [result.loss for result in ranks[0].results] == pytest.approx(expected, rel=1e-12)
    assert parameters.keys() == one_process.parameters.keys()
    for name, tensor in one_process.parameters.items():
        torch.testing.assert_close(parameters[name], tensor, rtol=1e-10, atol=1e-12)
