"""`meshwright list`, `meshwright status` and `meshwright events`: read jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

import click

from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.objects import JobEvent
from meshwright_cli.completion import complete_jobs
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.jobs.changes import ChangedRows, ChangeLines
from meshwright_cli.jobs.list_view import list_header, list_lines, list_row
from meshwright_cli.jobs.output import formatted, next_command, output_option, table, watch_option, width
from meshwright_cli.jobs.status_view import JobView, next_step, status_lines
from meshwright_cli.jobs.visible import visible
from meshwright_cli.text import age

WARNINGS = 3
"""Latest warnings that `status` shows."""


@click.command("list", epilog="Next: meshwright status JOB.")
@click.option("-A", "--all-namespaces", is_flag=True, help="List the jobs of all namespaces.")
@click.option("-l", "--selector", default="", help="Label selector, such as `team=vision`.")
@watch_option("print a row whenever one changes, until Ctrl-C")
@output_option("wide", "json", "yaml", "name")
@cluster_options
def list_jobs(all_namespaces: bool, selector: str, watches: bool, output: str | None, access: Access) -> None:
    """List jobs with their state and progress.

    With --watch, a row is printed again when its state, step or another column changes, but not if only its times do.
    """
    if watches:
        _check_watchable(output)
        access.run(lambda client: _watch_list(client, all_namespaces, selector, wide=output == "wide"))
        return
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
@watch_option("print a line whenever the state changes, until the job has finished")
@output_option("wide", "json", "yaml", "name")
@cluster_options
def status(job: str, watches: bool, output: str | None, access: Access) -> None:
    """Show a job: state, progress, goodput, and its ranks on nodes.

    Workers are shown by rack and NVLink domain with the coordinates of their ranks. If there are more than 32 workers,
    racks are summarized, unless you use `-o wide`. With --watch, progress is printed every minute, or every 5% of the
    steps.
    """
    if watches:
        _check_watchable(output)

    async def read(client: AsyncClient) -> JobView:
        found = await client.get(job)
        hidden: list[str] = []
        events = await visible(client.events(job), hidden, "list events")
        pods = await visible(client.pods(job), hidden, "list pods")
        warnings = [event for event in events or () if event.warning]
        return JobView(found, pods, warnings[-WARNINGS:], hidden)

    if output in ("json", "yaml", "name"):
        click.echo(formatted(access.run(lambda client: client.get(job)).raw, output))
        return
    view = access.run(read)
    for line in status_lines(view, datetime.now(UTC), width(), every_worker=output == "wide"):
        click.echo(line)
    if watches:
        access.run(lambda client: _watch_status(client, job))
        return
    next_command(*next_step(view.job))


def _check_watchable(output: str | None) -> None:
    if output in ("json", "yaml", "name"):
        raise click.UsageError(f"--watch cannot be used with -o {output}: leave one of them out")


async def _watch_list(client: AsyncClient, all_namespaces: bool, selector: str, *, wide: bool) -> None:
    rows = ChangedRows(list_header(wide=wide, namespaces=all_namespaces))
    async for job, deleted in client.watch_all(all_namespaces=all_namespaces, selector=selector):
        row = None if deleted else list_row(job, datetime.now(UTC), wide=wide, namespaces=all_namespaces)
        for line in rows.lines((job.namespace, job.name), row):
            click.echo(line)


async def _watch_status(client: AsyncClient, name: str) -> None:
    changes = ChangeLines()
    async for job in client.watch(name):
        if (line := changes.line(job, time.monotonic())) is not None:
            click.echo(f"{datetime.now().astimezone():%H:%M:%S} {line}")
        if job is None or job.finished:
            return


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
