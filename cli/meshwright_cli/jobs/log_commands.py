"""`meshwright logs`."""

from __future__ import annotations

import sys

import click

from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.log_stream import LogSource
from meshwright_cli.client.objects import LogLine
from meshwright_cli.completion import complete_jobs, complete_ranks
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.text import log_line


@click.command(epilog="Next: meshwright events JOB, or meshwright status JOB.")
@click.argument("job", shell_complete=complete_jobs)
@click.option("--rank", "ranks", type=click.IntRange(min=0), multiple=True, shell_complete=complete_ranks,
              help="Only the lines of this rank. Can be repeated.")  # fmt: skip
@click.option("--stage", "stages", type=click.IntRange(min=0), multiple=True,
              help="Only the lines of ranks with this pipeline stage. Can be repeated.")  # fmt: skip
@click.option("--worker", "workers", type=click.IntRange(min=0), multiple=True,
              help="All lines of this worker's pod. Can be repeated.")  # fmt: skip
@click.option("--all", "every_worker", is_flag=True, help="All lines of all worker pods.")
@click.option(
    "--failed-first",
    is_flag=True,
    help="The lines of the worker, or rank, that failed first. If its pod is gone: what its agent recorded.",
)
@click.option("-f", "--follow", is_flag=True,
              help="Follow the log until the job finishes, also when pods are replaced.")  # fmt: skip
@click.option("-p", "--previous", is_flag=True, help="The log of the previous container or pod of the worker.")
@click.option(
    "--tail", type=click.IntRange(min=0), default=None, help="Number of last lines of each pod to show first."
)
@cluster_options
def logs(
    job: str,
    ranks: tuple[int, ...],
    stages: tuple[int, ...],
    workers: tuple[int, ...],
    every_worker: bool,
    failed_first: bool,
    follow: bool,
    previous: bool,
    tail: int | None,
    access: Access,
) -> None:
    """Print the logs of a job's ranks.

    Without a selection: all lines of the pod with rank 0. Lines of several pods are printed as they arrive.
    """
    chosen = [name for name, value in (
        ("--rank", ranks), ("--stage", stages), ("--worker", workers), ("--all", every_worker),
        ("--failed-first", failed_first),
    ) if value]  # fmt: skip
    if len(chosen) > 1:
        raise click.UsageError(f"{chosen[0]} cannot be used with {chosen[1]}: leave one of them out")
    terminal = sys.stdout.isatty()
    source = LogSource(ranks, workers, stages, every_worker, failed_first, follow, previous, tail)

    async def show(client: AsyncClient) -> None:
        async for line in client.logs(job, source):
            text = prefixed(line, several=len(workers) != 1 and bool(chosen))
            click.echo(log_line(text) if terminal else text)

    access.run(show)


def prefixed(line: LogLine, *, several: bool) -> str:
    """A line with its rank. A line of the agent has its worker, if several workers may be shown."""
    if line.agent:
        return f"[worker {line.worker}] {line.text}" if several else line.text
    return f"[rank {line.rank}] {line.text}"
