"""`meshwright submit`: apply a manifest, and wait for the job."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import click

from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.errors import MeshwrightError
from meshwright_cli.client.log_stream import LogSource
from meshwright_cli.client.objects import Job
from meshwright_cli.client.waiting import COMPLETE
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.jobs.log_commands import prefixed
from meshwright_cli.jobs.output import next_command, note_end, output_option, print_job
from meshwright_cli.jobs.wait import timeout_option, wait_and_report
from meshwright_cli.parameters import manifest_parameter

DRAIN_SECONDS = 5.0
"""Time in which the last lines of a log may arrive after the job has finished."""


@click.command(epilog="Next: meshwright status JOB, or meshwright logs JOB -f.")
@manifest_parameter
@click.option("--wait", "waits", is_flag=True, help="Wait until the job has finished.")
@click.option("--follow", is_flag=True, help="Print the log of the pod with rank 0 until the job has finished.")
@click.option("--dry-run", is_flag=True, help="Let the API server validate the manifest, and store nothing.")
@timeout_option
@output_option("json", "yaml", "name")
@cluster_options
def submit(
    manifest: Path,
    waits: bool,
    follow: bool,
    dry_run: bool,
    timeout: float | None,
    output: str | None,
    access: Access,
) -> None:
    """Apply a manifest with one job, and the objects that it needs.

    MANIFEST is a file, a directory, or `-` for stdin. It is applied as `kubectl apply --server-side` does, and unknown
    fields are errors. With --wait or --follow the exit code is the job's result: 0 if it completed, 1 if it failed or
    stalled, 5 if the time-out passed.
    """

    async def run(client: AsyncClient) -> Job:
        job = await client.submit(manifest, dry_run=dry_run, within=access.namespace)
        where = client.server.connection.where
        print_job(
            job, output, f"{'would be submitted' if dry_run else 'submitted'} to namespace {job.namespace} of {where}"
        )
        if not dry_run:
            note_end(job, "delete it first, or submit it under another name")
        if dry_run or not (waits or follow):
            return job
        client.namespace = job.namespace
        if not follow:
            done = await wait_and_report(client, job.name, COMPLETE, timeout, quiet=False)
        else:
            done = await follow_to_end(client, job.name, timeout)
        return done or job  # not read again: with `ttlSecondsAfterFinished: 0` it is gone by now

    job = access.run(run)
    if not dry_run and output is None:
        next_command("status", job.name) if not job.finished else next_command("logs", job.name, "--tail", "20")


async def follow_to_end(client: AsyncClient, name: str, seconds: float | None) -> Job | None:
    """Print the log of the pod with rank 0 until the job has finished, and return it.

    Raises:
        JobFailedError: the job failed or stalled. The message is its own.
        WaitTimeoutError: it did not finish in time.
    """

    async def show() -> None:
        async for line in client.logs(name, LogSource(follow=True)):
            click.echo(prefixed(line, several=False))

    reader = asyncio.create_task(show())
    try:
        return await wait_and_report(client, name, COMPLETE, seconds, quiet=False)
    finally:
        await asyncio.wait([reader], timeout=DRAIN_SECONDS)
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError, MeshwrightError):
            await reader
