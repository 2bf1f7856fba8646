"""Reads what agents recorded of failed ranks on the checkpoint claim, after the pod of the rank is gone.

A worker pod that runs has the claim mounted, so a command in it reads the files. If none runs, a pod that exists only
for this prints them to its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright.api.status import FailureStatus
from meshwright_cli.client.api_server import PODS, Action
from meshwright_cli.client.errors import MeshwrightError, RejectedError
from meshwright_cli.client.objects import Job, WorkerPod, pod_state
from meshwright_cli.client.pod_exec import run_in_pod

if TYPE_CHECKING:
    from meshwright_cli.client.async_client import AsyncClient

_READ = """
import json, os, sys
path = os.path.join(os.environ["MESHWRIGHT_CHECKPOINT_DIR"], "failures", sys.argv[1])
def text(name, limit=1 << 17):
    try:
        with open(os.path.join(path, name), errors="replace") as file:
            return file.read(limit)
    except FileNotFoundError:
        return ""
print(json.dumps({"record": text("failure.json"), "log": text("log.txt"), "stacks": text("stacks.txt")}))
"""
START_SECONDS = 60.0
"""How long the reading pod may take to start and to end."""
LIFE_SECONDS = 300
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class RecordedFailure:
    """What is left of a failed rank."""

    failure: FailureStatus
    log: str
    stacks: str
    phases: tuple[tuple[str, float], ...] = ()
    """Name and seconds of the phases of its start."""
    step: int | None = None
    """Last step that it completed in its mesh generation."""
    where: str = ""
    """Where it was read, for people."""


async def read_failure(client: AsyncClient, job: Job, pods: Sequence[WorkerPod]) -> RecordedFailure | None:
    """The latest recorded failure of a job, from its claim if it can be read, else from its status. None without one.

    If the claim cannot be read, `where` says why.
    """
    failure = job.status.last_failure
    if failure is None:
        return None
    short = RecordedFailure(failure, failure.log, failure.stacks, where="the job's status")
    if (
        not failure.path
        or failure.rank is None
        or job.spec.checkpoint is None
        or job.spec.checkpoint.claim_name is None
    ):
        return short
    name = failure.path.rstrip("/").rpartition("/")[2]
    try:
        content = await _read(client, job, pods, name)
        return _parsed(failure, content, f"claim {job.spec.checkpoint.claim_name}")
    except (MeshwrightError, ValueError) as error:
        why = f"the job's status, because claim {job.spec.checkpoint.claim_name} cannot be read: {error}"
        return RecordedFailure(failure, failure.log, failure.stacks, where=why)


def _parsed(failure: FailureStatus, content: bytes, where: str) -> RecordedFailure:
    """Raises ValueError if there is no record."""
    line = next((line for line in content.decode(errors="replace").splitlines() if line.startswith("{")), "")
    found = json.loads(line)
    record = json.loads(found["record"]) if found.get("record") else None
    if not isinstance(record, dict):
        raise ValueError("it has no record of this failure")
    phases = tuple((str(phase["name"]), float(phase["seconds"])) for phase in record.get("phases") or ())
    return RecordedFailure(failure, str(found["log"]), str(found["stacks"]), phases, record.get("step"), where)


async def _read(client: AsyncClient, job: Job, pods: Sequence[WorkerPod], name: str) -> bytes:
    running = next((pod for pod in pods if pod.state == "Running"), None)
    if running is not None:
        with contextlib.suppress(MeshwrightError):  # such as without the right to run commands in pods
            return await run_in_pod(client, running.name, ("python", "-c", _READ, name))
    return await _read_with_pod(client, job, name)


async def _read_with_pod(client: AsyncClient, job: Job, name: str) -> bytes:
    """Start a pod that prints the files, and delete it."""
    pod = f"meshwright-read-{secrets.token_hex(4)}"
    await client.server.request(
        "POST", PODS.path(client.namespace), Action("create", PODS, client.namespace), body=_pod(pod, job, name)
    )
    action = Action("delete", PODS, client.namespace, pod)
    try:
        await _wait_until_done(client, pod)
        log = Action("get", PODS, client.namespace, pod, "log")
        lines = [line async for line in client.server.lines(PODS.path(client.namespace, pod, "log"), log)]
        return b"\n".join(lines)
    finally:
        with contextlib.suppress(MeshwrightError):
            await client.server.request("DELETE", PODS.path(client.namespace, pod), action)


async def _wait_until_done(client: AsyncClient, name: str) -> None:
    state = "Pending"
    try:
        async with asyncio.timeout(START_SECONDS):
            while True:
                pod = await client.server.get(PODS, name, client.namespace)
                state = pod_state(pod)
                phase = (pod.get("status") or {}).get("phase")
                if phase == "Succeeded":
                    return
                if phase == "Failed":
                    raise RejectedError(f"pod {name} failed: {state}", 0)
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise RejectedError(f"pod {name} did not finish within {START_SECONDS:g} s: it is {state}", 0) from None


def _pod(pod: str, job: Job, name: str) -> KubeObject:
    """The pod that prints the files of a record. It has the rights of the job's worker pods, and no GPU."""
    workers, checkpoint = job.spec.workers, job.spec.checkpoint
    assert checkpoint is not None
    root = f"{labels.CHECKPOINT_MOUNT}/{job.name}-{job.uid[:8]}"
    user, group = workers.run_as_user or 65532, workers.run_as_group or 65532
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LIFE_SECONDS,
        "automountServiceAccountToken": False,
        "nodeSelector": dict(workers.node_selector),
        "tolerations": [toleration.wire() for toleration in workers.tolerations],
        "imagePullSecrets": [secret.wire() for secret in workers.image_pull_secrets],
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": user, "runAsGroup": group, "fsGroup": group,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": checkpoint.claim_name}}],
        "containers": [{
            "name": labels.WORKER_CONTAINER, "image": workers.image, "command": ["python", "-c", _READ, name],
            "env": [{"name": labels.ENV_CHECKPOINT_DIR, "value": root}],
            "volumeMounts": [{"name": "checkpoints", "mountPath": labels.CHECKPOINT_MOUNT, "readOnly": True}],
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        }],
    }  # fmt: skip
    metadata = {"name": pod, "labels": {"app.kubernetes.io/name": "meshwright-read"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
