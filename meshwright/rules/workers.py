"""Rules on the worker pods, and on their restarts and exit."""

from __future__ import annotations

import re
from collections.abc import Iterable

from meshwright.api.spec import ParallelTrainingJobSpec as Spec
from meshwright.api.spec import SuccessPolicy
from meshwright.api.workers import EnvVar, PodGroupKind, Toleration, VolumeSpec
from meshwright.rules.rule import Rule

# Reserved for the operator and the agent.
LABEL_PREFIXES = ("meshwright.dev/", "app.kubernetes.io/")
ANNOTATION_PREFIXES = ("meshwright.dev/", "prometheus.io/")
# Annotations by which a pod leaves the restricted Pod Security Standard, on the Kubernetes versions that read them.
ISOLATION_PREFIXES = (
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
)
VOLUME_NAMES = ("shm", "checkpoints", "data", "scripts")
VOLUME_PATHS = ("/meshwright", "/dev")
VARIABLE_PREFIXES = ("MESHWRIGHT_", "TORCHELASTIC_")
VARIABLE_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
)

CHANNEL_CLAIM = "nvlink"
"""Name of the claim of the operator's NVLink channel in pods."""
EXTENDED_RESOURCE = "^[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
PAGE_SIZE = "^[1-9][0-9]{0,5}(Ki|Mi|Gi)$"
WHOLE_NUMBER = "^[1-9][0-9]{0,5}$"

MAX_COUNTED_IN_WINDOW = 100
"""Largest `recovery.maxRestarts` with a window: status contains the times of these restarts."""


def _starts_with(value: str, prefixes: Iterable[str]) -> str:
    """In CEL, that a string starts with one of the prefixes."""
    return " || ".join(f"{value}.startsWith({prefix!r})" for prefix in prefixes)


def _one_of(value: str, names: Iterable[str]) -> str:
    """In CEL, that a string is one of the names."""
    return f"{value} in [{', '.join(repr(name) for name in names)}]"


def _below_reserved_path() -> str:
    """In CEL, that the volume `v` is mounted at or below a reserved path."""
    path = "v.mountPath"
    return " || ".join(f"{path} == {reserved!r} || {_starts_with(path, [f'{reserved}/'])}" for reserved in VOLUME_PATHS)


def _well_formed(toleration: Toleration) -> bool:
    if toleration.operator == "Exists":
        return toleration.value is None
    return toleration.key is not None


def _seconds_for_no_execute(toleration: Toleration) -> bool:
    return toleration.toleration_seconds is None or toleration.effect == "NoExecute"


def _one_variable_source(variable: EnvVar) -> bool:
    source = variable.value_from
    if source is None:
        return True
    return not variable.value and (source.secret_key_ref is None) != (source.config_map_key_ref is None)


def _one_volume_source(volume: VolumeSpec) -> bool:
    sources = (volume.claim_name, volume.config_map_name, volume.secret_name, volume.scratch)
    return sum(source is not None for source in sources) == 1


def _free_path(volume: VolumeSpec) -> bool:
    return not any(
        volume.mount_path == reserved or volume.mount_path.startswith(f"{reserved}/") for reserved in VOLUME_PATHS
    )


def _plain_path(volume: VolumeSpec) -> bool:
    return not {"", ".", ".."} & set(volume.mount_path.split("/")[1:])


def _few_in_window(spec: Spec) -> bool:
    return spec.recovery.restart_window_seconds is None or spec.recovery.max_restarts <= MAX_COUNTED_IN_WINDOW


def _first_worker_of_command(spec: Spec) -> bool:
    return spec.success_policy is SuccessPolicy.ALL_WORKERS or spec.runtime.command is not None


def _extended(name: str) -> bool:
    """Whether this names an extended resource, by the rules of Kubernetes."""
    return re.fullmatch(EXTENDED_RESOURCE, name) is not None and not _is_native(name)


def _is_native(name: str) -> bool:
    return name.startswith("requests.") or "kubernetes.io/" in name


def _can_be_pinned(spec: Spec) -> bool:
    resources = spec.workers.resources
    whole = resources.cpu is not None and re.fullmatch(WHOLE_NUMBER, resources.cpu) is not None
    return not resources.exclusive_cpus or (whole and resources.memory is not None)


def _has_the_queue_of_its_kind(spec: Spec) -> bool:
    group = spec.workers.pod_group
    if group is None or group.kind is PodGroupKind.VOLCANO:
        return True
    return (group.queue is not None) == (group.kind is PodGroupKind.KAI)


WORKERS_RULES: tuple[Rule[Spec], ...] = (
    Rule(
        "workers.resources.devices",
        "must name extended resources, such as `rdma/ib`, that are not Kubernetes' own: `cpu`, `memory` and huge pages "
        "have fields of their own",
        "!has(self.workers.resources.devices) || self.workers.resources.devices.all(d,"
        f" d.matches('{EXTENDED_RESOURCE}') && !d.startsWith('requests.') && !d.contains('kubernetes.io/'))",
        lambda spec: all(_extended(name) for name in spec.workers.resources.devices or ()),
    ),
    Rule(
        "workers.resources.devices",
        "must not contain `workers.gpuResource`: `workers.gpusPerWorker` is the number of GPUs",
        "!has(self.workers.resources.devices) || !(self.workers.gpuResource in self.workers.resources.devices)",
        lambda spec: spec.workers.gpu_resource not in (spec.workers.resources.devices or ()),
    ),
    Rule(
        "workers.resources.hugePages",
        "must have page sizes such as `2Mi` or `1Gi` as keys",
        "!has(self.workers.resources.hugePages)"
        f" || self.workers.resources.hugePages.all(size, size.matches('{PAGE_SIZE}'))",
        lambda spec: all(re.fullmatch(PAGE_SIZE, size) for size in spec.workers.resources.huge_pages or ()),
    ),
    Rule(
        "workers.resources.hugePages",
        "needs `cpu` or `memory` in `workers.resources`, because Kubernetes rejects pods that request only huge pages: "
        "set one",
        "!has(self.workers.resources.hugePages) || has(self.workers.resources.cpu)"
        " || has(self.workers.resources.memory)",
        lambda spec: (
            spec.workers.resources.huge_pages is None
            or spec.workers.resources.cpu is not None
            or spec.workers.resources.memory is not None
        ),
    ),
    Rule(
        "workers.resources.exclusiveCpus",
        "needs `workers.resources.cpu`, a whole number such as `16`, and `workers.resources.memory`: set both",
        f"!has(self.workers.resources.exclusiveCpus) || !self.workers.resources.exclusiveCpus"
        " || (has(self.workers.resources.cpu)"
        f" && self.workers.resources.cpu.matches('{WHOLE_NUMBER}') && has(self.workers.resources.memory))",
        _can_be_pinned,
    ),
    Rule(
        "workers.resourceClaims",
        "must each have exactly one of `resourceClaimTemplateName` and `resourceClaimName`",
        "!has(self.workers.resourceClaims) || self.workers.resourceClaims.all(c,"
        " has(c.resourceClaimTemplateName) != has(c.resourceClaimName))",
        lambda spec: all(
            (claim.resource_claim_template_name is None) != (claim.resource_claim_name is None)
            for claim in spec.workers.resource_claims or ()
        ),
    ),
    Rule(
        "workers.resourceClaims",
        f"must not be named `{CHANNEL_CLAIM}`, which is reserved for `topology.multiNodeNVLink`: rename it",
        f"!has(self.workers.resourceClaims) || !self.workers.resourceClaims.exists(c, c.name == '{CHANNEL_CLAIM}')",
        lambda spec: not any(claim.name == CHANNEL_CLAIM for claim in spec.workers.resource_claims or ()),
    ),
    Rule(
        "workers.labels",
        f"must not have keys that start with {' or '.join(LABEL_PREFIXES)}, which are reserved for the operator: "
        "rename them",
        f"!self.workers.labels.exists(k, {_starts_with('k', LABEL_PREFIXES)})",
        lambda spec: not any(key.startswith(LABEL_PREFIXES) for key in spec.workers.labels),
    ),
    Rule(
        "workers.annotations",
        f"must not have keys that start with {' or '.join(ANNOTATION_PREFIXES)}, which are reserved for the "
        "operator: rename them",
        f"!self.workers.annotations.exists(k, {_starts_with('k', ANNOTATION_PREFIXES)})",
        lambda spec: not any(key.startswith(ANNOTATION_PREFIXES) for key in spec.workers.annotations),
    ),
    Rule(
        "workers.annotations",
        f"must not have keys that start with {' or '.join(ISOLATION_PREFIXES)}, which weaken the isolation of pods: "
        "remove them",
        f"!self.workers.annotations.exists(k, {_starts_with('k', ISOLATION_PREFIXES)})",
        lambda spec: not any(key.startswith(ISOLATION_PREFIXES) for key in spec.workers.annotations),
    ),
    Rule(
        "recovery.spareNodes",
        "must be 0 with `workers.schedulerName`, because the operator cannot reserve nodes from another scheduler",
        "!has(self.workers.schedulerName) || self.recovery.spareNodes == 0",
        lambda spec: spec.workers.scheduler_name is None or spec.recovery.spare_nodes == 0,
    ),
    Rule(
        "recovery.copyEverySteps",
        "has no effect without `recovery.inMemory: true`: set it, or remove this one",
        "!has(self.recovery.copyEverySteps) || has(self.recovery.inMemory) && self.recovery.inMemory",
        lambda spec: spec.recovery.copy_every_steps is None or bool(spec.recovery.in_memory),
    ),
    Rule(
        "recovery.suspectNodes",
        "is not supported with `workers.schedulerName`, because another scheduler chooses the nodes: remove one of the "
        "two",
        "!has(self.workers.schedulerName) || !has(self.recovery.suspectNodes)",
        lambda spec: spec.workers.scheduler_name is None or spec.recovery.suspect_nodes is None,
    ),
    Rule(
        "workers.podGroup",
        "needs `workers.schedulerName`, the name of the scheduler that reads it, such as `volcano`: set it",
        "!has(self.workers.podGroup) || has(self.workers.schedulerName)",
        lambda spec: spec.workers.pod_group is None or spec.workers.scheduler_name is not None,
    ),
    Rule(
        "workers.podGroup",
        "needs `queue` with kind `KAI`, and has none with `Coscheduling` and `Kubernetes`, which know no queues",
        "!has(self.workers.podGroup) || self.workers.podGroup.kind == 'Volcano'"
        " || has(self.workers.podGroup.queue) == (self.workers.podGroup.kind == 'KAI')",
        _has_the_queue_of_its_kind,
    ),
    Rule(
        "topology",
        "is not supported with `workers.schedulerName`, because another scheduler places the pods: remove one of them",
        "!has(self.topology) || !has(self.workers.schedulerName)",
        lambda spec: spec.topology is None or spec.workers.scheduler_name is None,
    ),
    Rule(
        "workers.env",
        f"must not set names that start with {' or '.join(VARIABLE_PREFIXES)}, which are reserved: rename them",
        f"!self.workers.env.exists(e, {_starts_with('e.name', VARIABLE_PREFIXES)})",
        lambda spec: not any(e.name.startswith(VARIABLE_PREFIXES) for e in spec.workers.env),
    ),
    Rule(
        "workers.env",
        f"must not set {', '.join(VARIABLE_NAMES)}, because the agent sets them for each rank: remove them",
        f"!self.workers.env.exists(e, {_one_of('e.name', VARIABLE_NAMES)})",
        lambda spec: not any(e.name in VARIABLE_NAMES for e in spec.workers.env),
    ),
    Rule(
        "workers.env",
        "must not have both `value` and `valueFrom`, and `valueFrom` must have exactly one of `secretKeyRef` and "
        "`configMapKeyRef`",
        "self.workers.env.all(e, !has(e.valueFrom)"
        " || (e.value == '' && has(e.valueFrom.secretKeyRef) != has(e.valueFrom.configMapKeyRef)))",
        lambda spec: all(_one_variable_source(e) for e in spec.workers.env),
    ),
    Rule(
        "workers.tolerations",
        "must have a `key` with `operator: Equal`, and no `value` with `operator: Exists`",
        "self.workers.tolerations.all(t, t.operator == 'Exists' ? !has(t.value) : has(t.key))",
        lambda spec: all(_well_formed(t) for t in spec.workers.tolerations),
    ),
    Rule(
        "workers.tolerations",
        "must have `effect: NoExecute` if `tolerationSeconds` is set",
        "self.workers.tolerations.all(t, !has(t.tolerationSeconds) || (has(t.effect) && t.effect == 'NoExecute'))",
        lambda spec: all(_seconds_for_no_execute(t) for t in spec.workers.tolerations),
    ),
    Rule(
        "workers.volumes",
        "must each have exactly one of `claimName`, `configMapName`, `secretName` and `scratch`",
        "self.workers.volumes.all(v, [has(v.claimName), has(v.configMapName), has(v.secretName), has(v.scratch)]"
        ".filter(given, given).size() == 1)",
        lambda spec: all(_one_volume_source(v) for v in spec.workers.volumes),
    ),
    Rule(
        "workers.volumes",
        f"must not be named {', '.join(VOLUME_NAMES)}, which are reserved for the operator: rename them",
        f"!self.workers.volumes.exists(v, {_one_of('v.name', VOLUME_NAMES)})",
        lambda spec: not any(v.name in VOLUME_NAMES for v in spec.workers.volumes),
    ),
    Rule(
        "workers.volumes",
        f"must not be mounted at or below {' or '.join(VOLUME_PATHS)}, which are reserved: choose another `mountPath`",
        f"!self.workers.volumes.exists(v, {_below_reserved_path()})",
        lambda spec: all(_free_path(v) for v in spec.workers.volumes),
    ),
    Rule(
        "workers.volumes",
        "must not have `//`, `.` or `..` in `mountPath`: write the path without them",
        "!self.workers.volumes.exists(v, v.mountPath.matches('/[.]{0,2}(/|$)'))",
        lambda spec: all(_plain_path(v) for v in spec.workers.volumes),
    ),
    Rule(
        "workers.volumes",
        "must each have a different `mountPath`",
        "self.workers.volumes.all(v, self.workers.volumes.exists_one(other, other.mountPath == v.mountPath))",
        lambda spec: len({v.mount_path for v in spec.workers.volumes}) == len(spec.workers.volumes),
    ),
    Rule(
        "recovery.maxRestarts",
        f"must be at most {MAX_COUNTED_IN_WINDOW} with `recovery.restartWindowSeconds`: lower it, or remove the window",
        f"!has(self.recovery.restartWindowSeconds) || self.recovery.maxRestarts <= {MAX_COUNTED_IN_WINDOW}",
        _few_in_window,
    ),
    Rule(
        "successPolicy",
        "`successPolicy: FirstWorker` needs `runtime.command`, because Meshwright's runtime exits on all workers "
        "together: use `AllWorkers`",
        "self.successPolicy == 'AllWorkers' || has(self.runtime.command)",
        _first_worker_of_command,
    ),
)
