"""Reads the template of a pod as `spec.workers`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from meshwright.api.labels import GPU_RESOURCE, KUEUE_PRIORITY, KUEUE_QUEUE
from meshwright.rules.workers import VARIABLE_NAMES, VARIABLE_PREFIXES, VOLUME_NAMES
from meshwright_cli.importing.fields import Fields, whole_number
from meshwright_cli.importing.settings import ImportFileError, without_none

NEURON_DEVICE, NEURON_CORE = "aws.amazon.com/neuron", "aws.amazon.com/neuroncore"
_GPU = re.compile(rf"[a-z0-9.-]+/(gpu|gpu\.shared|gaudi)|nvidia\.com/mig-[a-z0-9.-]+|{re.escape(NEURON_DEVICE)}(core)?")
_TPU = "google.com/tpu"
_OF_KUEUE = (KUEUE_QUEUE, KUEUE_PRIORITY)
"""Labels of the job. Kueue would hold a pod that has them until it admits the pod itself."""
_RESERVED_KEYS = ("app.kubernetes.io/", "meshwright.dev/", "prometheus.io/")
_SHM = "/dev/shm"  # noqa: S108 - a path in a pod


@dataclass(slots=True)
class Pods:
    """What a pod template stands for."""

    workers: dict[str, Any]
    """`spec.workers` without `gpusPerWorker`."""
    command: list[str]
    gpus: int
    """GPUs that a pod requests, or other accelerators."""
    priority_class: str | None
    notes: list[str] = field(default_factory=list)


def read_pods(template: Fields, container_names: tuple[str, ...]) -> Pods:
    """Read a pod template.

    Args:
        template: the fields `metadata` and `spec` of the template.
        container_names: names that the container of the ranks may have. Without one of these, it is the first.

    Raises:
        ImportFileError: there is no container, or a value has the wrong type.
    """
    spec, notes = template.child("spec"), []
    containers = spec.children("containers")
    if not containers:
        raise ImportFileError(f"`{spec.path}.containers` must have the container of the ranks")
    main = next((one for one in containers if one.get("name") in container_names), containers[0])
    for other in containers:
        if other is not main:
            notes.append(
                f"no equivalent: container `{other.get('name')}`: a profile of the administrator has `sidecars`"
            )
            other.ignore_all()
    workers, gpus = _workers(template, spec, main, notes)
    main.ignore("name", "ports", "tty", "stdin")
    spec.ignore("restartPolicy", "dnsPolicy", "enableServiceLinks", "automountServiceAccountToken", "hostname")
    notes += _of_profiles(spec)
    command = [*main.words("command"), *main.words("args")]
    if directory := main.get("workingDir"):
        notes.append(f"no equivalent: workingDir: begin the command with `sh -c 'cd {directory} && exec ...'`")
    return Pods(without_none(workers), command, gpus, spec.get("priorityClassName"), notes)


def _workers(template: Fields, spec: Fields, main: Fields, notes: list[str]) -> tuple[dict[str, Any], int]:
    """`spec.workers` without `gpusPerWorker`, and the number of GPUs of a pod."""
    resources, gpu_resource, gpus = _resources(main.child("resources"))
    if _TPU in resources["devices"]:
        notes.append(
            f"no equivalent: `{_TPU}`: a worker has a process for each accelerator, a TPU host one for all its chips"
        )
    volumes, shared_memory = _volumes(spec, main, notes)
    if shared_memory:
        resources["sharedMemory"] = shared_memory
    grace, scheduler = spec.integer("terminationGracePeriodSeconds"), spec.get("schedulerName")
    return {
        "image": main.get("image"),
        "imagePullPolicy": main.get("imagePullPolicy"),
        "imagePullSecrets": [{"name": one.get("name")} for one in spec.children("imagePullSecrets")] or None,
        "gpuResource": gpu_resource if gpu_resource != GPU_RESOURCE else None,
        "resources": resources,
        "env": list(_variables(main)) or None,
        "volumes": volumes or None,
        "labels": _keys(template, "labels", notes),
        "annotations": _keys(template, "annotations", notes),
        "schedulerName": scheduler if scheduler != "default-scheduler" else None,
        "nodeSelector": spec.mapping("nodeSelector"),
        "tolerations": spec.get("tolerations"),
        "serviceAccountName": spec.get("serviceAccountName"),
        "terminationGracePeriodSeconds": None if grace is None else max(1, grace),
        **_identity(spec, main, notes),
    }, gpus


def _keys(template: Fields, name: str, notes: list[str]) -> dict[str, str]:
    """Labels or annotations that a job's pods may have."""
    found = template.child("metadata").mapping(name)
    notes += [f"the pods' {key} is left out: Kueue reads that of the job" for key in _OF_KUEUE if key in found]
    return {
        key: str(value) for key, value in found.items() if not key.startswith(_RESERVED_KEYS) and key not in _OF_KUEUE
    }


def _resources(resources: Fields) -> tuple[dict[str, Any], str, int]:
    """`workers.resources`, and the resource and the number of GPUs."""
    limits, requests = resources.mapping("limits"), resources.mapping("requests")
    merged = {**requests, **limits}
    gpu_resource, gpus, devices, pages = GPU_RESOURCE, 0, {}, {}
    for name, value in merged.items():
        if _GPU.fullmatch(name):
            gpu_resource, gpus = name, whole_number(f"the number of `{name}`", value)
        elif name.startswith("hugepages-"):
            pages[name.removeprefix("hugepages-")] = str(value)
        elif "/" in name:
            devices[name] = whole_number(f"the number of `{name}`", value)
    found = {
        "cpu": _quantity(requests.get("cpu", limits.get("cpu"))),
        "memory": _quantity(limits.get("memory", requests.get("memory"))),
        "ephemeralStorage": _quantity(merged.get("ephemeral-storage")),
        "devices": devices,
        "hugePages": pages,
    }
    return found, gpu_resource, gpus


def _quantity(value: Any) -> str | None:
    return None if value is None else str(value)


def is_of_agent(variable: str) -> bool:
    """Whether the agent sets this variable for each rank, so that a job must not."""
    return variable in VARIABLE_NAMES or variable.startswith(VARIABLE_PREFIXES)


def _variables(container: Fields) -> Iterator[dict[str, Any]]:
    """`workers.env`. What is read from fields of the pod has no equivalent."""
    for variable in container.children("env"):
        name, source = variable.get("name"), variable.child("valueFrom")
        if is_of_agent(str(name)):
            variable.ignore_all()
            continue
        keys = {kind: source.child(kind) for kind in ("secretKeyRef", "configMapKeyRef") if kind in source}
        if keys:
            yield {
                "name": name,
                "valueFrom": {kind: {"name": key.get("name"), "key": key.get("key")} for kind, key in keys.items()},
            }
        elif "value" in variable:
            yield {"name": name, "value": str(variable.get("value"))}


def _volumes(spec: Fields, container: Fields, notes: list[str]) -> tuple[list[dict[str, Any]], str | None]:
    """`workers.volumes`, and the size of shared memory."""
    sources = {str(volume.get("name")): volume for volume in spec.children("volumes")}
    found: list[dict[str, Any]] = []
    shared_memory = None
    for mount in container.children("volumeMounts"):
        name, path = str(mount.get("name")), str(mount.get("mountPath")).rstrip("/") or "/"
        source = sources.get(name, Fields({}))
        if path == _SHM:
            shared_memory = _quantity(source.child("emptyDir").get("sizeLimit"))
            source.child("emptyDir").ignore("medium")
            source.ignore("hostPath")
            continue
        volume = _source(source)
        if volume is None:
            source.ignore("hostPath")
            kind = "hostPath: a profile of the administrator has `volumes`" if "hostPath" in source else "its source"
            notes.append(f"no equivalent: volume `{name}` at {path}: {kind}")
            continue
        if mount.get("readOnly") and "claimName" in volume:
            volume["readOnly"] = True
        found.append({"name": _free_name(name, found), "mountPath": path, **volume})
    return found, shared_memory


def _free_name(name: str, volumes: list[dict[str, Any]]) -> str:
    """The name of a volume, or another one if the operator's own volume has it, or one that is mounted already."""
    taken = {*VOLUME_NAMES, *(volume["name"] for volume in volumes)}
    tries = (name, *(f"{name}-{number}" for number in range(1, len(taken) + 2)))
    return next(one for one in tries if one not in taken)


def _source(volume: Fields) -> dict[str, Any] | None:
    """The source of a volume. None if a job has no such source."""
    if "persistentVolumeClaim" in volume:
        claim = volume.child("persistentVolumeClaim")
        return {"claimName": claim.get("claimName"), **({"readOnly": True} if claim.get("readOnly") else {})}
    if "configMap" in volume:
        return {"configMapName": volume.child("configMap").get("name")}
    if "secret" in volume:
        return {"secretName": volume.child("secret").get("secretName")}
    if "emptyDir" in volume:
        return {"scratch": str(volume.child("emptyDir").get("sizeLimit") or "100Gi")}
    return None


def _identity(spec: Fields, container: Fields, notes: list[str]) -> dict[str, Any]:
    """User and groups of the processes."""
    of_pod, of_container = spec.child("securityContext"), container.child("securityContext")
    user = of_container.integer("runAsUser")
    user = of_pod.integer("runAsUser") if user is None else user
    group = of_container.integer("runAsGroup")
    group = of_pod.integer("runAsGroup") if group is None else group
    groups = [int(one) for one in of_pod.get("supplementalGroups") or [] if int(one) > 0]
    for context in (of_pod, of_container):
        context.ignore(
            "runAsUser", "runAsGroup", "runAsNonRoot", "seccompProfile", "allowPrivilegeEscalation", "fsGroup"
        )
    capabilities = of_container.mapping("capabilities")
    needs = [*(f"capability {one}" for one in capabilities.get("add") or [])]
    if of_container.get("privileged"):
        needs.append("privileged")
    if needs:
        notes.append(f"no equivalent: {', '.join(needs)}: a profile of the administrator grants them")
    if user in (None, 0):
        notes.append(
            "the processes run as user 65532, not as the image's user or root: the files that they write must allow "
            "it, or set `workers.runAsUser`"
        )
    return {"runAsUser": user or None, "runAsGroup": group or None, "supplementalGroups": groups or None}


def _of_profiles(spec: Fields) -> Iterator[str]:
    """What only a profile of the administrator gives a pod."""
    for name in ("hostNetwork", "hostIPC", "runtimeClassName"):
        if spec.get(name):
            yield f"no equivalent: {name}: a profile of the administrator has it"
    for container in spec.children("initContainers"):
        name = container.get("name")
        yield f"no equivalent: init container `{name}`: a profile of the administrator has `initContainers`"
        container.ignore_all()
    if "affinity" in spec:
        spec.ignore("affinity")
        yield (
            "no equivalent: affinity: Meshwright places ranks by what they communicate; `workers.nodeSelector` and "
            "`topology` restrict it"
        )
