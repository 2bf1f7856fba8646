"""Plans a job for another framework: with its properties in the cost model, and only with techniques that it has."""

from __future__ import annotations

from dataclasses import replace

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.models.architecture import Architecture
from meshwright.planner.cluster.limits import ClusterLimits
from meshwright.planner.cost.frameworks import FRAMEWORKS
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.cost_model import CostModel
from meshwright.planner.errors import PlanError
from meshwright.planner.frameworks.target import FrameworkRun, Launch, Target, fields_without_equivalent
from meshwright.planner.search.best_first import ranked_layouts
from meshwright.planner.search.candidate import FittingLayout
from meshwright.planner.search.errors import plan_error
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.spec_request import pinned_request
from meshwright.planner.workload import TrainingJob
from meshwright.protocol.run_config import CommandRun


def cost_model_of_target(cost_model: CostModel | None, target: Target, machine: Machine | None) -> CostModel | None:
    """Return the cost model with the framework's properties, on a machine as it is without the job's runtime."""
    if cost_model is None or machine is None:
        return None
    account = FRAMEWORKS[target.account]
    return CostModel(replace(cost_model.job, runtime=account), machine.running(account))


def request_of_target(
    spec: ParallelTrainingJobSpec,
    architecture: Architecture,
    limits: ClusterLimits,
    cost_model: CostModel | None,
    target: Target,
) -> SearchRequest:
    """Return a search that keeps the stated fields of a job, and otherwise uses what the framework has.

    Raises:
        PlanError: the framework cannot express the model.
    """
    if problem := target.model_problem(architecture):
        raise PlanError(f"{target.name}: {problem}", "InvalidSpec")
    job = replace(TrainingJob.of(spec, architecture), runtime=FRAMEWORKS[target.account])
    techniques = replace(target.techniques, runs=target.runs)
    machine = cost_model.machine if cost_model is not None else None
    return pinned_request(spec, job, machine, limits, techniques)


def layouts_of_target(request: SearchRequest, target: Target) -> list[FittingLayout]:
    """Return the layouts that fit and that the framework can express, the best first.

    Raises:
        PlanError: there is none; the message has what the framework cannot express, if that is the reason.
    """
    model = request.work.model
    try:
        ranked = [one for one in ranked_layouts(request) if not target.strategy_problem(model, one.strategy)]
        if ranked:
            return ranked
        free = ranked_layouts(replace(request, techniques=replace(request.techniques, runs=None)))
    except ValueError as error:
        raise PlanError(f"{target.name}: {error}", "InvalidSpec") from error
    if not free:
        raise plan_error(request)
    raise PlanError(f"{target.name}: {target.strategy_problem(model, free[0].strategy)}", "InvalidSpec")


def launch_of(spec: ParallelTrainingJobSpec, architecture: Architecture, strategy: Strategy, target: Target) -> Launch:
    """Return how every rank starts the framework with a strategy, and what it does not take from the job.

    Raises:
        ValueError: the spec has no `training`.
    """
    if spec.training is None:
        raise ValueError("`training` is required")
    launch = target.launch(FrameworkRun(spec, spec.training, architecture, strategy))
    missing = fields_without_equivalent(spec, target.handled)
    notes = (*(f"no equivalent: spec.{path}" for path in missing), *launch.notes)
    return replace(launch, notes=(*notes, _order_note(target)) if target.renumbers(strategy) else notes)


def _order_note(target: Target) -> str:
    return (
        f"{target.name} numbers ranks by stage first, then by replica; the plan has them by replica first, and places "
        "the stages of a replica next to each other"
    )


def with_flags(
    run: CommandRun, spec: ParallelTrainingJobSpec, architecture: Architecture, strategy: Strategy, target: Target
) -> CommandRun:
    """Return the run with the plan in the framework's flags after the words of the user's command.

    Raises:
        ValueError: the spec has no `training`.
    """
    launch = launch_of(spec, architecture, strategy, target)
    variables = [f"{name}={value}" for name, value in launch.environment.items()]
    prefix = ["env", *variables] if variables else []
    changes = {
        "command": [*prefix, *run.command, *launch.flags],
        "stages_outermost": target.renumbers(strategy) or None,
    }
    return run.model_copy(update=changes)
