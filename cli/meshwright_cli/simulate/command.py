"""`meshwright simulate`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import ValidationError

from meshwright.api.parsing import InvalidSpecError, field_path, parse_known_fields, problem_text
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.figures import format_number
from meshwright.planner.cost.accelerators import accelerator
from meshwright.planner.errors import PlanError
from meshwright.rules.checkpoint_interval import DEFAULT_NODE_FAILURE_RATE, mtbf_of_nodes
from meshwright.simulation.inputs import Inputs, mean
from meshwright.simulation.published import table
from meshwright.simulation.replay import Replay, ReplayError, replay
from meshwright.simulation.setting import Setting
from meshwright_cli.parameters import Duration, manifest_parameter
from meshwright_cli.plan.command import job_of_manifest, nodes_to_plan_for
from meshwright_cli.simulate.planned_job import PlannedJob, planned_job
from meshwright_cli.simulate.report import simulation_report
from meshwright_cli.simulate.report_json import document
from meshwright_cli.simulate.report_text import lines

PLANNED_GPUS = 16_384
"""GPUs of the cluster for which the job is planned without --nodes and --inventory: more than most jobs need."""
COMMAND_DAYS = 90.0
"""Simulated time of a job whose length is unknown."""
MOST_FAILURES = 20_000
"""Failures of a run, above which a simulation takes minutes."""
LONGEST = 20.0
"""A run ends after so many times the start and the training of the job."""


def _print_published(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo("\n".join(table()))
        ctx.exit()


def _print_inputs(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(yaml.safe_dump(Inputs().wire(), sort_keys=False), nl=False)
        ctx.exit()


_FROM_LEDGER = ("nodes", "mtbf", "node-failures", "repair", "step", "days", "inputs")
"""Options for what `--replay` takes from the job's status, or does not simulate."""


@click.command()
@manifest_parameter
@click.option(
    "--nodes",
    type=click.IntRange(1, 100_000),
    help="Number of nodes that the job can use: its own and spare ones. Defaults to its own and `recovery.spareNodes`.",
)
@click.option("--mtbf", type=Duration(), help="Mean time between failures of the whole job while it runs, such as 8h.")
@click.option(
    "--node-failures",
    type=click.FloatRange(0, 10_000),
    help=f"Failures for each 1,000 node-days, instead of --mtbf (default: {DEFAULT_NODE_FAILURE_RATE}).",
)
@click.option("--repair", type=Duration(), help="Time until a lost node is available again, in place of the default.")
@click.option("--step", type=Duration(), help="Time of a step, in place of the planner's estimate.")
@click.option("--interval", type=Duration(), help="Time between checkpoints, in place of `checkpoint.everySteps`.")
@click.option("--days", type=click.FloatRange(0, 3650, min_open=True), help="Days to simulate, not the job's steps.")
@click.option(
    "--inputs", type=click.Path(path_type=Path), help="YAML file with failures and times. Print it with --show-inputs."
)
@click.option("--replay", "replays", is_flag=True, help="Take failures and times from the ledger in the job's status.")
@click.option("--inventory", type=click.Path(path_type=Path), help="Nodes to plan for, as for `meshwright plan`.")
@click.option("--gpu", default="NVIDIA-H100-80GB-HBM3", show_default=True, help="Product of the assumed GPUs.")
@click.option("--runs", type=click.IntRange(2, 10_000), default=100, show_default=True, help="Number of runs.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True, help="Seed of the first run.")
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
@click.option(
    "--show-inputs", is_flag=True, is_eager=True, expose_value=False, callback=_print_inputs,
    help="Print the default failures and times as YAML, and exit.",
)  # fmt: skip
@click.option(
    "--published", is_flag=True, is_eager=True, expose_value=False, callback=_print_published,
    help="Simulate published runs of large jobs, print both results, and exit.",
)  # fmt: skip
def simulate(manifest: Path, output: str, runs: int, seed: int, **options: Any) -> None:
    """Simulate months of a job with failures, and print its expected goodput.

    Also prints the best checkpoint interval, how many spare nodes and which smallest size are worth it, and what each
    rung of recovery adds. Failures are random; the times of recoveries are published ones unless you give yours.
    """
    job = job_of_manifest(manifest)
    name = str(job["metadata"].get("name") or manifest.stem)
    _check_options(options)
    if options["replays"] and not isinstance(job.get("status"), dict):
        raise click.ClickException(f"{manifest}: `status` is missing: use the output of `kubectl get ptj NAME -o yaml`")
    inputs = _inputs(options["inputs"])
    try:
        planned = _planned(job, options)
    except (InvalidSpecError, PlanError) as error:
        raise click.ClickException(f"{manifest}: {error}") from error
    setting, source, notes = _setting(planned, inputs, options)
    notes = (*notes, *planned.notes)
    replayed: Replay | None = None
    if options["replays"]:
        replayed = _replayed(manifest, job, planned, setting)
        setting, source = replayed.setting, "`status.restarts`"
    replicas = planned.plan.layout.data
    report = simulation_report(name, setting, replicas, source, runs, seed, replayed=replayed, notes=notes)
    if output == "json":
        click.echo(json.dumps(document(report), indent=2))
    else:
        click.echo("\n".join(lines(report)))


def _check_options(options: dict[str, Any]) -> None:
    """Reject what no job can be simulated with, before time is spent on a plan.

    Raises:
        click.ClickException: a time is 0, or two options contradict each other.
    """
    if options["mtbf"] is not None and options["node_failures"] is not None:
        raise click.ClickException("--mtbf cannot be used with --node-failures: leave one of them out")
    for name in _FROM_LEDGER if options["replays"] else ():
        if options[name.replace("-", "_")] is not None:
            raise click.ClickException(
                f"--{name} cannot be used with --replay, which takes it from the job's status: leave one of them out"
            )
    for name in ("mtbf", "step", "interval"):
        if options[name] is not None and options[name] <= 0:
            advice = "; for a job without failures use --node-failures 0" if name == "mtbf" else ""
            raise click.ClickException(f"--{name}: must be above 0{advice}")


def _planned(job: dict[str, Any], options: dict[str, Any]) -> PlannedJob:
    inventory, gpu = options["inventory"], options["gpu"]
    known = accelerator(gpu)
    gpus: int | None = PLANNED_GPUS
    if inventory is not None:
        gpus = None
    elif known is not None and options["nodes"] is not None:
        gpus = known.node * options["nodes"]
    nodes, pods = nodes_to_plan_for(inventory, gpus, gpu, job)
    return planned_job(job, nodes, pods)


def _setting(planned: PlannedJob, inputs: Inputs, options: dict[str, Any]) -> tuple[Setting, str, tuple[str, ...]]:
    """The job as it is simulated, where its failure rate is from, and notes."""
    spec = planned.spec
    available = options["nodes"] if options["nodes"] is not None else planned.nodes + spec.recovery.spare_nodes
    if available < planned.nodes:
        raise click.ClickException(f"--nodes: the job needs {planned.nodes} nodes, got {available}")
    mtbf, source = _mtbf(planned.nodes, options)
    step, notes = _step(planned, options)
    if options["repair"] is not None:
        faults = {
            name: kind.model_copy(update={"repair": options["repair"]}) if kind.nodes else kind
            for name, kind in inputs.faults.items()
        }
        inputs = inputs.model_copy(update={"faults": faults})
    days = options["days"] or (COMMAND_DAYS if planned.steps is None else None)
    work = math.inf if days is not None or planned.steps is None else planned.steps * step
    setting = Setting(
        mtbf=mtbf,
        interval=_interval(planned, options, step),
        step=step,
        work=work,
        horizon=days * 86400.0 if days is not None else LONGEST * (mean(inputs.start) + work),
        gpus=planned.plan.layout.world_size,
        units=planned.units,
        nodes_per_unit=planned.nodes // planned.units,
        rates=planned.rates,
        policy=planned.policy(available - planned.nodes),
        recovery=spec.recovery,
        inputs=inputs,
    )
    if not options["replays"]:
        _check_failures(setting)
    return setting, source, notes


def _check_failures(setting: Setting) -> None:
    """Reject a job that fails too often to advance, or to be simulated.

    Raises:
        click.ClickException: its runs have too many failures.
    """
    loads = mean(setting.inputs.phases.load) / setting.mtbf
    failures = min(setting.work, setting.horizon) / setting.mtbf * math.exp(min(loads, 100.0))
    if failures > MOST_FAILURES:
        raise click.ClickException(
            f"--mtbf: with one failure in {format_number(setting.mtbf)} s, a run has about"
            f" {_rounded(failures)}, and at most {MOST_FAILURES:,} are simulated: use a longer time between"
            " failures, or simulate fewer days with --days"
        )


def _rounded(count: float) -> str:
    return format_number(count, 2) if count < 1e9 else f"{count:.0e}"


def _mtbf(nodes: int, options: dict[str, Any]) -> tuple[float, str]:
    given, rate = options["mtbf"], options["node_failures"]
    if given is not None:
        return given, "--mtbf"
    rate = DEFAULT_NODE_FAILURE_RATE if rate is None else rate
    return mtbf_of_nodes(nodes, rate), f"{rate:g} for each 1,000 node-days"


def _step(planned: PlannedJob, options: dict[str, Any]) -> tuple[float, tuple[str, ...]]:
    if options["step"] is not None:
        return options["step"], ()
    if options["replays"]:  # the ledger has it
        return planned.step_seconds or 1.0, ()
    if planned.step_seconds is None:
        if planned.steps is not None:
            raise click.ClickException("--step: the planner has no estimate for this job: give the time of a step")
        return 1.0, ("steps of a `runtime.command` are unknown: give their time with --step",)
    return planned.step_seconds, ("the time of a step is the planner's estimate: give a measured one with --step",)


def _interval(planned: PlannedJob, options: dict[str, Any], step: float) -> float:
    given, checkpoint = options["interval"], planned.spec.checkpoint
    if given is not None:
        if given < step and not options["replays"]:
            raise click.ClickException(
                f"--interval: must be at least one step, {format_number(step)} s, got {format_number(given)} s"
            )
        return float(given)
    if checkpoint is None:
        return math.inf
    if planned.steps is None:
        raise click.ClickException("--interval: required for a job with `runtime.command`, which saves by itself")
    return checkpoint.interval * step


def _inputs(path: Path | None) -> Inputs:
    """The inputs of a file, with defaults for all that it leaves out.

    Raises:
        click.ClickException: the file cannot be read, or has other fields or values.
    """
    if path is None:
        return Inputs()
    try:
        content = yaml.safe_load(path.read_text())
        return Inputs.model_validate({} if content is None else content)
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise click.ClickException(f"{path}: {field_path(first['loc'])}: {problem_text(first)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise click.ClickException(f"{path}: not valid YAML: {error}") from error


def _replayed(filename: Path, job: dict[str, Any], planned: PlannedJob, setting: Setting) -> Replay:
    checkpoint = planned.spec.checkpoint
    try:
        status = parse_known_fields(ParallelTrainingJobStatus, job["status"])
        return replay(status, checkpoint.interval if checkpoint is not None else None, setting)
    except ReplayError as error:
        raise click.ClickException(f"{filename}: {error}") from error
    except ValueError as error:
        raise click.ClickException(f"{filename}: `status` is invalid: {error}") from error
