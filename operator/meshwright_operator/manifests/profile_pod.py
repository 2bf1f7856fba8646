"""What a profile adds to the manifest of a worker pod, beyond the fields of the job's spec.

Init containers and sidecars are as restricted as the worker's container, except for what the profile says. Sidecars are
init containers that keep running (`restartPolicy: Always`), so that they start before the worker's container.
"""

from __future__ import annotations

from meshwright.api.labels import USER_ID
from meshwright.api.objects import KubeObject
from meshwright.api.workers import WorkersSpec
from meshwright.profiles.merged import container_resources
from meshwright.profiles.profile import Profile, ProfileContainer, ProfileVolume

UNRESTRICTED = frozenset({"SYS_ADMIN", "CAP_SYS_ADMIN"})
"""Capabilities with which Kubernetes does not accept `allowPrivilegeEscalation: false`."""


def add_profile(pod_spec: KubeObject, profile: Profile, workers: WorkersSpec) -> KubeObject:
    """The spec of a worker pod with what the profile adds. The worker's container is the first and only one."""
    (worker,) = pod_spec["containers"]
    mounts = [
        {"name": volume.name, "mountPath": volume.mount_path, "readOnly": volume.read_only}
        for volume in profile.volumes
        if volume.mount_path is not None
    ]
    root = profile.run_as_root and workers.run_as_user is None
    worker = {
        **worker,
        "securityContext": _container_security(profile.privileged, profile.capabilities),
        "volumeMounts": [*worker["volumeMounts"], *mounts],
    }
    extended = {
        **pod_spec,
        "securityContext": {**pod_spec["securityContext"], **(_root(workers) if root else {})},
        "containers": [worker],
        "volumes": [*pod_spec["volumes"], *(_volume(volume) for volume in profile.volumes)],
    }
    optional: KubeObject = {
        "initContainers": [
            *pod_spec.get("initContainers", ()),
            *(_container(one, root_pod=root) for one in profile.init_containers),
            *({**_container(one, root_pod=root), "restartPolicy": "Always"} for one in profile.sidecars),
        ],
        "runtimeClassName": profile.runtime_class_name,
        "hostIPC": profile.host_ipc,
        "hostNetwork": profile.host_network,
        # Otherwise a pod in the node's network resolves names as the node does, without those of the job's pods.
        "dnsPolicy": "ClusterFirstWithHostNet" if profile.host_network else None,
    }
    return extended | {key: value for key, value in optional.items() if value}


def _root(workers: WorkersSpec) -> KubeObject:
    group = {} if workers.run_as_group is not None else {"runAsGroup": 0}
    return {"runAsNonRoot": False, "runAsUser": 0, **group}


def _container_security(privileged: bool, capabilities: list[str]) -> KubeObject:
    escalates = privileged or not UNRESTRICTED.isdisjoint(capabilities)
    return {
        "allowPrivilegeEscalation": escalates,
        "capabilities": {"drop": ["ALL"], **({"add": list(capabilities)} if capabilities else {})},
        **({"privileged": True} if privileged else {}),
    }


def _volume(volume: ProfileVolume) -> KubeObject:
    if volume.host_path is None:
        return {"name": volume.name, "emptyDir": {"sizeLimit": volume.scratch}}
    kind = {"type": volume.host_path_type} if volume.host_path_type else {}
    return {"name": volume.name, "hostPath": {"path": volume.host_path, **kind}}


def _container(container: ProfileContainer, *, root_pod: bool) -> KubeObject:
    security = _container_security(container.privileged, container.capabilities)
    if container.run_as_root:
        # Images of platforms expect what the container runtime leaves to root by default.
        security["capabilities"].pop("drop")
        security = {key: value for key, value in security.items() if value or key == "allowPrivilegeEscalation"}
    if container.run_as_root and not root_pod:
        security |= {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}
    elif root_pod and not container.run_as_root:
        security |= {"runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID}
    policy = container.image_pull_policy
    found: KubeObject = {
        "name": container.name,
        "image": container.image,
        "securityContext": security,
    }
    optional: KubeObject = {
        "imagePullPolicy": policy.value if policy is not None else None,
        "command": list(container.command),
        "args": list(container.args),
        "env": [{"name": variable.name, "value": variable.value} for variable in container.env],
        "resources": container_resources(container),
        "volumeMounts": [
            {"name": mount.volume, "mountPath": mount.mount_path, "readOnly": mount.read_only}
            for mount in container.mounts
        ],
    }
    return found | {key: value for key, value in optional.items() if value}
