"""`meshwright checkpoint list`, `verify` and `copy`: checkpoints of a job, a directory or an object store."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from meshwright.figures import format_decimal_bytes
from meshwright_cli.client.checkpoints.programs import (
    START_SECONDS,
    PodOptions,
    checkpoints_command,
    entries_of,
    failure_message,
)
from meshwright_cli.completion import complete_jobs
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.jobs.model_commands import check_choice, check_worker_package, is_directory, run_in_cluster
from meshwright_cli.jobs.output import table
from meshwright_cli.parameters import Duration
from meshwright_cli.text import age, plural

DAMAGED_EXIT = 1


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The argument and options of commands that read checkpoints, as a function that runs an action on them."""

    @click.argument("source", metavar="JOB|DIRECTORY|URI", shell_complete=complete_jobs)
    @click.option("--step", type=click.IntRange(min=0), help="Only the checkpoint of this step.")
    @click.option("--best", is_flag=True, help="Only the checkpoint with the lowest evaluation loss.")
    @click.option(
        "--timeout",
        type=Duration(),
        default=START_SECONDS,
        help="Time until a job's pod must have started (default: 5m).",
    )
    @cluster_options
    @functools.wraps(function)
    def with_source(source: str, step: int | None, best: bool, timeout: float, access: Access, **more: Any) -> Any:
        check_choice(step, best)

        def inspect(action: str, target: str | None = None) -> Sequence[dict[str, Any]]:
            if is_directory(source):
                return _here(checkpoints_command(action, [source], step, target, best=best))
            options = PodOptions(start_seconds=timeout)
            return run_in_cluster(
                access,
                source,
                lambda client: client.inspect_checkpoints(source, action, step, target, options, _notify, best=best),
            )

        return function(inspect=inspect, **more)

    return with_source


Inspect = Callable[..., Sequence[dict[str, Any]]]
"""Runs an action, and returns what was found of each checkpoint."""


@click.command("list", epilog="Next: meshwright checkpoint verify JOB.")
@source_options
@click.option("-o", "--output", type=click.Choice(["json"]), help="Output format. Defaults to text for people.")
def list_checkpoints(inspect: Inspect, output: str | None) -> None:
    """List the checkpoints of a job, a directory or an object store.

    Shows step, state, size, age and layout, and with `checkpoint.keepBest` the evaluation loss. For a JOB, a
    short-lived pod of its worker image looks on its claim and in its object store. A DIRECTORY, whose name has a `/`,
    and a URI are read by this machine, which needs the package meshwright-worker.
    """
    found = inspect("list")
    if output is not None:
        click.echo(json.dumps([*found], indent=2))
        return
    if not found:
        step = click.get_current_context().params["step"]
        click.echo("no checkpoints" if step is None else f"no checkpoint of step {step:,}")
        return
    now = datetime.now(UTC)
    rows = [
        (
            *(f"{one['step']:,}", one["state"], _size(one["size"]), _age(one["saved_at"], now)),
            *(_loss(one), one["layout"], one["place"]),
        )
        for one in found
    ]
    click.echo("\n".join(table(("STEP", "STATE", "SIZE", "AGE", "EVALUATION LOSS", "LAYOUT", "PLACE"), rows)))
    for one in found:
        if one["problem"]:
            click.echo(one["problem"], err=True)


@click.command(epilog="Next: meshwright checkpoint copy JOB TARGET.")
@source_options
def verify(inspect: Inspect) -> None:
    """Read every byte of checkpoints, and compare sizes and checksums.

    Without --step, of all complete ones. Exits with 1 if a file is missing or damaged, and names it. What a JOB, a
    DIRECTORY and a URI are is as in `meshwright checkpoint list`.
    """
    damaged = False
    for one in inspect("verify"):
        files = f"{plural(one['files'], 'file')}, {format_decimal_bytes(one['size'])}"
        click.echo(f"step {one['step']:,} in {one['place']}: {'DAMAGED' if one['problems'] else 'intact'} ({files})")
        for problem in one["problems"]:
            click.echo(f"  {problem}")
        damaged = damaged or bool(one["problems"])
    if damaged:
        raise SystemExit(DAMAGED_EXIT)


@click.command(epilog="Next: meshwright checkpoint list DIRECTORY.")
@source_options
@click.argument("target", metavar="DIRECTORY|URI")
def copy(inspect: Inspect, target: str) -> None:
    """Copy a checkpoint to a directory of this machine, or to an object store.

    By default the newest that is intact, with --best the intact one with the lowest evaluation loss. The copy is
    complete, or there is none. A JOB's pod has the credentials of the job's object store; to a directory, its files
    pass through `pods/exec`.
    """
    where = target if "://" in target else str(Path(target).expanduser())
    (done,) = inspect("copy", where)
    size = f"{plural(done['files'], 'file')}, {format_decimal_bytes(done['size'])}"
    click.echo(f"copied the checkpoint of step {done['step']:,} to {done['target']} ({size})")


def _here(command: list[str]) -> Sequence[dict[str, Any]]:
    """Run the program of the worker package on this machine."""
    check_worker_package()
    done = subprocess.run([sys.executable, *command[1:]], check=False, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(failure_message(done.returncode, "", done.stderr.splitlines(), None))
    return entries_of(done.stdout.splitlines())


def _notify(text: str) -> None:
    click.echo(text, err=True)


def _age(saved_at: float | None, now: datetime) -> str:
    return "" if saved_at is None else age(datetime.fromtimestamp(saved_at, UTC), now)


def _loss(one: dict[str, Any]) -> str:
    loss = one.get("evaluation_loss")  # earlier images do not know it
    return "" if loss is None else f"{loss:.6g}{' (best)' if one['best'] else ''}"


def _size(size: int | None) -> str:
    return "" if size is None else format_decimal_bytes(size)
