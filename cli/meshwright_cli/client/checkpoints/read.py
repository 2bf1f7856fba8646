"""Reads small files next to a job's checkpoints, whether a pod of the job still runs or not.

A worker pod that runs has the claim mounted, so a command in it reads the files. If none runs, or the user may not run
commands in pods, a pod that exists only for this prints them to its log.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence

from meshwright.api.labels import CHECKPOINT_MOUNT
from meshwright_cli.client.checkpoints.pod import Tool, tool_pod
from meshwright_cli.client.checkpoints.run_pod import PodRun
from meshwright_cli.client.errors import MeshwrightError, RejectedError
from meshwright_cli.client.job_reader import JobReader
from meshwright_cli.client.objects import Job, WorkerPod
from meshwright_cli.client.pod_exec import run_in_pod

START_SECONDS = 60.0
"""How long the reading pod may take to start."""


async def read_on_claim(reader: JobReader, job: Job, pods: Sequence[WorkerPod], program: str, *arguments: str) -> str:
    """Run a Python program that prints files of a job's checkpoint claim; its output.

    Args:
        reader: of the job's namespace.
        job: a job with `spec.checkpoint`.
        pods: its worker pods.
        program: gets the directory of the job's checkpoints as its first argument, and must not import anything but
            the standard library.
        arguments: the others.

    Raises:
        ForbiddenError: the user may not create pods.
        MeshwrightError: no pod can read the claim; the message says why.
    """
    command = ("python", "-c", program, f"{CHECKPOINT_MOUNT}/{job.name}-{job.uid[:8]}", *arguments)
    running = next((pod for pod in pods if pod.state == "Running"), None)
    if running is not None:
        with contextlib.suppress(MeshwrightError):  # such as without the right to run commands in pods
            return (await run_in_pod(reader, running.name, command)).decode(errors="replace")
    tool = Tool("read", command, memory="256Mi", cpu="50m", only_checkpoints=True)
    async with PodRun(reader.server, tool_pod(job, tool, secrets.token_hex(4)), START_SECONDS) as pod:
        lines = [line async for line in pod.log()]
        code, reason = await pod.exit_code()
    if code:
        raise RejectedError(f"pod {pod.name} failed: {(lines or [reason])[-1]}")
    return "\n".join(lines)
