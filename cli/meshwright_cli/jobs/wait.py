"""`meshwright wait`, and the lines that show how a job changes while a command waits."""

from __future__ import annotations

import asyncio
import time

import click

from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.objects import Job
from meshwright_cli.client.waiting import Target
from meshwright_cli.completion import complete_jobs
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.jobs.changes import ChangeLines
from meshwright_cli.parameters import Duration
from meshwright_cli.text import duration


class State(click.ParamType[Target]):
    """A state to wait for."""

    name = "state"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Target:
        """Read a state."""
        if isinstance(value, Target):
            return value
        try:
            return Target.parse(str(value))
        except ValueError as error:
            self.fail(str(error))


timeout_option = click.option(
    "--timeout", type=Duration(), default=None, help="Time to wait, such as 90s, 10m or 1h. Unlimited by default."
)


@click.command(epilog="Next: meshwright status JOB.")
@click.argument("job", shell_complete=complete_jobs)
@click.option(
    "--for", "target", type=State(), default="finished", show_default=True,
    help="State to wait for: `complete`, `running`, `finished`, `deleted`, `step=N`, or `condition=NAME[=STATUS]`.",
)  # fmt: skip
@timeout_option
@click.option("-q", "--quiet", is_flag=True, help="Do not print how the job changes.")
@cluster_options
def wait(job: str, target: Target, timeout: float | None, quiet: bool, access: Access) -> None:
    """Wait until a job reaches a state.

    Exits with 0 when it does, with 1 if it no longer can (it failed, stalled or was deleted), and with 5 if the
    time-out passes. Waiting for `finished` also exits with 1 if the job failed.
    """

    async def until(client: AsyncClient) -> Job | None:
        return await wait_and_report(client, job, target, timeout, quiet=quiet)

    found = access.run(until)
    raise SystemExit(result_code(found))


def result_code(job: Job | None) -> int:
    """The exit code for the state that a job is in after a wait: 1 if it failed."""
    return 1 if job is not None and job.failed else 0


async def wait_and_report(
    client: AsyncClient, name: str, target: Target, seconds: float | None, *, quiet: bool
) -> Job | None:
    """Wait until a job reaches a state, and print lines on stderr about the states on the way."""
    started = time.monotonic()

    async def report() -> None:
        changes = ChangeLines()
        async for job in client.watch(name):
            now = time.monotonic()
            if (text := changes.line(job, now)) is not None:
                click.echo(f"[{duration(now - started):>6}] {text}", err=True)

    task = None if quiet else asyncio.create_task(report())
    try:
        return await client.wait(name, target, timeout=seconds)
    finally:
        if task is not None:
            # The last change arrives on both watches, on this one perhaps later.
            await asyncio.wait([task], timeout=0.2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
