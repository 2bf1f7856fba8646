"""One demo: set up, train, lose a worker and a node, recover, finish, and summarize."""

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
from meshwright.api.data import DataSource
from meshwright.api.labels import KIND
from meshwright.api.parsing import parse_spec
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright_cli import manifest
from meshwright_cli.child_processes import Programs
from meshwright_cli.demo import checks, display, failure_logs, setup
from meshwright_cli.demo.display import Display
from meshwright_cli.demo.fault import Fault
from meshwright_cli.demo.loss_curve import LossCurve
from meshwright_cli.demo.lost_node import LostNode
from meshwright_cli.demo.observer import Observer
from meshwright_cli.demo.snapshot import Snapshot
from meshwright_cli.demo.story import Story
from meshwright_cli.demo.summary import DemoResult, summary
from meshwright_cli.demo.text import KUBECTL
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.resources import JOBS

NAMESPACE = "default"
POLL_SECONDS = 0.5
PROMPT = "def "


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a demo."""

    directory: Path
    """An empty directory for the files of the demo."""
    manifest: Path
    """Manifest of the job and the objects that it needs."""
    fault: bool
    """Whether a worker pod is deleted, and a node if the job is elastic."""
    keep_running: bool
    """Whether the cluster keeps running after the end, until a signal."""
    seconds: float
    """Timeout of the job."""
    shape: setup.Shape = field(default_factory=setup.Shape)


class DemoError(Exception):
    """The demo did not show what it claims. The message lists what is missing."""


async def run(options: Options, console: Console) -> None:
    """Run a demo, and stop everything that it started.

    Raises:
        DemoError: the job did not complete, or the recovery did not happen.
        ManifestError, SetupError, ProgramEndedError, ApiError: a step before that failed.
    """
    started = time.monotonic()
    items = manifest.read(options.manifest)
    job = only_job(items, options.manifest)
    hint = f"{KUBECTL}export KUBECONFIG={options.directory}/cluster/kubeconfig"
    async with Programs() as programs:
        with display.choose_display(console, options.directory / "cluster" / "kubeconfig") as shown:
            shown.announce(
                f"starting an embedded cluster with {options.shape.gpus} simulated GPUs in {options.directory}"
            )
            kubeconfig = await setup.start_cluster(programs, options.directory, options.shape)
            async with setup.connect(kubeconfig) as client:
                shown.announce(hint)
                await prepare(programs, client, options, kubeconfig, items, shown)
                spec: ParallelTrainingJobSpec = parse_spec(job)
                story = plan_story(spec, options) if options.fault else None
                curve = LossCurve()
                end = await follow_job(programs, client, options, job, story, curve, shown)
                spec = parse_spec(job := await client.get(JOBS, end.name, NAMESPACE))
                claim = spec.checkpoint.claim_name if spec.checkpoint is not None else None
                if end.status.checkpoint is not None and claim is not None:
                    saved_at = (NAMESPACE, claim, end.status.checkpoint.path)
                    end.status.checkpoint.path = str(await setup.local_checkpoint_path(client, *saved_at))
                record = read_checkpoint_record(end)
                digest = await expected_digest(programs, spec, job, options.directory)
                problems = checks.failed_checks(end, story, record, total_samples(spec), digest)
                if problems:
                    logs = await failure_logs.logs(client, NAMESPACE, end, options.directory)
                    raise DemoError("\n".join([*problems, "", logs]))
        text = await generate_text(programs, end, options.directory)
        seconds = time.monotonic() - started
        console.print(summary(DemoResult(end, curve, story, record, PROMPT, text, seconds, digest)), soft_wrap=True)
        if options.keep_running:
            console.print(f"\nthe cluster runs until Ctrl-C; {hint}", soft_wrap=True, highlight=False)
            with contextlib.suppress(asyncio.CancelledError):  # the expected end: the demo succeeded
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
    story: Story | None,
    curve: LossCurve,
    shown: Display,
) -> Snapshot:
    """Follow the job until it finishes, with the faults of a story.

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
        if story is not None:
            await story.go_on(client, NAMESPACE, observer, now, shown)
        if now.holds(conditions.COMPLETE) or now.holds(conditions.FAILED) or now.holds(conditions.STALLED):
            return now
        if time.monotonic() > deadline:
            logs = await failure_logs.logs(client, NAMESPACE, now, options.directory)
            timed_out = f"the job did not finish within {options.seconds:.0f} s: {now.state} {now.message}"
            raise DemoError(f"{timed_out}\n\n{logs}")
        await asyncio.sleep(POLL_SECONDS)


def plan_story(spec: ParallelTrainingJobSpec, options: Options) -> Story:
    """The faults: a pod, and a node if the job can continue with fewer replicas."""
    shrinks = spec.elastic is not None and spec.replicas > spec.elastic.min_replicas
    return Story(Fault(), LostNode(options.directory / "cluster") if shrinks else None)


def only_job(items: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """The one job of a manifest.

    Raises:
        ManifestError: there is none, or more than one, or one that saves no checkpoints.
    """
    jobs = [item for item in items if item["kind"] == KIND]
    if len(jobs) != 1:
        raise manifest.ManifestError(f"{path}: expected exactly one {KIND}, found {len(jobs)}")
    if not (jobs[0].get("spec") or {}).get("checkpoint"):
        raise manifest.ManifestError(
            f"{path}: the demo needs `spec.checkpoint`: it stops a worker, continues from a checkpoint, and compares "
            "the samples in the last one with the data. Add it with a claim, as in examples/stdlib-lm.yaml"
        )
    return jobs[0]


def total_samples(spec: ParallelTrainingJobSpec) -> int:
    """Number of sequences that the run consumes: each exactly once, also after faults."""
    return spec.training.steps * spec.training.global_batch_size if spec.training else 0


def read_checkpoint_record(end: Snapshot) -> checks.CheckpointRecord | None:
    """The manifest of the job's latest checkpoint, or None."""
    if end.status.checkpoint is None:
        return None
    try:
        state = json.loads((Path(end.status.checkpoint.path) / "meshwright.json").read_text())["state"]
        return checks.CheckpointRecord(int(state["step"]), int(state["samples"]), f"{int(state['digest']):016x}")
    except (OSError, ValueError, TypeError, KeyError):
        return None


async def expected_digest(
    programs: Programs, spec: ParallelTrainingJobSpec, job: Mapping[str, Any], directory: Path
) -> str:
    """The digest of the run's samples, computed from the data without training. Empty if only pods have the data."""
    if spec.data is None or spec.data.source is not DataSource.PYTHON_STDLIB:
        return ""
    path = directory / "job.json"
    path.write_text(json.dumps({key: job[key] for key in ("apiVersion", "kind", "metadata", "spec")}))
    argv = [sys.executable, "-m", "meshwright_worker.expected_digest", str(path)]
    return (await programs.output("data digest", argv, directory / "digest.log")).strip()


async def generate_text(programs: Programs, end: Snapshot, directory: Path) -> str:
    """Text that the trained model generates after a prompt."""
    if end.status.checkpoint is None:
        return ""
    argv = [sys.executable, "-m", "meshwright_worker.generate", "--checkpoint", end.status.checkpoint.path]
    argv += ["--prompt", PROMPT, "--tokens", "240"]
    # One thread: a model this small is slower with more.
    env = {"OMP_NUM_THREADS": "1"}
    text = await programs.output("text sampler", argv, directory / "generate.log", env)
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text.rstrip())
