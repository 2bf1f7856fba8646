"""`meshwright report`."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import click

from meshwright.api.parsing import InvalidSpecError
from meshwright.planner.errors import PlanError
from meshwright.planner.topology.site import SiteFabric
from meshwright_cli.completion import complete_jobs
from meshwright_cli.fabric import fabric_option, read_fabric
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.parameters import STDIO
from meshwright_cli.plan.command import ASSUMED_GPUS, job_of_manifest, nodes_to_plan_for
from meshwright_cli.plan.report import plan_report
from meshwright_cli.report.cluster_source import read_job
from meshwright_cli.report.history import History, HistoryFileError, read_history
from meshwright_cli.report.inputs import ReportInputs, inputs_of_plan
from meshwright_cli.report.page import page_of, render

MANIFEST_SUFFIXES = (".yaml", ".yml", ".json")


@click.command(epilog="Next: open the file in a browser, or meshwright open JOB.")
@click.argument("job", metavar="JOB|MANIFEST", shell_complete=complete_jobs)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, writable=True, allow_dash=True),
    default="report.html",
    show_default=True,
    help="File to write, or - for standard output.",
)
@cluster_options
@click.option(
    "--inventory",
    type=click.Path(path_type=Path),
    help="For a manifest: nodes to plan for, as for `meshwright plan`.",
)
@click.option(
    "--gpus",
    type=click.IntRange(1, 1_000_000),
    help=f"For a manifest: number of GPUs to assume if --inventory is not given (default: {ASSUMED_GPUS}).",
)
@click.option(
    "--gpu", default="NVIDIA-H100-80GB-HBM3", show_default=True, help="For a manifest: product of the assumed GPUs."
)
@fabric_option
@click.option(
    "--history",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON-lines file of the job's tracker, for the curves of loss and throughput.",
)
def report(
    job: str,
    output: Path,
    access: Access,
    inventory: Path | None,
    gpus: int | None,
    gpu: str,
    fabric: Path | None,
    history: Path | None,
) -> None:
    """Write one HTML page about a job or a plan.

    The argument is the name of a job in the cluster, or the path of a manifest (.yaml, .yml or .json), which is planned
    without a cluster. The page needs no network. Watch a running job with `meshwright open`.
    """
    steps = read_steps(history)
    if is_manifest(job):
        inputs = _plan_inputs(Path(job), inventory, gpus, gpu, read_fabric(fabric))
    else:
        if inventory is not None or gpus is not None or fabric is not None:
            raise click.ClickException(
                "--inventory, --gpus and --fabric are only for a manifest: a job has its cluster's nodes and fabric"
            )
        inputs = access.run(lambda client: read_job(client, job, datetime.now(UTC)))
    page = render(page_of(with_history(inputs, steps)))
    if output == STDIO:
        click.echo(page, nl=False)
        return
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{output}: {error.strerror}") from error
    click.echo(f"Wrote {output} ({len(page.encode()) / 1024:.0f} KiB)")


def is_manifest(job: str) -> bool:
    """Whether the argument is a path and not the name of a job, which has no `/` and no such suffix."""
    return "/" in job or job.lower().endswith(MANIFEST_SUFFIXES)


def read_steps(path: Path | None) -> History | None:
    """Return the steps of a tracker's file, if one is given.

    Raises:
        click.ClickException: it cannot be read.
    """
    try:
        return read_history(path) if path is not None else None
    except HistoryFileError as error:
        raise click.ClickException(str(error)) from error


def with_history(inputs: ReportInputs, history: History | None) -> ReportInputs:
    """Return the inputs with the steps of a file, if there is one."""
    if history is None:
        return inputs
    return replace(inputs, history=history, notes=(*inputs.notes, *([history.note] if history.note else [])))


def _plan_inputs(path: Path, inventory: Path | None, gpus: int | None, gpu: str, site: SiteFabric) -> ReportInputs:
    job = job_of_manifest(path)
    nodes, pods = nodes_to_plan_for(inventory, gpus, gpu, job)
    try:
        found = plan_report(job, nodes, pods, site=site)
    except (InvalidSpecError, PlanError) as error:
        raise click.ClickException(f"{path}: {error}") from error
    metadata = job.get("metadata")
    names = metadata if isinstance(metadata, dict) else {}
    note = () if inventory is not None else (f"No --inventory given: assuming {gpus or ASSUMED_GPUS} free {gpu}.",)
    inputs = inputs_of_plan(
        found, str(names.get("name") or path.stem), str(names.get("namespace") or "default"), datetime.now(UTC)
    )
    return replace(inputs, notes=note)
