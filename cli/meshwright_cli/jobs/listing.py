"""`meshwright list`, `meshwright status` and `meshwright events`: read jobs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import click

from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.objects import JobEvent
from meshwright_cli.completion import complete_jobs
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.jobs.list_view import list_lines
from meshwright_cli.jobs.output import formatted, next_command, output_option, table, width
from meshwright_cli.jobs.status_view import JobView, next_step, status_lines
from meshwright_cli.text import age

WARNINGS = 3
"""Latest warnings that `status` shows."""


@click.command("list", epilog="Next: meshwright status JOB.")
@click.option("-A", "--all-namespaces", is_flag=True, help="List the jobs of all namespaces.")
@click.option("-l", "--selector", default="", help="Label selector, such as `team=vision`.")
@output_option("wide", "json", "yaml", "name")
@cluster_options
def list_jobs(all_namespaces: bool, selector: str, output: str | None, access: Access) -> None:
    """List jobs with their state and progress."""
    jobs = list(access.run(lambda client: client.list(all_namespaces=all_namespaces, selector=selector)))
    if output in ("json", "yaml", "name"):
        text = formatted(jobs, output)
        click.echo(text, nl=bool(text))
        return
    if not jobs:
        where = "any namespace" if all_namespaces else f"namespace {access.client().namespace}"
        click.echo(f"No jobs in {where}.", err=True)
        next_command("submit", "-f", "MANIFEST") if all_namespaces else next_command("list", "-A")
        return
    for line in list_lines(jobs, datetime.now(UTC), wide=output == "wide", namespaces=all_namespaces):
        click.echo(line)


@click.command(epilog="Next: meshwright top JOB, meshwright logs JOB -f, or meshwright explain JOB if it does not run.")
@click.argument("job", shell_complete=complete_jobs)
@output_option("wide", "json", "yaml", "name")
@cluster_options
def status(job: str, output: str | None, access: Access) -> None:
    """Show a job: state, progress, goodput, and its ranks on nodes.

    Workers are shown by rack and NVLink domain with the coordinates of their ranks. If there are more than 32 workers,
    racks are summarized, unless you use `-o wide`.
    """

    async def read(client: AsyncClient) -> JobView:
        found = await client.get(job)
        warnings = [event for event in await client.events(job) if event.warning]
        return JobView(found, await client.pods(job), warnings[-WARNINGS:])

    if output in ("json", "yaml", "name"):
        click.echo(formatted(access.run(lambda client: client.get(job)).raw, output))
        return
    view = access.run(read)
    for line in status_lines(view, datetime.now(UTC), width(), every_worker=output == "wide"):
        click.echo(line)
    next_command(*next_step(view.job))


@click.command(epilog="Next: meshwright logs JOB --failed-first if a rank failed.")
@click.argument("job", shell_complete=complete_jobs)
@click.option("--pods", is_flag=True, help="Also show events about the job's worker pods.")
@click.option("--warnings", is_flag=True, help="Show only warnings.")
@output_option("json", "yaml")
@cluster_options
def events(job: str, pods: bool, warnings: bool, output: str | None, access: Access) -> None:
    """Show the events about a job, the latest last."""
    found = access.run(lambda client: client.events(job, pods=pods))
    found = [event for event in found if event.warning or not warnings]
    if output is not None:
        click.echo(formatted([_document(event) for event in found], output))
        return
    if not found:
        click.echo("No events. Clusters delete events after an hour by default.", err=True)
    for line in event_lines(found, datetime.now(UTC)):
        click.echo(line)


def event_lines(found: Sequence[JobEvent], now: datetime) -> list[str]:
    """A table of events. Pure."""
    rows = [
        (
            age(event.time, now),
            "Warning" if event.warning else "Normal",
            f"{event.reason} x{event.count}" if event.count > 1 else event.reason,
            event.about,
            event.message,
        )
        for event in found
    ]
    return table(("LAST", "TYPE", "REASON", "OBJECT", "MESSAGE"), rows) if rows else []


def _document(event: JobEvent) -> dict[str, object]:
    return {
        "time": event.time.isoformat() if event.time else None,
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "message": event.message,
        "count": event.count,
        "object": event.about or "ParallelTrainingJob",
    }
