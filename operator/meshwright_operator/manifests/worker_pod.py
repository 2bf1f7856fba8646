"""The manifest of a worker pod. Without a profile it conforms to the restricted Pod Security Standard.

The environment variables of the container configure the agent.

The pod has a scheduling gate and is pinned to its node, unless another scheduler places it. Pinning is a required node
affinity on the field `metadata.name`, which works for every node, and not `spec.nodeName`. So kube-scheduler still
checks the node's resources and taints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.api import labels
from meshwright.api.objects import KubeObject, channel_template_name, pod_name, service_name
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import WorkerPlacement
from meshwright.api.workers import EnvVar, VolumeSpec, WorkersSpec
from meshwright.checkpoint_places import checkpoint_directory, checkpoint_uri, store_credentials
from meshwright.planner.cluster.pod_resources import worker_requests
from meshwright.profiles.profile import Profile
from meshwright.protocol.preflight import PodNeeds
from meshwright.rules.runtime import AGENT_VOLUME
from meshwright.rules.workers import CHANNEL_CLAIM
from meshwright_operator.manifests import pod_group
from meshwright_operator.manifests.owned_objects import TOKEN_KEY, job_labels, owner_reference
from meshwright_operator.manifests.profile_pod import add_profile

AGENT_SIZE = "512Mi"
"""Limit of the volume with an injected agent, which has about 100 MiB."""
RDMA_DEVICE = re.compile(r"^rdma/|/efa$|sriov|/hca|mellanox", re.IGNORECASE)
"""Extended resources that are devices of an RDMA network."""


@dataclass(frozen=True, slots=True)
class CoordinatorTrust:
    """How agents verify the coordinator's certificate."""

    bundle: str = ""
    """CA certificates in PEM format, which are public. Empty: the connection is not encrypted."""
    server_name: str = ""
    """The name in the certificate, if it is not the host in the coordinator's URL."""


@dataclass(frozen=True, slots=True)
class PodContext:
    """What the manifests of all pods of a job have in common."""

    name: str
    namespace: str
    uid: str
    spec: ParallelTrainingJobSpec
    revision: str
    coordinator_url: str
    secret: str
    """Name of the Secret with the job's token."""
    trust: CoordinatorTrust = CoordinatorTrust()
    network: str = ""
    """Kind of the network of the site, if it is stated."""
    agent_image: str = ""
    """Image of the agent for `runtime.agent: Injected`."""
    several_workers: bool = False
    """Whether the job has several workers, or may have."""
    members: int = 0
    """Number of pods of the gang."""
    queue_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels by which a queue knows the pods."""
    queue_annotations: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    """What each pod claims through Dynamic Resource Allocation, by resource."""
    network_policy: KubeObject | None = None
    """The NetworkPolicy that must exist before the pods."""
    profile: Profile | None = None
    """The administrator's profile. `spec` contains already what it adds to the job's own fields."""


def worker_pod(context: PodContext, placed: WorkerPlacement) -> KubeObject:
    """The pod of one worker incarnation, on the node of its placement."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(context.name, placed.worker, placed.incarnation),
            "namespace": context.namespace,
            "labels": {
                **context.spec.workers.labels,
                **pod_group.pod_labels(context.name, context.uid, context.spec),
                **context.queue_labels,
                **job_labels(context.name, context.uid),
                labels.LABEL_WORKER: str(placed.worker),
                labels.LABEL_INCARNATION: str(placed.incarnation),
                labels.LABEL_REVISION: context.revision,
            },
            "annotations": {
                **context.spec.workers.annotations,
                **pod_group.pod_annotations(context.name, context.uid, context.spec),
                **context.queue_annotations,
                **({labels.ANNOTATION_RANKS: placed.ranks} if placed.ranks else {}),
                **({labels.ANNOTATION_DEVICES: json.dumps(dict(context.devices))} if context.devices else {}),
                "prometheus.io/scrape": "true",
                "prometheus.io/port": str(labels.METRICS_PORT),
                "prometheus.io/path": "/metrics",
            },
            "ownerReferences": [owner_reference(context.name, context.uid)],
        },
        "spec": _pod_spec(context, placed),
    }


def _pod_spec(context: PodContext, placed: WorkerPlacement) -> KubeObject:
    workers = context.spec.workers
    spec: KubeObject = {
        "restartPolicy": "Never",
        "hostname": pod_name(context.name, placed.worker, placed.incarnation),
        "subdomain": service_name(context.name, context.uid),
        **_scheduling(workers.scheduler_name, placed.node),
        **pod_group.pod_fields(context.name, context.uid, context.spec),
        "nodeSelector": dict(workers.node_selector),
        "tolerations": [toleration.wire() for toleration in workers.tolerations],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": workers.termination_grace_period_seconds,
        "securityContext": _security_context(workers),
        "containers": [_container(context, placed)],
        "volumes": [volume for volume, _ in _volumes(context.spec)],
    }
    optional = {
        "serviceAccountName": workers.service_account_name,
        "priorityClassName": context.spec.priority_class_name,
        "initContainers": [_agent_container(context)] if context.spec.runtime.injects_agent else [],
        "resourceClaims": [claim for claim, _ in _claims(context)],
        "imagePullSecrets": [secret.wire() for secret in workers.image_pull_secrets],
    }
    spec |= {key: value for key, value in optional.items() if value}
    return spec if context.profile is None else add_profile(spec, context.profile, workers)


def _security_context(workers: WorkersSpec) -> KubeObject:
    group = workers.run_as_group or labels.USER_ID
    groups = {"supplementalGroups": list(workers.supplemental_groups)} if workers.supplemental_groups else {}
    return {
        "runAsNonRoot": True,
        "runAsUser": workers.run_as_user or labels.USER_ID,
        "runAsGroup": group,
        "fsGroup": group,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
        **groups,
    }


def _scheduling(scheduler: str | None, node: str) -> KubeObject:
    """The gate and the affinity to the chosen node, or the name of the scheduler that will choose one."""
    if scheduler is not None:
        return {"schedulerName": scheduler}
    return {"schedulingGates": [{"name": labels.GANG_GATE}], "affinity": {"nodeAffinity": _pinned_node_affinity(node)}}


def _pinned_node_affinity(node: str) -> KubeObject:
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [field]}]}}


def _container(context: PodContext, placed: WorkerPlacement) -> KubeObject:
    policy = context.spec.workers.image_pull_policy
    return {
        "name": labels.WORKER_CONTAINER,
        "image": context.spec.workers.image,
        **({"imagePullPolicy": policy.value} if policy is not None else {}),
        "command": _agent_command(context.spec),
        "env": _environment(context, placed),
        "ports": [{"name": "metrics", "containerPort": labels.METRICS_PORT, "protocol": "TCP"}],
        "resources": _resources(context),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [mount for _, mount in _volumes(context.spec)],
    }


def _agent_command(spec: ParallelTrainingJobSpec) -> list[str]:
    """The agent of the image, or the injected one, which ignores the image's variables for Python."""
    if spec.runtime.injects_agent:
        return [f"{labels.AGENT_MOUNT}/bin/python", "-I", "-u", "-m", "meshwright_worker"]
    return ["python", "-m", "meshwright_worker"]


def _agent_container(context: PodContext) -> KubeObject:
    """The init container that copies the agent to a volume. It requests no more than the worker's container does."""
    resources = _resources(context)
    kinds = ("cpu", "memory")
    target = "/meshwright/copy"
    return {
        "name": AGENT_VOLUME,
        "image": context.agent_image,
        "command": [
            *(f"{labels.AGENT_MOUNT}/bin/python", "-I", "-m", "meshwright_worker.bundle.install"),
            target,
        ],
        "resources": {
            part: {kind: value for kind, value in resources[part].items() if kind in kinds}
            for part in ("requests", "limits")
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": AGENT_VOLUME, "mountPath": target}],
    }


def _resources(context: PodContext) -> KubeObject:
    """Requests and limits: equal, except that CPU has no limit unless the pod is to have CPUs of its own."""
    workers = context.spec.workers
    limits = worker_requests(workers)
    if workers.gpu_resource in context.devices:
        limits.pop(workers.gpu_resource)  # a claim has the GPUs
    requests = dict(limits)
    if not workers.resources.exclusive_cpus:
        limits.pop("cpu", None)
    claims = [use for _, use in _claims(context)]
    return {"requests": requests, "limits": limits, **({"claims": claims} if claims else {})}


def _claims(context: PodContext) -> list[tuple[KubeObject, KubeObject]]:
    """The claims of the pod, each with its use by the container: those of the spec, and the channel of NVLink."""
    found: list[tuple[KubeObject, KubeObject]] = []
    for claim in context.spec.workers.resource_claims or ():
        source = (
            {"resourceClaimName": claim.resource_claim_name}
            if claim.resource_claim_name is not None
            else {"resourceClaimTemplateName": claim.resource_claim_template_name}
        )
        request = {"request": claim.request} if claim.request is not None else {}
        found.append(({"name": claim.name, **source}, {"name": claim.name, **request}))
    if context.spec.joins_hosts:
        template = channel_template_name(context.name, context.uid)
        found.append(({"name": CHANNEL_CLAIM, "resourceClaimTemplateName": template}, {"name": CHANNEL_CLAIM}))
    return found


def _environment(context: PodContext, placed: WorkerPlacement) -> list[KubeObject]:
    """The container's variables. The operator's come last, because the last value of a repeated name is used."""
    grace = context.spec.workers.termination_grace_period_seconds
    values = {
        labels.ENV_JOB_NAME: context.name,
        labels.ENV_JOB_NAMESPACE: context.namespace,
        labels.ENV_JOB_UID: context.uid,
        labels.ENV_WORKER_INDEX: str(placed.worker),
        labels.ENV_INCARNATION: str(placed.incarnation),
        labels.ENV_COORDINATOR_URL: context.coordinator_url,
        labels.ENV_METRICS_PORT: str(labels.METRICS_PORT),
        labels.ENV_GRACE_SECONDS: str(grace),
    }
    checkpoint = context.spec.checkpoint
    credentials = store_credentials(checkpoint)
    hidden = [variable.name for variable in context.spec.workers.env if _is_secret(variable)]
    if hidden := [*hidden, *(variable["name"] for variable in credentials)]:
        values[labels.ENV_SECRET_VARIABLES] = ",".join(hidden)
    if context.trust.bundle:
        values[labels.ENV_COORDINATOR_CA] = context.trust.bundle
    if context.trust.server_name:
        values[labels.ENV_COORDINATOR_NAME] = context.trust.server_name
    if checkpoint is not None and checkpoint.claim_name is not None:
        values[labels.ENV_CHECKPOINT_DIR] = checkpoint_directory(context.name, context.uid)
    if checkpoint is not None and checkpoint.uri is not None:
        values[labels.ENV_CHECKPOINT_URI] = checkpoint_uri(checkpoint.uri, context.name, context.uid)
    if context.spec.data is not None and context.spec.data.claim_name:
        values[labels.ENV_DATA_DIR] = labels.DATA_MOUNT
    if context.spec.runtime.scripts:
        values[labels.ENV_SCRIPTS_DIR] = labels.SCRIPTS_MOUNT
    if needs := pod_needs(context):
        values[labels.ENV_POD_NEEDS] = needs
    secret = {"name": context.secret, "key": TOKEN_KEY}
    return [
        *credentials,
        *(_variable(variable) for variable in context.spec.workers.env),
        *({"name": name, "value": value} for name, value in values.items()),
        {"name": labels.ENV_POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": labels.ENV_POD_UID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": labels.ENV_TOKEN, "valueFrom": {"secretKeyRef": secret}},
    ]


def pod_needs(context: PodContext) -> str:
    """What the agent checks in its pod and cannot see, as JSON. Empty if there is nothing."""
    resources = context.spec.workers.resources
    devices = resources.devices or {}
    efa = any(name.endswith("/efa") for name in devices)
    needs = PodNeeds(
        network=context.network or ("EFA" if efa else ""),
        rdma=any(RDMA_DEVICE.search(name) for name in devices),
        huge_pages=dict(resources.huge_pages or {}),
        several_workers=context.several_workers,
    )
    if not (needs.network or needs.rdma or needs.huge_pages):
        return ""
    return json.dumps(needs.model_dump(mode="json", by_alias=True, exclude_defaults=True), separators=(",", ":"))


def _is_secret(variable: EnvVar) -> bool:
    """Whether a variable's value comes from a Secret: agents mask it in what they record of failed ranks."""
    return variable.value_from is not None and variable.value_from.secret_key_ref is not None


def _variable(variable: EnvVar) -> KubeObject:
    source = variable.value_from
    if source is None:
        return {"name": variable.name, "value": variable.value}
    return {"name": variable.name, "valueFrom": source.wire()}


def _volumes(spec: ParallelTrainingJobSpec) -> list[tuple[KubeObject, KubeObject]]:
    """The operator's volumes and those of the spec, each with its mount."""
    return [*_operator_volumes(spec), *(_job_volume(volume) for volume in spec.workers.volumes)]


def _job_volume(volume: VolumeSpec) -> tuple[KubeObject, KubeObject]:
    if volume.claim_name is not None:
        source: KubeObject = {"persistentVolumeClaim": {"claimName": volume.claim_name, "readOnly": volume.read_only}}
    elif volume.config_map_name is not None:
        source = {"configMap": {"name": volume.config_map_name}}
    elif volume.secret_name is not None:
        source = {"secret": {"secretName": volume.secret_name}}
    else:
        source = {"emptyDir": {"sizeLimit": volume.scratch}}
    read_only = volume.read_only or volume.config_map_name is not None or volume.secret_name is not None
    mount = {"name": volume.name, "mountPath": volume.mount_path, "readOnly": read_only}
    return {"name": volume.name, **source}, mount


def _operator_volumes(spec: ParallelTrainingJobSpec) -> list[tuple[KubeObject, KubeObject]]:
    """The operator's volumes with their mounts. `/dev/shm` is a memory volume: the default of 64 MiB is too small."""
    size = spec.workers.resources.shared_memory
    memory = {"medium": "Memory", **({"sizeLimit": size} if size else {})}
    volumes: list[tuple[KubeObject, KubeObject]] = [
        ({"name": "shm", "emptyDir": memory}, {"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    ]
    if spec.checkpoint is not None and spec.checkpoint.claim_name is not None:
        claim = {"claimName": spec.checkpoint.claim_name}
        mount = {"name": "checkpoints", "mountPath": labels.CHECKPOINT_MOUNT}
        volumes.append(({"name": "checkpoints", "persistentVolumeClaim": claim}, mount))
    if spec.data is not None and spec.data.claim_name:
        claim = {"claimName": spec.data.claim_name}
        data_mount = {"name": "data", "mountPath": labels.DATA_MOUNT, "readOnly": True}
        volumes.append(({"name": "data", "persistentVolumeClaim": claim}, data_mount))
    if spec.runtime.scripts:
        scripts_mount = {"name": "scripts", "mountPath": labels.SCRIPTS_MOUNT, "readOnly": True}
        volumes.append(({"name": "scripts", "configMap": {"name": spec.runtime.scripts}}, scripts_mount))
    if spec.runtime.injects_agent:
        agent_mount = {"name": AGENT_VOLUME, "mountPath": labels.AGENT_MOUNT, "readOnly": True}
        volumes.append(({"name": AGENT_VOLUME, "emptyDir": {"sizeLimit": AGENT_SIZE}}, agent_mount))
    return volumes
