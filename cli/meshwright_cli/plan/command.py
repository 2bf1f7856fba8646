"""`meshwright plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import yaml

from meshwright.api.labels import GPU_RESOURCE, KIND
from meshwright.api.parsing import InvalidSpecError, parse_spec
from meshwright.crd.manifest_check import check_manifest
from meshwright.kube_yaml import load_documents
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost.accelerators import ACCELERATORS, accelerator
from meshwright.planner.errors import PlanError
from meshwright.planner.frameworks.registry import TARGETS
from meshwright.planner.search.request import Objective
from meshwright_cli.fabric import fabric_option, read_fabric
from meshwright_cli.jobs.output import line_as_lines, terminal_width
from meshwright_cli.parameters import input_text, manifest_parameter
from meshwright_cli.plan.forecast import Forecast, as_json, forecast, sentences
from meshwright_cli.plan.framework_launch import as_json as launch_as_json
from meshwright_cli.plan.framework_launch import launch_for, script
from meshwright_cli.plan.inventory_file import MAX_NODES, UNLIMITED, InventoryFileError, NodeEntry, nodes_of, read_nodes
from meshwright_cli.plan.pod_additions import additions_of
from meshwright_cli.plan.report import PlanReport, inventory_of, plan_report
from meshwright_cli.plan.report_json import document
from meshwright_cli.plan.report_text import lines

MAX_PROBLEMS = 5
ASSUMED_GPUS = 64
"""GPUs of the assumed cluster."""


@click.command()
@manifest_parameter
@click.option(
    "--inventory",
    type=click.Path(path_type=Path),
    help="Nodes: the output of `kubectl get nodes -o json`, or a list of {name, gpus, free, product, labels, count}.",
)
@click.option(
    "--gpus",
    type=click.IntRange(1, 1_000_000),
    help=f"Number of GPUs to assume if --inventory is not given (default: {ASSUMED_GPUS}).",
)
@click.option("--gpu", default="NVIDIA-H100-80GB-HBM3", show_default=True, help="Product of the assumed GPUs.")
@fabric_option
@click.option(
    "--profiles",
    type=click.Path(path_type=Path),
    help="Profiles of the site: the document of the chart's value `profiles`, or values with it.",
)
@click.option(
    "--objective",
    type=click.Choice([o.value for o in Objective]),
    default=Objective.TIME.value,
    show_default=True,
    help="Objective of the search over all degrees.",
)
@click.option("--every-technique", is_flag=True, help="Also search techniques that this runtime does not implement.")
@click.option("--what-if", is_flag=True, help="Also estimate the step time on better hardware.")
@click.option(
    "--for",
    "framework",
    type=click.Choice(sorted(TARGETS)),
    help="Plan for another framework, and print its command line and configuration.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 10**18),
    help="Also print FLOPs, time and GPU-hours for this many tokens. Defaults to the job's steps with --price.",
)
@click.option("--price", type=click.FloatRange(0), help="Price of one GPU-hour, in any currency, for the cost.")
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
def plan(
    manifest: Path,
    inventory: Path | None,
    gpus: int | None,
    gpu: str,
    fabric: Path | None,
    profiles: Path | None,
    objective: str,
    every_technique: bool,
    what_if: bool,
    framework: str | None,
    tokens: int | None,
    price: float | None,
    output: str,
) -> None:
    """Plan and place a job without a cluster, and explain the result.

    Prints the layout and placement that the operator would choose on these nodes, with estimates, alternatives and
    reasons. Claims of devices count if the manifest or the inventory contains them. Exits with 1 if the job cannot be
    planned, and with 3 if it can, but does not fit on the free GPUs now.

    With --for, prints a shell script instead, which every rank runs: the plan in the flags or the configuration of that
    framework. Comments name the fields of the job that have no equivalent.
    """
    job, site = job_of_manifest(manifest), read_fabric(fabric)
    nodes, pods = nodes_to_plan_for(inventory, gpus, gpu, job)
    files = [manifest] if inventory is None else [manifest, inventory]
    additions = additions_of(job, parse_spec(job), profiles, *files)
    try:
        if framework is not None:
            planned = inventory_of(additions.spec_of(parse_spec(job)), nodes, pods, site)
            _print_launch(framework, job, planned, output)
            return
        found = plan_report(
            job,
            nodes,
            pods,
            objective=Objective(objective),
            every_technique=every_technique,
            with_what_if=what_if,
            site=site,
            additions=additions,
        )
    except (InvalidSpecError, PlanError) as error:
        raise click.ClickException(f"{manifest}: {error}") from error
    if inventory is None and output == "text":
        click.echo(f"No --inventory given: assuming {gpus or ASSUMED_GPUS} free {gpu}.\n", err=True)
    _print_report(found, _forecast(found, tokens, price), output)
    if found.placement is None:
        raise SystemExit(3)


def _print_launch(framework: str, job: dict[str, Any], nodes: Inventory, output: str) -> None:
    found, launch = launch_for(framework, job, nodes)
    if output == "json":
        click.echo(launch_as_json(framework, found, launch))
        return
    for line in script(framework, found, launch):
        click.echo(line)


def _print_report(found: PlanReport, spending: Forecast | None, output: str) -> None:
    if output == "json":
        more = {} if spending is None else {"forecast": as_json(spending)}
        click.echo(json.dumps({**document(found), **more}, indent=2))
        return
    columns = terminal_width()
    for line in lines(found):
        click.echo("\n".join(line_as_lines(line, columns)))
    if spending is not None:
        click.echo("\nThe run")
        for line in sentences(spending):
            click.echo(f"  {line}")


def _forecast(found: PlanReport, tokens: int | None, price: float | None) -> Forecast | None:
    if tokens is None and price is None:
        return None
    try:
        return forecast(found, tokens, price)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def job_of_manifest(filename: Path) -> dict[str, Any]:
    """The only job of a manifest.

    Raises:
        click.ClickException: the file cannot be read, does not contain exactly one job, or a cluster would reject it.
    """
    try:
        documents = load_documents(input_text(filename))
    except OSError as error:
        raise click.ClickException(f"{filename}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise click.ClickException(f"{filename}: not valid YAML: {error}") from error
    jobs = [one for one in documents if isinstance(one, dict) and one.get("kind") == KIND]
    if len(jobs) != 1:
        raise click.ClickException(f"{filename}: expected exactly one {KIND}, found {len(jobs)}")
    problems = check_manifest(jobs[0])
    if problems:
        shown = [str(problem) for problem in problems[:MAX_PROBLEMS]]
        shown += [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        text = shown[0] if len(shown) == 1 else "\n  - ".join(["the job is not valid:", *shown])
        raise click.ClickException(f"{filename}: {text}") from InvalidSpecError(text)
    return jobs[0]


def _workers(job: dict[str, Any]) -> dict[str, Any]:
    """`spec.workers`, or an empty dictionary if it is missing or invalid."""
    spec = job.get("spec")
    workers = spec.get("workers") if isinstance(spec, dict) else None
    return workers if isinstance(workers, dict) else {}


def gpu_resource(job: dict[str, Any]) -> str:
    """The name of the GPU resource that the job's workers request."""
    found = _workers(job).get("gpuResource")
    return found if isinstance(found, str) else GPU_RESOURCE


def node_selector(job: dict[str, Any]) -> dict[str, str]:
    """The job's node selector. Nodes of an assumed cluster have these labels."""
    selector = _workers(job).get("nodeSelector")
    return {str(k): str(v) for k, v in selector.items()} if isinstance(selector, dict) else {}


def other_resources(job: dict[str, Any]) -> list[str]:
    """Names of the devices, huge pages and storage that a worker requests. An assumed cluster has enough of them."""
    resources = _workers(job).get("resources")
    if not isinstance(resources, dict):
        return []
    devices, pages = resources.get("devices") or {}, resources.get("hugePages") or {}
    return [*devices, *(f"hugepages-{size}" for size in pages), "ephemeral-storage"]


def nodes_to_plan_for(
    inventory: Path | None, gpus: int | None, gpu: str, job: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Nodes and pods of the file, or of the assumed cluster. That one has all that `job` needs but GPUs.

    Raises:
        click.ClickException: the file does not describe nodes, or the GPU product is unknown.
    """
    resource, labels = gpu_resource(job), node_selector(job)
    if inventory is not None:
        if gpus is not None:
            raise click.ClickException("--gpus cannot be used with --inventory: leave one of them out")
        try:
            return read_nodes(inventory, resource)
        except InventoryFileError as error:
            raise click.ClickException(str(error)) from error
    accelerator_spec = accelerator(gpu)
    if accelerator_spec is None:
        raise click.ClickException(f"--gpu: unknown product `{gpu}`: use one of {', '.join(ACCELERATORS)}")
    full_nodes, rest = divmod(gpus or ASSUMED_GPUS, accelerator_spec.node)
    if full_nodes > MAX_NODES:
        raise click.ClickException(
            f"--gpus: must be at most {MAX_NODES} nodes of {accelerator_spec.node} `{gpu}`, got {gpus}"
        )
    entries = (
        [NodeEntry(name="node", gpus=accelerator_spec.node, product=gpu, count=full_nodes, labels=labels)]
        if full_nodes
        else []
    )
    entries += [NodeEntry(name="node-rest", gpus=rest, product=gpu, labels=labels)] if rest else []
    nodes = [node for entry in entries for node, _ in nodes_of(entry, resource)]
    for node in nodes:
        node["status"]["allocatable"] |= dict.fromkeys(other_resources(job), UNLIMITED["memory"])
    return nodes, []
