"""`meshwright generate` and `meshwright export`: use the model of a job's checkpoint, or of a local directory."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.checkpoints.programs import (
    EXPORT,
    START_SECONDS,
    Export,
    Generation,
    PodOptions,
    generate_command,
)
from meshwright_cli.client.errors import ExitCode
from meshwright_cli.completion import complete_jobs
from meshwright_cli.jobs.access import Access, CommandError, cluster_options
from meshwright_cli.parameters import Duration

T = TypeVar("T")
NUMBERS = ["fp32", "bf16", "fp64"]
DTYPES = ["fp32", "bf16", "fp16"]


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of commands that read a checkpoint in a pod."""
    for option in (
        click.option("--timeout", type=Duration(), default=START_SECONDS,
                     help="Time until the pod must have started, such as 90s or 10m (default: 5m)."),
        click.option("--memory", metavar="QUANTITY",
                     help="Memory of the pod, such as 64Gi. Estimated from the model by default."),
        click.option("--base", metavar="PATH",
                     help="With adapters: the base model, if it has moved. For a job, a path in its pods."),
        click.option("--tokenizer", metavar="PATH",
                     help="The run's tokenizer file, if it has moved. For a job, a path in its pods."),
        click.option("--best", is_flag=True, help="Use the checkpoint with the lowest evaluation loss."),
        click.option("--step", type=click.IntRange(min=1), help="Step of the checkpoint. Defaults to the newest."),
    ):  # fmt: skip
        function = option(function)
    return function


@click.command(epilog="Next: meshwright export JOB -d DIRECTORY.")
@click.argument("source", metavar="JOB|DIRECTORY", shell_complete=complete_jobs)
@click.option("--prompt", help="Text to continue (default: `def `).")
@click.option("--tokens", type=click.IntRange(min=1), help="Maximum number of tokens to generate (default: 200).")
@click.option("--temperature", type=click.FloatRange(min=0),
              help="Sampling temperature (default: 0.7). With 0: always the likeliest token.")  # fmt: skip
@click.option("--seed", type=int, help="Seed of the sampling (default: 0).")
@click.option("--past-end", is_flag=True, help="Continue with the next document after one ends.")
@click.option("--precision", type=click.Choice(NUMBERS), help="Number format of computation (default: fp32).")
@click.option("--gpus", type=click.IntRange(min=0),
              help="GPUs to use; several share the model. Defaults to 0 for a job, to a local GPU for a "
              "directory.")  # fmt: skip
@source_options
@cluster_options
def generate(
    source: str,
    prompt: str | None,
    tokens: int | None,
    temperature: float | None,
    seed: int | None,
    past_end: bool,
    precision: str | None,
    gpus: int | None,
    step: int | None,
    best: bool,
    tokenizer: str | None,
    base: str | None,
    memory: str | None,
    timeout: float,
    access: Access,
) -> None:
    """Continue a text with the model of a job's newest checkpoint.

    For a JOB, a short-lived pod of its worker image reads the checkpoint where it is: it mounts the job's claims
    read-only, and is deleted at the end. You need the right to create pods. For a DIRECTORY, whose name has a `/`, the
    model runs on this machine, which needs the package meshwright-worker.
    """
    check_choice(step, best)
    wanted = Generation(prompt, tokens, temperature, seed, past_end, precision, tokenizer, base, best)
    if is_directory(source):
        command = generate_command(_local(source, step), wanted, gpus or 0)
        raise SystemExit(_run_here([*command, *(["--cpu"] if gpus == 0 else [])]))
    options = PodOptions(gpus or 0, memory, timeout)
    click.echo(run_in_cluster(access, source, lambda client: client.generate(source, wanted, step, options, _notify)))


@click.command(epilog="Next: meshwright generate JOB.")
@click.argument("source", metavar="JOB|DIRECTORY", shell_complete=complete_jobs)
@click.option("-d", "--output", "target", type=click.Path(path_type=Path, file_okay=False),
              help="A new or empty directory of this machine.")  # fmt: skip
@click.option("--on-claim", metavar="DIRECTORY",
              help="A new directory on the job's checkpoint claim, instead of one of this machine.")  # fmt: skip
@click.option("--adapter", is_flag=True,
              help="Export only the LoRA adapters, as PEFT and inference servers read them.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), help="Number format of the exported weights (default: fp32).")
@click.option("--file-gib", type=click.FloatRange(min=0, min_open=True),
              help="Maximum size of one file, in GiB (default: 4).")  # fmt: skip
@source_options
@cluster_options
def export(
    source: str,
    target: Path | None,
    on_claim: str | None,
    adapter: bool,
    dtype: str | None,
    file_gib: float | None,
    step: int | None,
    best: bool,
    tokenizer: str | None,
    base: str | None,
    memory: str | None,
    timeout: float,
    access: Access,
) -> None:
    """Export the model of a job's newest checkpoint as a Hugging Face directory.

    With --best, that of the checkpoint with the lowest evaluation loss (`checkpoint.keepBest`). Adapters are merged
    into the model; with --adapter, only they are exported. The tokenizer is copied. For a JOB, a short-lived pod of its
    worker image does it: it mounts the job's claims read-only, and is deleted at the end. Its files are copied to this
    machine, which needs the right to create `pods/exec`, or with --on-claim stay on the claim. For a DIRECTORY, whose
    name has a `/`, the export runs on this machine, which needs the package meshwright-worker.
    """
    if (target is None) == (on_claim is None):
        raise click.UsageError("pass either -d DIRECTORY or --on-claim DIRECTORY")
    if adapter and file_gib is not None:
        raise click.UsageError("--file-gib is not supported with --adapter: PEFT reads adapters from one file")
    check_choice(step, best)
    wanted, options = Export(dtype, file_gib, tokenizer, base, adapter, best), PodOptions(0, memory, timeout)
    if is_directory(source):
        if target is None:
            raise click.UsageError("--on-claim needs the name of a job: pass -d DIRECTORY")
        arguments = [f"--checkpoint={_local(source, step)}", f"--output={target}", *wanted.arguments()]
        raise SystemExit(_run_here(["python", "-m", EXPORT, *arguments]))
    place, there = (target, False) if target is not None else (str(on_claim), True)

    async def exported(client: AsyncClient) -> str:
        return await client.export(source, place, wanted, step, options, _notify, on_claim=there)

    click.echo(run_in_cluster(access, source, exported))


def run_in_cluster(access: Access, source: str, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
    """Run in the cluster. A termination signal, like Ctrl-C, lets the pod be deleted first."""

    async def until_signal(client: AsyncClient) -> T:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work(client)

    try:
        return access.run(until_signal)
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    except CommandError as error:
        if error.exit_code == ExitCode.NOT_FOUND and Path(source).is_dir():
            _notify(f"`{source}` was taken for a job. For the directory of this name, pass ./{source}")
        raise


def _notify(text: str) -> None:
    click.echo(text, err=True)


def is_directory(source: str) -> bool:
    """Names of jobs have no slash."""
    return "/" in source or source in (".", "..")


def check_choice(step: int | None, best: bool) -> None:
    """Check that at most one checkpoint is chosen.

    Raises:
        click.UsageError: both options are given.
    """
    if best and step is not None:
        raise click.UsageError("--best is not supported with --step: pass one of them")


def _local(source: str, step: int | None) -> str:
    path = Path(source) if step is None else Path(source) / f"step-{step:08d}"
    if not path.is_dir():
        raise click.ClickException(f"`{path}` is not a directory: pass a checkpoint, or a directory of checkpoints")
    return str(path)


def _run_here(command: Sequence[str]) -> int:
    """Run a program of the worker package; its exit code.

    Raises:
        click.ClickException: the package is not installed.
    """
    check_worker_package()
    return subprocess.run([sys.executable, *command[1:]], check=False).returncode


def check_worker_package() -> None:
    """Check that programs of the worker package can run on this machine.

    Raises:
        click.ClickException: it is not installed.
    """
    if importlib.util.find_spec("meshwright_worker") is None:
        raise click.ClickException(
            "using a checkpoint on this machine needs the Python package `meshwright-worker`: pip install "
            "meshwright-worker"
        )
