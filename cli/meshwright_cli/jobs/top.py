"""`meshwright top`: the ranks of a job with their step times, or all jobs, refreshed until Ctrl-C."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from meshwright.api.labels import METRICS_PORT
from meshwright_cli.client.api_server import PODS, Action
from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.errors import ForbiddenError, MeshwrightError
from meshwright_cli.client.objects import WorkerPod, newest_pods
from meshwright_cli.client.rank_metrics import RankSample, rank_times, read_samples
from meshwright_cli.completion import complete_jobs
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.jobs.list_view import list_lines
from meshwright_cli.jobs.output import WIDTH
from meshwright_cli.jobs.status_view import JobView
from meshwright_cli.jobs.top_view import TopView, top_lines
from meshwright_cli.jobs.visible import visible

AT_ONCE = 16
"""Pods that are read at the same time."""
FIRST_SECONDS = 1.0
"""Time between the first two samples, so that the first screen shows recent times."""

Lines = Callable[[int, int], Awaitable[list[str]]]
"""The lines for a width and a height."""


@click.command(epilog="Next: meshwright logs JOB --rank N, or meshwright status JOB.")
@click.argument("job", required=False, shell_complete=complete_jobs)
@click.option("-A", "--all-namespaces", is_flag=True, help="Without JOB: the jobs of all namespaces.")
@click.option("--interval", type=click.FloatRange(min=0.5), default=2.0, show_default=True,
              help="Seconds between two refreshes.")  # fmt: skip
@click.option("--once", is_flag=True, help="Print once and exit, as if the output is not a terminal.")
@cluster_options
def top(job: str | None, all_namespaces: bool, interval: float, once: bool, access: Access) -> None:
    """Show the step times of a job's ranks and its stragglers, live.

    The metrics of worker pods are read through the API server (`get` on `pods/proxy`). If they cannot be read, the
    job's status is shown. Without JOB, all jobs are shown. Ctrl-C ends it.
    """
    if job is not None and all_namespaces:
        raise click.UsageError("--all-namespaces cannot be used with JOB: leave one of them out")

    async def show(client: AsyncClient) -> None:
        lines = JobScreen(client, job).lines if job is not None else _jobs(client, all_namespaces)
        if once or not sys.stdout.isatty():
            for line in await lines(WIDTH, 10_000):
                click.echo(line)
        else:
            await _live(lines, interval)

    access.run(show)


class JobScreen:
    """The screen of one job. It remembers the last samples, to show the times since."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client = client
        self._name = name
        self._before: dict[int, RankSample] | None = None

    async def lines(self, columns: int, height: int) -> list[str]:
        """Read everything again, and return the lines."""
        job, hidden = await self._client.get(self._name), list[str]()
        pods = await visible(self._client.pods(self._name), hidden, "list pods")
        if pods is None:
            nothing = {"": f"you may not {hidden[0]}"}
            return top_lines(TopView(JobView(job, None), (), nothing), datetime.now(UTC), columns, height)
        if self._before is None:
            self._before, unreachable = await self._samples(pods)
            if self._before:
                await asyncio.sleep(FIRST_SECONDS)
        now, unreachable = await self._samples(pods)
        times = rank_times(now, self._before)
        self._before = now
        return top_lines(TopView(JobView(job, pods), times, unreachable), datetime.now(UTC), columns, height)

    async def _samples(self, pods: Sequence[WorkerPod]) -> tuple[dict[int, RankSample], dict[str, str]]:
        """The samples of all ranks, and why the metrics of a pod cannot be read."""
        gate = asyncio.Semaphore(AT_ONCE)
        found: dict[int, RankSample] = {}
        unreachable: dict[str, str] = {}

        async def read(pod: WorkerPod) -> None:
            path = PODS.path(self._client.namespace, f"{pod.name}:{METRICS_PORT}", "proxy/metrics")
            action = Action("get", PODS, self._client.namespace, pod.name, "proxy")
            try:
                async with gate:
                    found.update(read_samples(await self._client.server.request("GET", path, action)))
            except ForbiddenError:
                unreachable[pod.name] = "you may not `get` `pods/proxy`"
            except MeshwrightError as error:
                unreachable[pod.name] = " ".join(str(error).split())

        await asyncio.gather(*(read(pod) for pod in newest_pods(pods) if pod.state == "Running"))
        return found, unreachable


def _jobs(client: AsyncClient, all_namespaces: bool) -> Lines:
    async def lines(columns: int, height: int) -> list[str]:
        jobs = [job for job in await client.list(all_namespaces=all_namespaces) if not job.finished]
        found = list_lines(jobs, datetime.now(UTC), wide=False, namespaces=all_namespaces)
        hidden = len(found) - (height - 1)
        shown = found if hidden <= 0 else [*found[: height - 2], f"and {hidden + 1} more"]
        return shown if jobs else ["No unfinished jobs."]

    return lines


async def _live(lines: Lines, interval: float) -> None:
    """Redraw the screen until Ctrl-C."""
    console = Console()
    with Live(console=console, auto_refresh=False, screen=False, vertical_overflow="crop") as live:
        while True:
            found = await lines(console.width, console.height)
            text = Text.from_ansi("\n".join(found), no_wrap=True, overflow="ellipsis")
            live.update(text, refresh=True)
            await asyncio.sleep(interval)
