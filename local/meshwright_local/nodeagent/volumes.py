"""A pod's volumes as directories of this machine, and their paths in its containers.

Supported: emptyDir, hostPath, configMap, secret, downwardAPI, serviceAccountToken, projected, and persistentVolumeClaim
bound to a volume that is a directory. Contents are those at the pod's start.

If containers have their own view of the file system, volumes are mounted there. Otherwise nothing can be mounted for a
single process, and paths are rewritten: each text of the container that is a mount path, or is below one, becomes the
path of the real directory. That includes values of environment variables, elements of command and args (also the part
after the `=` of `--option=/data/x`), and the working directory. A program that reads its paths from its environment or
arguments, as containers should, works unchanged. A program with `/data` in its code, or in the middle of a shell
script, does not find it, and `readOnly` is not enforced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from meshwright.api.objects import KubeObject
from meshwright_local.kube.client import ApiClient, ApiError
from meshwright_local.kube.kubeconfig import Connection, write_kubeconfig
from meshwright_local.kube.resources import CLAIMS, CONFIG_MAPS, SECRETS, VOLUMES, Resource
from meshwright_local.nodeagent.runtime.environment import downward, expand
from meshwright_local.nodeagent.runtime.mount_namespace import Mount
from meshwright_local.nodeagent.sandbox import PodSpecError, Sandbox, linked_directory

ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
_SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
_TOKEN_SECONDS = 365 * 24 * 3600
_MEMORY = "/dev/shm"  # noqa: S108 - for volumes in memory, each in its own directory

Files = dict[str, tuple[bytes, int]]
"""Relative path -> content and mode."""


async def prepare(sandbox: Sandbox) -> None:
    """Create every volume of a pod, and its service account's credentials.

    Raises:
        PodSpecError: An object that a volume needs does not exist yet, a kind of volume is not supported, or a
            hostPath is not of the required type.
    """
    spec, root = sandbox.pod["spec"], sandbox.directory / "volumes"
    root.mkdir(exist_ok=True)
    for volume in spec.get("volumes") or ():
        if "hostPath" in volume:
            path = _host_path(volume["hostPath"])
        elif "persistentVolumeClaim" in volume:
            path = await claim_directory(
                sandbox.host.client, sandbox.namespace, volume["persistentVolumeClaim"]["claimName"]
            )
        elif (volume.get("emptyDir") or {}).get("medium") == "Memory":
            path = linked_directory(root / volume["name"], _MEMORY)
        else:
            path = root / volume["name"]
            await asyncio.to_thread(_write, path, await _files(sandbox, volume))
        sandbox.volumes[volume["name"]] = path
    if spec.get("serviceAccountName") and spec.get("automountServiceAccountToken") is not False:
        sandbox.account = sandbox.directory / "serviceaccount"
        there, token = sandbox.host.client.connection, await _token(sandbox, None)
        files = {"token": token, "ca.crt": (there.ca_pem or "").encode(), "namespace": sandbox.namespace.encode()}
        await asyncio.to_thread(_write, sandbox.account, {name: (text, 0o600) for name, text in files.items()})
        write_kubeconfig(sandbox.account / "kubeconfig", Connection(there.url, token.decode(), there.ca_pem))


def mounts(sandbox: Sandbox, container: KubeObject, env: Mapping[str, str]) -> list[Mount]:
    """Return a container's volume mounts, with `subPath` and `subPathExpr` applied.

    Raises:
        PodSpecError: A sub-path is outside its volume, or the pod does not have a volume.
    """
    result = [Mount(str(sandbox.account), ACCOUNT_PATH, True)] if sandbox.account else []
    for mount in container.get("volumeMounts") or ():
        if mount["name"] not in sandbox.volumes:
            raise PodSpecError(f"volumeMounts: no volume is named {mount['name']!r}")
        below = mount.get("subPath") or expand(mount.get("subPathExpr") or "", env)
        source = sandbox.volumes[mount["name"]] / _relative(below)
        if not source.exists():
            source.mkdir(parents=True)
        result.append(Mount(str(source), mount["mountPath"].rstrip("/") or "/", bool(mount.get("readOnly"))))
    return result


def rewrite(text: str, mounts: Iterable[Mount]) -> str:
    """Rewrite a text of a container without its own view: a path, or `name=path`."""
    name, equals, path = ("", "", text) if text.startswith("/") else text.partition("=")
    # The deepest mount counts, as with nested mounts.
    for source, target, _ in sorted(mounts, key=lambda mount: -len(mount.target)):
        if path == target or path.startswith(target.rstrip("/") + "/"):
            return f"{name}{equals}{source}{path[len(target.rstrip('/')) :]}".rstrip("/")
    return text


async def claim_directory(client: ApiClient, namespace: str, name: str) -> Path:
    """Return the directory of a persistent volume claim.

    Raises:
        PodSpecError: The claim does not exist or is not bound yet, or its volume is not a directory of this machine.
    """
    claim = await client.find(CLAIMS, name, namespace)
    if claim is None or (claim.get("status") or {}).get("phase") != "Bound":
        raise PodSpecError(f'persistentvolumeclaim "{name}" {"not found" if claim is None else "is not bound"}')
    volume = await client.get(VOLUMES, claim["spec"]["volumeName"])
    source = volume["spec"].get("hostPath") or volume["spec"].get("local")
    if source is None:
        raise PodSpecError(f"persistentvolumeclaim {name!r}: its volume is neither hostPath nor local")
    return _host_path({"path": source["path"], "type": "Directory"})


async def _files(sandbox: Sandbox, volume: KubeObject) -> Files:
    if spec := volume.get("projected"):
        parts = [await _files(sandbox, part) for part in spec.get("sources") or ()]
        return {name: file for part in parts for name, file in part.items()}
    for kind, resource in (("configMap", CONFIG_MAPS), ("secret", SECRETS)):
        if spec := volume.get(kind):
            return _selected(spec, await sandbox.entries(resource, spec))
    if spec := volume.get("downwardAPI"):
        items = spec.get("items") or ()
        return {item["path"]: (downward(sandbox, item).encode(), _mode(item, spec)) for item in items}
    if spec := volume.get("serviceAccountToken"):
        return {spec["path"]: (await _token(sandbox, spec.get("audience")), 0o600)}
    kinds = ", ".join(sorted(key for key in volume if key != "name"))
    if kinds != "emptyDir":
        raise PodSpecError(f"volumes[{volume.get('name', '')}]: {kinds or 'no kind'} is not supported on this node")
    return {}


async def _token(sandbox: Sandbox, audience: str | None) -> bytes:
    name = sandbox.pod["spec"].get("serviceAccountName") or "default"
    # It is not renewed, so it must outlive the pod.
    spec = {"audiences": [audience] if audience else [], "expirationSeconds": _TOKEN_SECONDS}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    path = _SERVICE_ACCOUNTS.path(sandbox.namespace, name, "token")
    try:
        return str((await sandbox.host.client.request("POST", path, body=body))["status"]["token"]).encode()
    except ApiError as error:
        raise PodSpecError(f"serviceAccountName {name}: {error.message}") from error


def _selected(spec: KubeObject, entries: Mapping[str, bytes]) -> Files:
    items = spec.get("items") or [{"key": key, "path": key} for key in entries]
    for item in items:
        if item["key"] not in entries and not spec.get("optional"):
            raise PodSpecError(f"references non-existent key: {item['key']}")
    return {item["path"]: (entries[item["key"]], _mode(item, spec)) for item in items if item["key"] in entries}


def _mode(item: KubeObject, spec: KubeObject) -> int:
    return int(item.get("mode") or spec.get("defaultMode") or 0o644)


def _write(directory: Path, files: Files) -> None:
    directory.mkdir(exist_ok=True)
    for name, (content, mode) in files.items():
        path = directory / _relative(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(content)
        path.chmod(mode)


def _relative(path: str) -> str:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise PodSpecError(f"path {path!r} must be relative and stay inside its volume")
    return path


def _host_path(spec: KubeObject) -> Path:
    path, kind = Path(spec["path"]), spec.get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.touch()
    right = {"Directory": path.is_dir, "File": path.is_file, "Socket": path.is_socket}.get(kind, lambda: True)
    if not right():
        raise PodSpecError(f"hostPath type check failed: {path} is not a {kind.lower()}")
    return path
