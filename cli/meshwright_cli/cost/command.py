"""`meshwright cost`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import yaml

from meshwright.api.labels import KIND
from meshwright_cli.client.objects import Job
from meshwright_cli.completion import complete_jobs
from meshwright_cli.cost.spent import as_csv, as_table, spent_by, without_ledger
from meshwright_cli.jobs.access import Access, cluster_options

NAMED = 3
"""Jobs without GPU time that a note names."""


@click.command(epilog="Next: meshwright status JOB shows the goodput of a job.")
@click.argument("jobs", metavar="[JOB]...", nargs=-1, shell_complete=complete_jobs)
@cluster_options
@click.option("-A", "--all-namespaces", is_flag=True, help="Jobs of all namespaces.")
@click.option(
    "-f",
    "--filename",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Read jobs from the output of `kubectl get ptj -o json` or `-o yaml`, not from a cluster.",
)
@click.option("--price", type=click.FloatRange(0), help="Price of one GPU-hour, in any currency.")
@click.option(
    "-o", "--output", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True, help="Format."
)
def cost(
    jobs: Sequence[str],
    access: Access,
    all_namespaces: bool,
    filename: Path | None,
    price: float | None,
    output: str,
) -> None:
    """Print the GPU-hours of jobs by cause, and with --price the money.

    Reads the ledger in the status of jobs that exist, up to now. The metric `ptj_namespace_gpu_seconds_total` also has
    jobs that have been deleted.
    """
    found = _jobs_of_file(filename) if filename is not None else _jobs_of_cluster(access, jobs, all_namespaces)
    chosen = [job for job in found if not jobs or job.name in jobs]
    if filename is not None and (unknown := sorted(set(jobs) - {job.name for job in chosen})):
        raise click.ClickException(f"{filename}: has no job {', '.join(unknown)}")
    rows = spent_by(chosen, datetime.now(UTC))
    if output == "csv":
        click.echo(as_csv(rows, price), nl=False)
    elif output == "json":
        click.echo(json.dumps([_row(row, price) for row in rows], indent=2))
    else:
        click.echo("\n".join(as_table(rows, price)))
    if unbooked := without_ledger(chosen):
        names = ", ".join(f"{job.namespace}/{job.name}" for job in unbooked[:NAMED])
        more = f" and {len(unbooked) - NAMED} more" if len(unbooked) > NAMED else ""
        click.echo(f"Without GPU time, because only an operator before 0.2 ran them: {names}{more}", err=True)


def _row(row: Any, price: float | None) -> dict[str, Any]:
    shown = {"namespace": row.namespace, "job": row.job, "cause": row.cause, "gpuHours": round(row.gpu_hours, 6)}
    return shown if price is None else {**shown, "cost": round(row.gpu_hours * price, 2)}


def _jobs_of_cluster(access: Access, names: Sequence[str], all_namespaces: bool) -> list[Job]:
    if names and all_namespaces:
        raise click.UsageError("--all-namespaces cannot be used with JOB: leave one of them out")

    async def read(client: Any) -> list[Job]:
        if names:
            return [await client.get(name) for name in names]
        return list(await client.list(all_namespaces=all_namespaces))

    return access.run(read)


def _jobs_of_file(path: Path) -> list[Job]:
    """The jobs in a file.

    Raises:
        click.ClickException: it cannot be read, or contains no job.
    """
    try:
        documents = [one for one in yaml.safe_load_all(path.read_text()) if isinstance(one, dict)]
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise click.ClickException(f"{path}: not valid JSON or YAML: {error}") from error
    items = [item for document in documents for item in document.get("items") or [document] if isinstance(item, dict)]
    jobs = [item for item in items if item.get("kind") == KIND and isinstance(item.get("metadata"), dict)]
    named = [Job(item) for item in jobs if isinstance(item["metadata"].get("name"), str)]
    if not named:
        raise click.ClickException(f"{path}: contains no {KIND}: pass the output of `kubectl get ptj -o json`")
    return named
