"""One demo from beginning to end: set up, train, lose a worker, recover, finish, tell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwright.api import conditions
from meshwright.api.labels import KIND
from meshwright.api.parsing import parse_spec
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright_cli import manifest
from meshwright_cli.child_processes import Programs
from meshwright_cli.demo import checks, display, failure_logs, setup
from meshwright_cli.demo.display import Display
from meshwright_cli.demo.fault import Fault
from meshwright_cli.demo.loss_curve import LossCurve
from meshwright_cli.demo.observer import Observer
from meshwright_cli.demo.snapshot import Snapshot
from meshwright_cli.demo.summary import DemoResult, summary
from meshwright_local.kube.client import ApiClient

NAMESPACE = "default"
POLL_SECONDS = 0.5
PROMPT = "def "


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for."""

    directory: Path
    """An empty directory for everything the demo makes."""
    manifest: Path
    """The job and what it needs."""
    fault: bool
    """Whether a worker pod is deleted midway."""
    keep_running: bool
    """Whether the cluster stays up after the end, until a signal."""
    seconds: float
    """Longest time for the job."""
    shape: setup.Shape = field(default_factory=setup.Shape)


class DemoError(Exception):
    """The demo did not show what it claims. The message says what is missing."""


async def run(options: Options, console: Console) -> None:
    """Run a demo; everything it started is gone when this returns or raises.

    Raises:
        DemoError: the job did not complete, or the recovery did not happen.
        ManifestError, SetupError, ProgramEndedError, ApiError: a step before that failed.
    """
    started = time.monotonic()
    items = manifest.read(options.manifest)
    job = only_job(items, options.manifest)
    hint = f"look from another terminal:  export KUBECONFIG={options.directory}/cluster/kubeconfig"
    async with Programs() as programs:
        with display.choose_display(console, hint) as shown:
            shown.announce(
                f"starting an embedded cluster with {options.shape.gpus} simulated GPUs in {options.directory}"
            )
            kubeconfig = await setup.start_cluster(programs, options.directory, options.shape)
            async with setup.connect(kubeconfig) as client:
                shown.announce(hint)
                await prepare(programs, client, options, kubeconfig, items, shown)
                fault = Fault() if options.fault else None
                curve = LossCurve()
                end = await follow_job(programs, client, options, job, fault, curve, shown)
                spec: ParallelTrainingJobSpec = parse_spec(job)
                if end.status.checkpoint is not None and spec.checkpoint is not None:
                    saved_at = (NAMESPACE, spec.checkpoint.claim_name, end.status.checkpoint.path)
                    end.status.checkpoint.path = str(await setup.local_checkpoint_path(client, *saved_at))
                record = read_checkpoint_record(end)
                problems = checks.failed_checks(end, fault, record, total_samples(job))
                if problems:
                    logs = await failure_logs.logs(client, NAMESPACE, end, options.directory)
                    raise DemoError("\n".join([*problems, "", logs]))
        text = await generate_text(programs, end, options.directory)
        seconds = time.monotonic() - started
        console.print(summary(DemoResult(end, curve, fault, record, PROMPT, text, seconds)), soft_wrap=True)
        if options.keep_running:
            console.print(f"\nthe cluster stays up until Ctrl-C; {hint}", soft_wrap=True, highlight=False)
            with contextlib.suppress(asyncio.CancelledError):  # the expected end: the demo itself went well
                await asyncio.Event().wait()


async def prepare(
    programs: Programs,
    client: ApiClient,
    options: Options,
    kubeconfig: Path,
    items: list[dict[str, Any]],
    shown: Display,
) -> None:
    """Install the CRD, start the operator, apply the manifest."""
    shown.announce("installing the CustomResourceDefinition")
    await setup.install_crd(client)
    shown.announce("starting the operator")
    await setup.start_operator(programs, options.directory, kubeconfig, setup.Ports())
    for item in items:
        shown.announce(f"applying {item['kind']} {item['metadata']['name']}")
        await manifest.apply(client, item, NAMESPACE)


async def follow_job(
    programs: Programs,
    client: ApiClient,
    options: Options,
    job: Mapping[str, Any],
    fault: Fault | None,
    curve: LossCurve,
    shown: Display,
) -> Snapshot:
    """Follow the job to its end, and delete a worker pod on the way if there is to be a fault.

    Raises:
        DemoError: it took longer than it may.
    """
    observer = Observer(client, job["metadata"].get("namespace", NAMESPACE), job["metadata"]["name"])
    deadline = time.monotonic() + options.seconds
    while True:
        programs.check()
        now = await observer.take_snapshot()
        if now.loss is not None:
            curve.add(now.step, now.loss)
        shown.show(now, curve)
        if fault is not None:
            await inject_fault(client, observer, fault, now, shown)
        if now.holds(conditions.COMPLETE) or now.holds(conditions.FAILED) or now.holds(conditions.STALLED):
            return now
        if time.monotonic() > deadline:
            logs = await failure_logs.logs(client, NAMESPACE, now, options.directory)
            timed_out = f"the job did not finish within {options.seconds:.0f} s: {now.state} {now.message}"
            raise DemoError(f"{timed_out}\n\n{logs}")
        await asyncio.sleep(POLL_SECONDS)


async def inject_fault(client: ApiClient, observer: Observer, fault: Fault, now: Snapshot, shown: Display) -> None:
    """Delete the worker pod when it is time; say so, and say when the job is back."""
    if fault.due(now):
        deleted_pod = await fault.inject(client, NAMESPACE, now)
        shown.announce(
            f"FAULT: deleting worker pod {deleted_pod.name} on {deleted_pod.node}, as kubectl delete pod does"
        )
    elif fault.observe(now) and fault.seconds is not None:
        fault.resumed_after = await observer.resumed_after(now)
        shown.announce(f"RECOVERED: every rank trains again, {fault.seconds:.1f} s after the pod was deleted")


def only_job(items: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """The one job of a manifest.

    Raises:
        ManifestError: there is none, or more than one.
    """
    jobs = [item for item in items if item["kind"] == KIND]
    if len(jobs) != 1:
        raise manifest.ManifestError(f"{path}: must hold exactly one {KIND}, not {len(jobs)}")
    return jobs[0]


def total_samples(job: Mapping[str, Any]) -> int:
    """Sequences that the whole run consumes: each exactly once, whatever happens to its workers."""
    spec: ParallelTrainingJobSpec = parse_spec(job)
    return spec.training.steps * spec.training.global_batch_size if spec.training else 0


def read_checkpoint_record(end: Snapshot) -> checks.CheckpointRecord | None:
    """The manifest of the job's newest checkpoint; None where there is none."""
    if end.status.checkpoint is None:
        return None
    try:
        state = json.loads((Path(end.status.checkpoint.path) / "meshwright.json").read_text())["state"]
        return checks.CheckpointRecord(int(state["step"]), int(state["samples"]), f"{int(state['digest']):016x}")
    except (OSError, ValueError, TypeError, KeyError):
        return None


async def generate_text(programs: Programs, end: Snapshot, directory: Path) -> str:
    """Text that the trained model writes after a prompt."""
    if end.status.checkpoint is None:
        return ""
    argv = [sys.executable, "-m", "meshwright_worker.generate", "--checkpoint", end.status.checkpoint.path]
    argv += ["--prompt", PROMPT, "--tokens", "240"]
    # One thread: more of them only get into each other's way with a model this small.
    env = {"OMP_NUM_THREADS": "1"}
    text = await programs.output("text sampler", argv, directory / "generate.log", env)
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text.rstrip())
