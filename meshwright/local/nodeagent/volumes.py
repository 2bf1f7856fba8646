"""A pod's volumes as directories of this machine.

Supported: emptyDir, hostPath, configMap, secret, downwardAPI, projected (of those three), and persistentVolumeClaim
bound to a volume that is a directory. Contents of config maps and secrets are those of the pod's start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from meshwright.local.nodeagent.environment import expand
from meshwright.local.nodeagent.fields import PodPlace, field, resource_field
from meshwright.local.nodeagent.references import MissingReferenceError, References
from meshwright.local.resources import CLAIMS, VOLUMES, Object

Files = dict[str, tuple[bytes, int]]
"""Relative path → content and mode."""

_CONFIG_MODE = 0o644


class VolumeError(Exception):
    """A volume that cannot be had here; the message names it."""


@dataclass(frozen=True, slots=True)
class VolumeContext:
    """What volumes are made from."""

    pod: Object
    place: PodPlace
    references: References
    directory: Path


async def prepare(context: VolumeContext) -> dict[str, Path]:
    """Make every volume of a pod; returns volume name → directory.

    Raises:
        MissingReferenceError: Something a volume needs does not exist yet.
        VolumeError: A kind of volume that is not supported, or a path that is not of the stated type.
    """
    result: dict[str, Path] = {}
    for volume in context.pod["spec"].get("volumes") or ():
        result[volume["name"]] = await _prepare_one(volume, context)
    return result


def mounts(container: Object, volumes: Mapping[str, Path], env: Mapping[str, str]) -> dict[str, Path]:
    """A container's mounts: mount path → directory or file, `subPath` and `subPathExpr` applied.

    Raises:
        VolumeError: A sub-path that leaves its volume, or a volume that the pod has not.
    """
    result: dict[str, Path] = {}
    for mount in container.get("volumeMounts") or ():
        if mount["name"] not in volumes:
            raise VolumeError(f"volumeMounts: no volume is named {mount['name']!r}")
        real = volumes[mount["name"]]
        below = mount.get("subPath") or expand(mount.get("subPathExpr") or "", env)
        if below:
            _check_relative(below)
            real = real / below
            if not real.exists():
                real.mkdir(parents=True)
        result[mount["mountPath"]] = real
    return result


async def _prepare_one(volume: Object, context: VolumeContext) -> Path:
    if "hostPath" in volume:
        return _host_path(volume["hostPath"])
    if "persistentVolumeClaim" in volume:
        return await _claim(volume["persistentVolumeClaim"]["claimName"], context.references)
    path = context.directory / str(volume["name"])
    path.mkdir(parents=True, exist_ok=True)
    if "emptyDir" not in volume:
        files = await _files(volume, context)
        await asyncio.to_thread(_write, path, files)
    return path


async def _files(source: Object, context: VolumeContext) -> Files:
    if spec := source.get("projected"):
        result: Files = {}
        for part in spec.get("sources") or ():
            result.update(await _files(part, context))
        return result
    if spec := source.get("configMap"):
        entries = await context.references.config_map(spec["name"], optional=bool(spec.get("optional")))
        return _selected(spec, entries or {})
    if spec := source.get("secret"):
        name = spec.get("secretName") or spec["name"]
        entries = await context.references.secret(name, optional=bool(spec.get("optional")))
        return _selected(spec, entries or {})
    if spec := source.get("downwardAPI"):
        return {item["path"]: (_downward(item, context), _mode(item, spec)) for item in spec.get("items") or ()}
    kinds = ", ".join(sorted(key for key in source if key != "name")) or "none"
    raise VolumeError(f"volumes[{source.get('name', '')}]: {kinds} is not supported on an embedded node")


def _selected(spec: Object, entries: Mapping[str, bytes]) -> Files:
    items = spec.get("items")
    if not items:
        return {key: (value, _mode({}, spec)) for key, value in entries.items()}
    result: Files = {}
    for item in items:
        if item["key"] in entries:
            result[item["path"]] = (entries[item["key"]], _mode(item, spec))
        elif not spec.get("optional"):
            raise MissingReferenceError(f"references non-existent key: {item['key']}")
    return result


def _mode(item: Object, spec: Object) -> int:
    return int(item.get("mode") or spec.get("defaultMode") or _CONFIG_MODE)


def _downward(item: Object, context: VolumeContext) -> bytes:
    if reference := item.get("fieldRef"):
        return field(context.pod, reference["fieldPath"], context.place).encode()
    return resource_field(context.pod, item["resourceFieldRef"], "", context.place).encode()


def _write(directory: Path, files: Files) -> None:
    for name, (content, mode) in files.items():
        _check_relative(name)
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        path.chmod(mode)


def _check_relative(path: str) -> None:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise VolumeError(f"path {path!r} must be relative and stay inside its volume")


def _host_path(spec: Object) -> Path:
    path, kind = Path(spec["path"]), spec.get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.touch()
    right = {"Directory": path.is_dir, "File": path.is_file, "Socket": path.is_socket}.get(kind, lambda: True)
    if not right():
        raise VolumeError(f"hostPath type check failed: {path} is not a {kind.lower()}")
    return path


async def _claim(name: str, references: References) -> Path:
    claim = await references.client.find(CLAIMS, name, references.namespace)
    if claim is None:
        raise MissingReferenceError(f'persistentvolumeclaim "{name}" not found')
    if (claim.get("status") or {}).get("phase") != "Bound":
        raise MissingReferenceError(f'persistentvolumeclaim "{name}" is not bound')
    volume = await references.client.get(VOLUMES, claim["spec"]["volumeName"])
    source = volume["spec"].get("hostPath") or volume["spec"].get("local")
    if source is None:
        raise VolumeError(f"persistentvolumeclaim {name!r}: its volume is neither hostPath nor local")
    return _host_path({"path": source["path"], "type": "Directory"})
