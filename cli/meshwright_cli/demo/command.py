"""`meshwright demo`: options, signals and exit codes of a session."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import click
from rich.console import Console

from meshwright.api.parsing import InvalidSpecError
from meshwright_cli.child_processes import ProgramEndedError
from meshwright_cli.demo.directory import DirectoryError, demo_directory
from meshwright_cli.demo.session import DemoError, Options, run
from meshwright_cli.demo.setup import SetupError
from meshwright_cli.manifest import ManifestError
from meshwright_local.kube.client import ApiError

EXPECTED = (
    ApiError,
    DemoError,
    InvalidSpecError,
    ManifestError,
    ProgramEndedError,
    SetupError,
    TimeoutError,
    aiohttp.ClientError,
)
EXAMPLE = Path(__file__).with_name("stdlib-lm.yaml")
"""A link into `examples/`, and the file itself in a wheel."""


@click.command()
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".demo"),
    show_default=True,
    help="Directory for checkpoints, logs and the kubeconfig. Replaces the files of an earlier demo.",
)
@click.option(
    "--manifest",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="Manifest of the job to train. It must fit on 4 nodes with 2 GPUs each, and save checkpoints.",
)
@click.option("--no-fault", is_flag=True, help="Delete neither a worker pod nor a node.")
@click.option("--keep-running", is_flag=True, help="Keep the cluster running after the end, until Ctrl-C.")
@click.option(
    "--timeout", type=click.IntRange(min=1), default=900, show_default=True, help="Timeout of the job in seconds."
)
def demo(directory: Path, manifest: Path | None, no_fault: bool, keep_running: bool, timeout: int) -> None:
    """Train a language model on the embedded cluster. It loses a worker pod and then a node.

    If the job is elastic, it continues with fewer replicas, and grows again when another node joins. Otherwise no node
    is lost. Ends with exit code 0 only when the job completed on every sample and, unless --no-fault is given, really
    recovered from each loss.
    """
    console = Console()
    try:
        with demo_directory(directory) as place:
            options = Options(place, manifest or EXAMPLE, not no_fault, keep_running, timeout)
            code = asyncio.run(run_until_signal(options, console))
    except DirectoryError as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(code)


async def run_until_signal(options: Options, console: Console) -> int:
    """Run the session, or cancel it at the first SIGINT, SIGTERM or SIGHUP. Returns the exit code."""
    received: list[signal.Signals] = []
    task = asyncio.ensure_future(run(options, console))

    def cancel(number: signal.Signals) -> None:
        if not received:  # later signals would only interrupt the cleanup
            received.append(number)
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, cancel, number)
    try:
        await task
    except asyncio.CancelledError:
        number = received[0] if received else signal.SIGTERM
        console.print(f"stopped by {number.name}; stopped everything that the demo started", highlight=False)
        return 128 + number
    except EXPECTED as error:
        console.print(f"\n[bold red]the demo failed[/bold red]; its files are in {options.directory}", highlight=False)
        console.print(f"{type(error).__name__}: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0
