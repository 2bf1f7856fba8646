"""`meshwright scale`, `suspend`, `resume` and `delete`: change a job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import click

from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.objects import Job
from meshwright_cli.client.waiting import RUNNING, Target
from meshwright_cli.completion import complete_jobs
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.jobs.output import next_command, note_end, output_option, print_job, program
from meshwright_cli.jobs.wait import timeout_option, wait_and_report
from meshwright_cli.text import plural

SUSPENDED = Target("Suspended")


def waiting_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that may wait for its effect."""
    wait = click.option("--wait", "waits", is_flag=True, help="Wait until the job is in the new state.")
    return wait(timeout_option(function))


@click.command(epilog="Next: meshwright status JOB.")
@click.argument("job", shell_complete=complete_jobs)
@click.argument("replicas", type=click.IntRange(min=0))
@waiting_options
@output_option("json", "yaml", "name")
@cluster_options
def scale(job: str, replicas: int, waits: bool, timeout: float | None, output: str | None, access: Access) -> None:
    """Set the number of data-parallel replicas of a job.

    An elastic job resizes while it trains. Any other job restarts from a checkpoint that it saves first.
    """

    async def scaled(client: AsyncClient) -> Job:
        return await client.scale(job, replicas)

    if replicas == 0:
        raise click.UsageError(f"a job has at least 1 replica: to release its GPUs, use `{program()} suspend {job}`")
    until = (Target(phase="running", replicas=replicas), timeout) if waits else None
    _change(access, scaled, f"scaled to {plural(replicas, 'replica')}", output, until, "status")


@click.command(epilog="Next: meshwright resume JOB.")
@click.argument("job", shell_complete=complete_jobs)
@waiting_options
@output_option("json", "yaml", "name")
@cluster_options
def suspend(job: str, waits: bool, timeout: float | None, output: str | None, access: Access) -> None:
    """Suspend a job: it saves a checkpoint and releases its GPUs."""
    until = (SUSPENDED, timeout) if waits else None
    _change(access, lambda client: client.suspend(job), "suspended", output, until, "resume")


@click.command(epilog="Next: meshwright status JOB.")
@click.argument("job", shell_complete=complete_jobs)
@waiting_options
@output_option("json", "yaml", "name")
@cluster_options
def resume(job: str, waits: bool, timeout: float | None, output: str | None, access: Access) -> None:
    """Resume a suspended job from its latest checkpoint."""
    until = (RUNNING, timeout) if waits else None
    _change(access, lambda client: client.resume(job), "resumed", output, until, "status")


@click.command(epilog="Next: meshwright list.")
@click.argument("job", shell_complete=complete_jobs)
@click.option("--wait", "waits", is_flag=True, help="Wait until the job and its pods are gone.")
@timeout_option
@cluster_options
def delete(job: str, waits: bool, timeout: float | None, access: Access) -> None:
    """Delete a job and its pods. Its checkpoints stay."""
    access.run(lambda client: client.delete(job, wait=waits, timeout=timeout))
    click.echo(f"{job} deleted")


def _change(
    access: Access,
    change: Callable[[AsyncClient], Awaitable[Job]],
    done: str,
    output: str | None,
    until: tuple[Target, float | None] | None,
    then: str,
) -> None:
    """Change a job, and perhaps wait for the effect, then print it. `then`: the command to run next."""

    async def run(client: AsyncClient) -> Job:
        job = await change(client)
        note_end(job, "this has no effect")
        if until is not None:
            job = await wait_and_report(client, job.name, *until, quiet=output is not None) or job
        return job

    changed = access.run(run)
    print_job(changed, output, done)
    if not changed.finished:
        next_command(then, changed.name)
