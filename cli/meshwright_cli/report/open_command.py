"""`meshwright open`."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.completion import complete_jobs
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.report.live import LiveReport
from meshwright_cli.report.page_server import LOOPBACK, served


@click.command("open", epilog="Next: meshwright report JOB, or meshwright top JOB.")
@click.argument("job", shell_complete=complete_jobs)
@cluster_options
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port. Default: a free one.")
@click.option("--browser/--no-browser", default=True, help="Whether to open the page in the browser.")
@click.option(
    "--history",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON-lines file of the job's tracker, for the curves. Without it, they begin when the command starts.",
)
def open_report(job: str, access: Access, port: int, browser: bool, history: Path | None) -> None:
    """Serve the report of a job on this machine, and update it.

    The page is on the loopback address, under a path with a random token, until you press Ctrl-C. It shows what you may
    read with your kubeconfig. To write the page to a file, use `meshwright report`.
    """

    async def serve(client: AsyncClient) -> None:
        report = LiveReport(client, job, history)
        await report.update()
        try:
            async with served(lambda: report.page, port) as url:
                click.echo(f"Serving the report of {job} until Ctrl-C: {url}")
                if browser:
                    webbrowser.open(url)
                await report.follow()
        except OSError as error:
            raise click.ClickException(f"--port: cannot listen on {LOOPBACK}:{port}: {error.strerror}") from error

    try:
        access.run(serve)
    except KeyboardInterrupt:
        click.echo("Stopped")
