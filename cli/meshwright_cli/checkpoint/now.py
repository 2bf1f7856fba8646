"""`meshwright checkpoint now`: ask a job for a checkpoint."""

from __future__ import annotations

from functools import partial

import click

from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.errors import JobFailedError
from meshwright_cli.client.objects import Job
from meshwright_cli.completion import complete_jobs
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.jobs.output import next_command, output_option, print_job
from meshwright_cli.jobs.wait import timeout_option


@click.command(epilog="Next: meshwright status JOB.")
@click.argument("job", shell_complete=complete_jobs)
@click.option(
    "--wait/--no-wait", "waits", default=True, show_default=True, help="Wait until the checkpoint is durable."
)
@timeout_option
@output_option("json", "yaml", "name")
@cluster_options
def now(job: str, waits: bool, timeout: float | None, output: str | None, access: Access) -> None:
    """Ask a running job for a checkpoint after its current step.

    Training continues. Exits with 1 if there will be none, for example because the job is not Running, and with 5 if
    the time-out passes.
    """

    async def ask(client: AsyncClient) -> Job:
        if not (await client.get(job)).raw["spec"].get("checkpoint"):
            raise JobFailedError(f"{job} saves no checkpoints: it has no `spec.checkpoint`")
        request = await client.request_checkpoint(job)
        if waits and output is None:
            click.echo("asked for a checkpoint; Ctrl-C ends only the wait for it", err=True)
        if not waits:
            return await client.get(job)
        return await client.requested_checkpoint(job, request, timeout=timeout, notify=partial(click.echo, err=True))

    found = access.run(ask)
    saved = found.status.checkpoint_request
    done = f"saved the checkpoint of step {saved.step:,}" if waits and saved and saved.step is not None else ""
    print_job(found, output, done or "asked for a checkpoint")
    next_command("status", job)
