"""A job's spec with what its profile adds to the fields that planning and placement read. The job's values win."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.api.labels import METRICS_PORT
from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.pod_resources import Resources, pod_request
from meshwright.planner.plan import Plan
from meshwright.profiles.profile import Profile, ProfileContainer

CONFLICT = "ProfileConflict"
"""Reason of a job whose own fields contradict its profile."""


def conflict(spec: ParallelTrainingJobSpec, name: str, profile: Profile) -> str:
    """Why the job cannot use the profile. Empty if it can."""
    workers = spec.workers
    volumes = {volume.name for volume in profile.volumes}
    paths = {volume.mount_path for volume in profile.volumes if volume.mount_path}
    for index, volume in enumerate(workers.volumes):
        field = f"`spec.workers.volumes[{index}]"
        if volume.name in volumes:
            return f"{field}.name` is {volume.name}, which profile `{name}` uses too: rename it"
        if volume.mount_path in paths:
            return f"{field}.mountPath` is {volume.mount_path}, which profile `{name}` uses too: choose another path"
    for key, value in profile.node_selector.items():
        own = workers.node_selector.get(key, value)
        if own != value:
            return f"`spec.workers.nodeSelector` has {key}: {own}, and profile `{name}` {value}: remove one of them"
    if profile.huge_pages and workers.resources.cpu is None and workers.resources.memory is None:
        return (
            f"Profile `{name}` adds huge pages, which Kubernetes allows only with CPU or memory: set "
            "`spec.workers.resources.memory`"
        )
    return ""


def with_profile(spec: ParallelTrainingJobSpec, profile: Profile) -> ParallelTrainingJobSpec:
    """The spec with what the profile adds to its fields."""
    workers, asked = spec.workers, spec.workers.resources
    own = {variable.name for variable in workers.env}
    resources = asked.model_copy(
        update={
            "devices": {**profile.devices, **(asked.devices or {})} or None,
            "huge_pages": {**profile.huge_pages, **(asked.huge_pages or {})} or None,
        }
    )
    groups = [*(workers.supplemental_groups or ()), *profile.supplemental_groups]
    update = {
        "resources": resources,
        "labels": {**workers.labels, **profile.labels},
        "annotations": {**workers.annotations, **profile.annotations},
        "node_selector": {**workers.node_selector, **profile.node_selector},
        "tolerations": [*workers.tolerations, *(one for one in profile.tolerations if one not in workers.tolerations)],
        "env": [*(variable for variable in profile.env if variable.name not in own), *workers.env],
        "supplemental_groups": list(dict.fromkeys(groups)) or None,
    }
    return spec.model_copy(update={"workers": workers.model_copy(update=update)})


def extra_request(spec: ParallelTrainingJobSpec, request: Resources, profile: Profile) -> Resources:
    """What a pod requests with the profile's containers and network, beyond the `request` of the worker's container."""
    if not profile.containers and not profile.host_network:
        return Resources()
    resource = spec.workers.gpu_resource
    worker = {
        resource: request.gpus,
        "cpu": f"{request.cpu_milli}m",
        "memory": request.memory_bytes,
        **dict(request.others),
    }
    container = {"resources": {"requests": worker}, "ports": [{"containerPort": METRICS_PORT}]}
    pod = {
        "containers": [container],
        "initContainers": requesting_containers(profile),
        "hostNetwork": profile.host_network,
    }
    return pod_request({"spec": pod}, resource) - request


def with_extra_request(
    spec: ParallelTrainingJobSpec, profile: Profile | None, devices: Mapping[str, int], plan: Plan
) -> Plan:
    """The plan, whose workers also request what their claims and the containers of the profile do.

    Args:
        spec: the job's spec.
        profile: its profile, if it has one.
        devices: what the claims of a pod request, by resource.
        plan: the plan.
    """
    extra = extra_request(spec, plan.worker_request, profile) if profile is not None else Resources()
    extra += Resources(others=tuple((k, v) for k, v in devices.items() if k != spec.workers.gpu_resource))
    return replace(plan, worker_request=plan.worker_request + extra) if extra != Resources() else plan


def requesting_containers(profile: Profile) -> list[KubeObject]:
    """The init containers and sidecars of a profile's pods, with what they request. Kubernetes starts both in order."""
    sidecar = {"restartPolicy": "Always"}
    return [
        *({"name": one.name, "resources": container_resources(one)} for one in profile.init_containers),
        *({"name": one.name, "resources": container_resources(one), **sidecar} for one in profile.sidecars),
    ]


def container_resources(container: ProfileContainer) -> dict[str, dict[str, str]]:
    """The resources of a container of a profile: requests and limits are equal."""
    found = {name: value for name, value in (("cpu", container.cpu), ("memory", container.memory)) if value}
    return {"requests": dict(found), "limits": dict(found)} if found else {}
