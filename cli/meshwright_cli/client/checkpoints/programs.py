"""Runs the worker image's programs `generate` and `export` in a pod beside a job's checkpoints."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from meshwright.api.labels import CHECKPOINT_MOUNT
from meshwright.api.objects import KubeObject
from meshwright_cli.client.api_server import Action, ApiServer
from meshwright_cli.client.checkpoints.pod import LIFE_SECONDS, OUTPUT_MOUNT, Tool, memory_quantity, tool_pod
from meshwright_cli.client.checkpoints.run_pod import PodRun
from meshwright_cli.client.checkpoints.source import checkpoint_path, export_memory, generation_memory, places_of
from meshwright_cli.client.checkpoints.transfer import PodDirectory
from meshwright_cli.client.errors import ForbiddenError, ManifestError, MeshwrightError, RejectedError
from meshwright_cli.client.objects import Job

GENERATE, EXPORT = "meshwright_worker.generate", "meshwright_worker.export"
CHECKPOINTS = "meshwright_worker.checkpoints"
START_SECONDS = 300.0
READY = "meshwright export: ready"
"""The line of the log after which the files can be copied."""
CHECKPOINTS_MEMORY = "2Gi"
"""Of a pod that reads checkpoints without their tensors: Python with torch, and parts of files."""
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_RUN_AND_WAIT = f"""
import subprocess, sys, time
code = subprocess.run([sys.executable, "-m", *sys.argv[1:]]).returncode
if code:
    sys.exit(code)
print({READY!r}, flush=True)
time.sleep({LIFE_SECONDS})
"""
"""Runs in the pod. The files are in the pod's own directory, so it must exist until they are copied."""

Notify = Callable[[str], None]
"""Is called with a line about what happens."""


@dataclass(frozen=True, slots=True)
class PodOptions:
    """How the pod runs."""

    gpus: int = 0
    """GPUs of the pod; the model is split over them. 0: it computes on the CPU."""
    memory: str | None = None
    """Memory of the pod, such as `64Gi`. None: estimated from the model."""
    start_seconds: float = START_SECONDS
    """Time until the pod must have started."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What to generate. None is the program's default."""

    prompt: str | None = None
    tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    past_end: bool = False
    precision: str | None = None
    tokenizer: str | None = None
    base: str | None = None
    best: bool = False
    """Whether to use the checkpoint with the lowest evaluation loss, instead of the newest."""

    def arguments(self) -> list[str]:
        """Arguments of `python -m meshwright_worker.generate`."""
        named = {
            "--prompt": self.prompt, "--tokens": self.tokens, "--temperature": self.temperature, "--seed": self.seed,
            "--precision": self.precision, "--tokenizer": self.tokenizer, "--base": self.base,
        }  # fmt: skip
        # With `=`, a prompt may begin with a dash.
        return [*_given(named), *_flags({"--past-end": self.past_end, "--best": self.best})]


@dataclass(frozen=True, slots=True)
class Export:
    """What to export. None is the program's default."""

    dtype: str | None = None
    file_gib: float | None = None
    tokenizer: str | None = None
    base: str | None = None
    adapter: bool = False
    """Whether to export only the adapters, instead of merging them into the model."""
    best: bool = False
    """Whether to export the checkpoint with the lowest evaluation loss, instead of the newest."""

    def arguments(self) -> list[str]:
        """Arguments of `python -m meshwright_worker.export`."""
        given = _given({
            "--dtype": self.dtype, "--file-gib": self.file_gib, "--tokenizer": self.tokenizer, "--base": self.base,
        })  # fmt: skip
        return [*given, *_flags({"--adapter": self.adapter, "--best": self.best})]


def generate_command(checkpoint: str, generation: Generation, gpus: int) -> list[str]:
    """The command that generates text. With several GPUs, each layer is split over them."""
    arguments = [f"--checkpoint={checkpoint}", *generation.arguments()]
    if gpus <= 1:
        return ["python", "-m", GENERATE, *arguments]
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    return ["python", *ranks, "-m", GENERATE, f"--tensor={gpus}", *arguments]


async def generate(
    server: ApiServer, job: Job, generation: Generation, step: int | None, options: PodOptions, notify: Notify
) -> str:
    """Continue a text with the model of a job's checkpoint; the text.

    Raises:
        NotFoundError: the job has no complete checkpoint yet.
        RejectedError: the program fails. The message is the program's.
    """
    memory = options.memory or memory_quantity(generation_memory(job, generation.precision or "fp32", options.gpus))
    command = generate_command(checkpoint_path(job, step), generation, options.gpus)
    pod = tool_pod(job, Tool("generate", command, options.gpus, memory), secrets.token_hex(4))
    return "\n".join(await _run(server, pod, options, notify))


async def export_to_claim(
    server: ApiServer, job: Job, export: Export, step: int | None, directory: str, options: PodOptions, notify: Notify
) -> str:
    """Export into a directory of the checkpoint claim; the program's summary.

    Raises:
        ManifestError: the directory is not below the claim's root.
        RejectedError: the program fails. The message is the program's.
    """
    if job.spec.checkpoint is not None and job.spec.checkpoint.claim_name is None:
        raise ManifestError(f"{job.name} has no checkpoint claim (`checkpoint.claimName`): export to this machine")
    path = PurePosixPath(directory)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ManifestError(f"the directory on the claim must be relative and below its root, got `{directory}`")
    arguments = [f"--checkpoint={checkpoint_path(job, step)}", f"--output={CHECKPOINT_MOUNT}/{path}"]
    command = ["python", "-m", EXPORT, *arguments, *export.arguments()]
    tool = Tool("export", command, memory=_export_memory(job, export, options), writes_claim=True)
    lines = await _run(server, tool_pod(job, tool, secrets.token_hex(4)), options, notify)
    return _summary(lines, f"{path} on {job.spec.checkpoint.place}" if job.spec.checkpoint else str(path))


async def export_here(
    server: ApiServer, job: Job, export: Export, step: int | None, target: Path, options: PodOptions, notify: Notify
) -> str:
    """Export in the pod, and copy the files to a new or empty local directory; the program's summary.

    Raises:
        ManifestError: the directory is not empty.
        ForbiddenError: the user may not create pods or `pods/exec`.
        RejectedError: the program fails, or a file arrives with another checksum.
    """
    _check_empty(target)
    output = f"{OUTPUT_MOUNT}/model"
    arguments = [f"--checkpoint={checkpoint_path(job, step)}", f"--output={output}", *export.arguments()]
    tool = Tool(
        "export", ["python", "-c", _RUN_AND_WAIT, EXPORT, *arguments], memory=_export_memory(job, export, options),
        has_output=True,
    )  # fmt: skip
    await _check_exec(server, job)
    async with _start(server, tool_pod(job, tool, secrets.token_hex(4)), options, notify) as run:
        lines = await _until_ready(run, tool.memory)
        directory = PodDirectory(server, run.namespace, run.name, output)
        await directory.copy_to(target, lambda name, size: notify(f"{name}: {size:,} bytes"))
    return _summary(lines, str(target))


async def _until_ready(run: PodRun, memory: str | None) -> list[str]:
    """What a program has printed when its output is complete.

    Raises:
        RejectedError: it fails.
    """
    lines: list[str] = []
    async for line in run.log():
        if line == READY:
            return lines
        lines.append(line)
    raise await _failure(run, lines, memory)


def checkpoints_command(
    action: str, places: Sequence[str], step: int | None, target: str | None = None, *, best: bool = False
) -> list[str]:
    """The command that lists, verifies or copies checkpoints."""
    more = [*_given({"--step": step, "--to": target}), *_flags({"--best": best})]
    return ["python", "-m", CHECKPOINTS, action, *(f"--at={place}" for place in places), *more]


def entries_of(lines: Sequence[str]) -> list[dict[str, Any]]:
    """What the command has printed: one JSON object a line."""
    return [json.loads(line) for line in lines if line.startswith("{")]


async def inspect_checkpoints(
    server: ApiServer,
    job: Job,
    action: str,
    step: int | None,
    options: PodOptions,
    notify: Notify,
    target: str | None = None,
    *,
    best: bool = False,
) -> list[dict[str, Any]]:
    """List, verify or copy a job's checkpoints in a pod next to them; what the program says of each.

    Args:
        server: the API server.
        job: the job.
        action: `list`, `verify` or `copy`.
        step: only the checkpoint of this step.
        options: memory of the pod, and time for its start.
        notify: is called with lines about what happens.
        target: with `copy`, a URI.
        best: only the checkpoint with the lowest evaluation loss.

    Raises:
        RejectedError: the job has no checkpoints that Meshwright can read, or the program fails.
    """
    command = checkpoints_command(action, places_of(job), step, target, best=best)
    tool = Tool("checkpoint", command, memory=options.memory or CHECKPOINTS_MEMORY)
    return entries_of(await _run(server, tool_pod(job, tool, secrets.token_hex(4)), options, notify))


async def copy_checkpoint_here(
    server: ApiServer,
    job: Job,
    step: int | None,
    target: Path,
    options: PodOptions,
    notify: Notify,
    *,
    best: bool = False,
) -> dict[str, Any]:
    """Copy a checkpoint of a job, by default the newest intact one, into a local directory of checkpoints. With `best`,
    the intact one with the lowest evaluation loss.

    Raises:
        ManifestError: the directory has that step already.
        ForbiddenError: the user may not create pods or `pods/exec`.
        RejectedError: the program fails, or a file arrives with another checksum.
    """
    output = f"{OUTPUT_MOUNT}/checkpoints"
    _, _, *arguments = checkpoints_command("copy", places_of(job), step, output, best=best)
    command = ["python", "-c", _RUN_AND_WAIT, *arguments]
    tool = Tool("checkpoint", command, memory=options.memory or CHECKPOINTS_MEMORY, has_output=True)
    await _check_exec(server, job)
    async with _start(server, tool_pod(job, tool, secrets.token_hex(4)), options, notify) as run:
        lines = await _until_ready(run, tool.memory)
        (copied,) = entries_of(lines)
        name = f"step-{int(copied['step']):08d}"
        if (target / name).exists():
            raise ManifestError(f"`{target / name}` exists already: it stays as it is")
        hidden = target / f".writing-0-{name}"
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            directory = PodDirectory(server, run.namespace, run.name, f"{output}/{name}")
            await directory.copy_to(hidden, lambda file, size: notify(f"{file}: {size:,} bytes"))
            hidden.rename(target / name)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    return {**copied, "target": str(target)}


def _check_empty(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ManifestError(f"`{target}` is not an empty directory: choose a new directory")


def _export_memory(job: Job, export: Export, options: PodOptions) -> str | None:
    return options.memory or memory_quantity(export_memory(job, export.dtype or "fp32", export.file_gib or 4.0))


async def _check_exec(server: ApiServer, job: Job) -> None:
    """Check before the export, which takes time, that its files can be copied.

    Raises:
        ForbiddenError: they cannot.
    """
    attributes = {"verb": "create", "resource": "pods", "subresource": "exec", "namespace": job.namespace}
    body = {
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }  # fmt: skip
    try:
        answer = await server.request("POST", _REVIEWS, Action("create"), body=body)
    except MeshwrightError:
        return  # the transfer reports it
    if not (answer.get("status") or {}).get("allowed"):
        raise ForbiddenError(
            f"you may not create pods/exec in namespace `{job.namespace}`, which copies the files: ask an "
            "administrator for a role that allows `get` and `create` on `pods/exec`, or pass --on-claim DIRECTORY",
            "create", "pods/exec", job.namespace,
        )  # fmt: skip


def _start(server: ApiServer, pod: KubeObject, options: PodOptions, notify: Notify) -> PodRun:
    container = pod["spec"]["containers"][0]
    notify(f"Running pod {pod['metadata']['name']} with image {container['image']}")
    return PodRun(server, pod, options.start_seconds)


async def _run(server: ApiServer, pod: KubeObject, options: PodOptions, notify: Notify) -> list[str]:
    """Run a pod to its end; the lines of its log."""
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    async with _start(server, pod, options, notify) as run:
        lines = [line async for line in run.log()]
        code, _ = await run.exit_code()
        if code:
            raise await _failure(run, lines, limits.get("memory"))
    return lines


async def _failure(run: PodRun, lines: Sequence[str], memory: str | None) -> RejectedError:
    code, reason = await run.exit_code()
    return RejectedError(failure_message(code, reason, lines, memory))


def failure_message(code: int, reason: str, lines: Sequence[str], memory: str | None) -> str:
    """Why a program failed, from its log and the reason of the kubelet. Pure."""
    if reason == "OOMKilled":
        return f"the pod ran out of memory (limit {memory or 'of its node'}): pass more with --memory"
    if reason == "DeadlineExceeded":
        return f"the pod did not finish within {LIFE_SECONDS // 3600} hours"
    printed = [line for line in lines if line.strip()]
    for line in reversed(printed):
        _, found, message = line.partition(": error: ")
        if found:
            return message
    return f"the program exited with code {code}: {printed[-1] if printed else reason or 'its log is empty'}"


def _summary(lines: Sequence[str], where: str) -> str:
    """The program's last line, with the place as the user named it."""
    head, _, tail = (lines[-1] if lines else "").partition(" in ")
    return f"{head} in {where};{tail.partition(';')[2]}" if tail else where


def _flags(named: Mapping[str, bool]) -> list[str]:
    return [name for name, value in named.items() if value]


def _given(named: Mapping[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in named.items() if value is not None]
