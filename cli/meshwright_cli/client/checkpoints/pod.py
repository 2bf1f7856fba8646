"""The pod that runs a program of the worker image beside a job's checkpoints. Pure.

It has the volumes of the job's worker pods at the same paths, so the paths in a checkpoint (base model, tokenizer) are
valid there. It meets the restricted Pod Security Standard, has no service-account token, and ends by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.workers import EnvVar, VolumeSpec
from meshwright.checkpoint_places import store_credentials, store_settings
from meshwright_cli.client.objects import Job

LIFE_SECONDS = 6 * 3600
"""The pod is stopped after this time, if this program could not delete it."""
GRACE_SECONDS = 1
CONTAINER = "main"
OUTPUT_MOUNT = "/meshwright/output"
"""A directory of the pod, for what is copied out of it."""
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Tool:
    """What to run in the pod."""

    verb: str
    """The command of this program, which names the pod."""
    command: Sequence[str]
    gpus: int = 0
    memory: str | None = None
    """Request and limit of memory. None: neither is set."""
    cpu: str = "1"
    """Request of CPUs."""
    only_checkpoints: bool = False
    """Whether the pod has only the checkpoint claim, and neither the job's other volumes nor its variables."""
    writes_claim: bool = False
    """Whether the program writes to the checkpoint claim. Otherwise every claim is mounted read-only."""
    has_output: bool = False
    """Whether the pod has a directory for output, `OUTPUT_MOUNT`."""


def tool_pod(job: Job, tool: Tool, suffix: str) -> KubeObject:
    """The manifest of the pod. It belongs to the job, so it is deleted with it at the latest."""
    spec = job.spec
    name = f"{job.name[: 63 - len(tool.verb) - len(suffix) - 2].rstrip('-.')}-{tool.verb}-{suffix}"
    owner = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "name": job.name, "uid": job.uid}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            # Not the labels of a worker pod: the operator would count this one as a worker.
            "labels": {
                "app.kubernetes.io/name": f"meshwright-{tool.verb}",
                "app.kubernetes.io/managed-by": labels.CLI_FIELD_MANAGER,
            },
            "ownerReferences": [owner],
        },
        "spec": _pod_spec(spec, tool),
    }


def memory_quantity(size: float | None) -> str | None:
    """Bytes as a Kubernetes quantity, rounded up to mebibytes."""
    return None if size is None else f"{-(-int(size) // _MEBIBYTE)}Mi"


def _pod_spec(spec: ParallelTrainingJobSpec, tool: Tool) -> KubeObject:
    workers = spec.workers
    group = workers.run_as_group or labels.USER_ID
    groups = {"supplementalGroups": list(workers.supplemental_groups)} if workers.supplemental_groups else {}
    volumes = _volumes(spec, tool)
    made: KubeObject = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LIFE_SECONDS,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "nodeSelector": dict(workers.node_selector),
        "tolerations": [toleration.wire() for toleration in workers.tolerations],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": workers.run_as_user or labels.USER_ID,
            "runAsGroup": group,
            "fsGroup": group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
            **groups,
        },
        "containers": [_container(spec, tool, [mount for _, mount in volumes])],
        "volumes": [volume for volume, _ in volumes],
    }
    optional = {
        "serviceAccountName": workers.service_account_name,
        "imagePullSecrets": [secret.wire() for secret in workers.image_pull_secrets],
    }
    return made | {key: value for key, value in optional.items() if value}


def _container(spec: ParallelTrainingJobSpec, tool: Tool, mounts: list[KubeObject]) -> KubeObject:
    workers, checkpoint = spec.workers, spec.checkpoint
    variables = [*store_credentials(checkpoint), *store_settings(checkpoint), *map(_variable, workers.env)]
    limits = {**({"memory": tool.memory} if tool.memory else {})}
    limits |= {workers.gpu_resource: str(tool.gpus)} if tool.gpus else {}
    policy = workers.image_pull_policy
    return {
        "name": CONTAINER,
        "image": workers.image,
        **({"imagePullPolicy": policy.value} if policy is not None else {}),
        "command": list(tool.command),
        "env": [] if tool.only_checkpoints else variables,
        "resources": {"requests": {"cpu": tool.cpu, **limits}, "limits": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }


def _variable(variable: EnvVar) -> KubeObject:
    source = variable.value_from
    if source is None:
        return {"name": variable.name, "value": variable.value}
    return {"name": variable.name, "valueFrom": source.wire()}


def _volumes(spec: ParallelTrainingJobSpec, tool: Tool) -> list[tuple[KubeObject, KubeObject]]:
    """The job's volumes where its worker pods have them, each with its mount, and one for output."""
    found = (
        [_claim("checkpoints", spec.checkpoint.claim_name, labels.CHECKPOINT_MOUNT)]
        if spec.checkpoint and spec.checkpoint.claim_name
        else []
    )
    if found and tool.writes_claim:
        found[0][1]["readOnly"] = False
    if tool.only_checkpoints:
        return found
    if spec.data is not None and spec.data.claim_name:
        found.append(_claim("data", spec.data.claim_name, labels.DATA_MOUNT))
    found += [_job_volume(volume) for volume in spec.workers.volumes]
    if tool.gpus > 1:
        shm: KubeObject = {"name": "shm", "emptyDir": {"medium": "Memory"}}
        found.append((shm, {"name": "shm", "mountPath": "/dev/shm"}))  # noqa: S108 - NCCL's, of this pod only
    if tool.has_output:
        found.append(({"name": "output", "emptyDir": {}}, {"name": "output", "mountPath": OUTPUT_MOUNT}))
    return found


def _claim(name: str, claim: str, path: str) -> tuple[KubeObject, KubeObject]:
    """A claim, mounted read-only. The volume itself is not: drivers reject one node with both kinds of a volume."""
    mount = {"name": name, "mountPath": path, "readOnly": True}
    return {"name": name, "persistentVolumeClaim": {"claimName": claim}}, mount


def _job_volume(volume: VolumeSpec) -> tuple[KubeObject, KubeObject]:
    if volume.claim_name is not None:
        return _claim(volume.name, volume.claim_name, volume.mount_path)
    if volume.config_map_name is not None:
        source: KubeObject = {"configMap": {"name": volume.config_map_name}}
    elif volume.secret_name is not None:
        source = {"secret": {"secretName": volume.secret_name}}
    else:
        return {"name": volume.name, "emptyDir": {}}, {"name": volume.name, "mountPath": volume.mount_path}
    return {"name": volume.name, **source}, {"name": volume.name, "mountPath": volume.mount_path, "readOnly": True}
