"""Ephemeral containers: what `kubectl debug` adds to a pod, and nobody changes afterwards."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.admission.metadata import problem
from meshwright_local.apiserver.status_errors import Cause, duplicate, invalid_value, not_allowed, required

_PATH = "spec.ephemeralContainers"
# Debugging must not depend on them, so these fields of other containers are not theirs.
_FORBIDDEN = (
    *("ports", "resources", "resizePolicy", "restartPolicy", "restartPolicyRules"),
    *("livenessProbe", "readinessProbe", "startupProbe", "lifecycle"),
)


def ephemeral_causes(spec: KubeObject, old: KubeObject) -> Iterator[Cause]:
    """Return the errors of an update of a pod's ephemeral containers."""
    others = [one["name"] for key in ("initContainers", "containers") for one in spec.get(key) or ()]
    volumes = [volume["name"] for volume in spec.get("volumes") or ()]
    names: list[str] = []
    for index, container in enumerate(spec.get("ephemeralContainers") or ()):
        path, name = f"{_PATH}[{index}]", container.get("name") or ""
        if not name:
            yield required(f"{path}.name")
        elif text := problem("label", name):
            yield invalid_value(f"{path}.name", name, text)
        if not container.get("image"):
            yield required(f"{path}.image")
        if name in (*others, *names):
            yield duplicate(f"{path}.name", name)
        names.append(name)
        target = container.get("targetContainerName")
        if target and target not in others:
            yield Cause(f"{path}.targetContainerName", "FieldValueNotFound", f'Not found: "{target}"')
        for key in _FORBIDDEN:
            if container.get(key):
                yield not_allowed(f"{path}.{key}", "cannot be set for an Ephemeral Container")
        yield from _mount_causes(container, volumes, path)
    yield from _change_causes(spec, old)


def _mount_causes(container: KubeObject, volumes: list[str], path: str) -> Iterator[Cause]:
    for index, mount in enumerate(container.get("volumeMounts") or ()):
        where = f"{path}.volumeMounts[{index}]"
        if mount["name"] not in volumes:
            yield Cause(f"{where}.name", "FieldValueNotFound", f'Not found: "{mount["name"]}"')
        for key in ("subPath", "subPathExpr"):
            if mount.get(key):
                yield not_allowed(f"{where}.{key}", "cannot be set for an Ephemeral Container")


def _change_causes(spec: KubeObject, old: KubeObject) -> Iterator[Cause]:
    now = {container.get("name"): container for container in spec.get("ephemeralContainers") or ()}
    for container in old.get("ephemeralContainers") or ():
        name = container["name"]
        if name not in now:
            yield not_allowed(_PATH, f'existing ephemeral containers "{name}" may not be removed\n')
        elif now[name] != container:
            yield not_allowed(_PATH, f'existing ephemeral containers "{name}" may not be changed\n')
