"""A container's environment and command line, as a kubelet would resolve them.

Containers get the following here in addition to their spec:

- `PATH` begins with the directory of this interpreter, so that `python` and `meshwright-worker` are those of this
  installation, as they are the image's in a cluster. A container without a command runs the program on `PATH` with the
  name of its image, `meshwright-operator` for `registry/meshwright-operator:1.0`.
- `HOME` and the working directory are a directory of the pod, and `TMPDIR` one with a short name, so that nothing is
  left behind.
- `GLOO_SOCKET_IFNAME=lo`: pods have addresses of the loopback network. Otherwise Gloo uses the interface that the host
  name resolves to, which on a laptop may not exist or may be behind a firewall.
- `CUDA_VISIBLE_DEVICES` is empty: GPUs of these nodes are simulated, even on a machine that has real ones.
- A container whose image has its own root directory (`images.py`) gets only the last two, and what its image says.
- With a service account, the address of the API server: the two variables that clients in a pod read, or `KUBECONFIG`
  if credentials cannot be mounted.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from meshwright.api.objects import KubeObject
from meshwright_local.kube.quantities import milli_value
from meshwright_local.kube.resources import CONFIG_MAPS, SECRETS
from meshwright_local.nodeagent.runtime.images import PATH, Image
from meshwright_local.nodeagent.sandbox import PodSpecError, Sandbox

_EXPANSION = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
_ENTRY = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '/usr/local/bin:/usr/bin:/bin')}"


def base_environment(sandbox: Sandbox, image: Image | None = None) -> dict[str, str]:
    """Return the environment that a container has, regardless of its spec; `image` has its own root directory."""
    if image is None:
        own = {"PATH": _PATH, "HOME": str(sandbox.home), "LANG": "C.UTF-8", "TMPDIR": str(sandbox.temporary)}
    else:
        own = {"PATH": PATH, "HOME": "/", **image.environment}
    result = {**own, "HOSTNAME": sandbox.hostname, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    server = urlsplit(sandbox.host.client.connection.url)
    if sandbox.account is not None and sandbox.host.isolated:
        result |= {"KUBERNETES_SERVICE_HOST": str(server.hostname), "KUBERNETES_SERVICE_PORT": str(server.port)}
    elif sandbox.account is not None:
        result["KUBECONFIG"] = str(sandbox.account / "kubeconfig")
    return result


async def declared_environment(sandbox: Sandbox, container: KubeObject) -> dict[str, str]:
    """Return the environment from the spec: `envFrom`, then `env`; later entries replace earlier ones.

    Raises:
        PodSpecError: A required config map, secret or key does not exist, or a field is not supported.
    """
    result: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        resource = CONFIG_MAPS if "configMapRef" in source else SECRETS
        entries = await sandbox.entries(resource, source.get("configMapRef") or source["secretRef"])
        prefix = source.get("prefix") or ""
        result |= {prefix + key: value.decode(errors="replace") for key, value in entries.items()}
    for entry in container.get("env") or ():
        if "valueFrom" not in entry:
            result[entry["name"]] = expand(entry.get("value") or "", result)
        elif (found := await _value(sandbox, container, entry["valueFrom"])) is not None:
            result[entry["name"]] = found
    return result


async def _value(sandbox: Sandbox, container: KubeObject, source: KubeObject) -> str | None:
    """Return the value of a `valueFrom`; None if it is missing and optional."""
    if "fieldRef" in source or "resourceFieldRef" in source:
        return downward(sandbox, source, container["name"])
    resource = CONFIG_MAPS if "configMapKeyRef" in source else SECRETS
    reference = source.get("configMapKeyRef") or source["secretKeyRef"]
    entries = await sandbox.entries(resource, reference)
    if reference["key"] in entries:
        return entries[reference["key"]].decode(errors="replace")
    if reference.get("optional"):
        return None
    where = f"{resource.kind.lower()} {sandbox.namespace}/{reference['name']}"
    raise PodSpecError(f"couldn't find key {reference['key']} in {where}")


def command(container: KubeObject, values: Mapping[str, str], image: Image | None = None) -> list[str]:
    """Return the argv of a container, with variables replaced.

    Raises:
        PodSpecError: It has no command, and neither has its image; without an own root directory, PATH has no program
            with the image's name.
    """
    command_line = [*(container.get("command") or ()), *(container.get("args") or ())]
    if image is not None and not container.get("command"):
        command_line = [*image.entrypoint, *(container.get("args") or image.command)]
        if not command_line:
            raise PodSpecError("no command specified: set spec.containers[].command", "CreateContainerError")
    elif not container.get("command"):
        program = re.split("[:@]", container.get("image", "").rpartition("/")[2])[0]
        if not program or shutil.which(program, path=_PATH) is None:
            why = f"there are no images here, and no program {program!r} on PATH: set spec.containers[].command"
            raise PodSpecError(f"no command specified: {why}", "CreateContainerError")
        command_line.insert(0, program)
    return [expand(word, values) for word in command_line]


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by known values. Unknown names stay, and `$$` is a dollar sign."""
    return _EXPANSION.sub(lambda match: "$" if match[1] is None else values.get(match[1], match[0]), text)


def downward(sandbox: Sandbox, source: KubeObject, container: str = "") -> str:
    """Return the value of a `fieldRef` or `resourceFieldRef` of the downward API.

    Raises:
        PodSpecError: The downward API does not have this field, or the container not this resource.
    """
    if "resourceFieldRef" in source:
        return _resource(sandbox, source["resourceFieldRef"], container)
    path, metadata = source["fieldRef"]["fieldPath"], sandbox.pod["metadata"]
    if entry := _ENTRY.fullmatch(path):
        return str((metadata.get(entry[1]) or {}).get(entry[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
        entries = sorted((metadata.get(path.removeprefix("metadata.")) or {}).items())
        return "\n".join(f'{key}="{value.translate(escapes)}"' for key, value in entries)
    host = sandbox.host.spec
    values = {
        **{f"metadata.{key}": metadata[key] for key in ("name", "namespace", "uid")},
        "spec.nodeName": host.name,
        "spec.serviceAccountName": sandbox.pod["spec"].get("serviceAccountName", ""),
        **dict.fromkeys(("status.hostIP", "status.hostIPs"), host.address),
        **dict.fromkeys(("status.podIP", "status.podIPs"), sandbox.ip),
    }
    if path not in values:
        raise PodSpecError(f"fieldPath {path!r} is not supported: use one of {', '.join(sorted(values))}")
    return str(values[path])


def _resource(sandbox: Sandbox, reference: KubeObject, container: str) -> str:
    """Return a request or limit of a container. A limit that is not set is the node's allocatable amount."""
    name = reference.get("containerName") or container
    found = next((item for item in sandbox.pod["spec"]["containers"] if item["name"] == name), None)
    section, _, resource = reference["resource"].partition(".")
    if found is None or section not in ("limits", "requests") or not resource:
        raise PodSpecError(f"resource {reference['resource']!r} of container {name!r} is not limits.X or requests.X")
    amount = ((found.get("resources") or {}).get(section) or {}).get(resource)
    if amount is None and section == "limits":
        amount = sandbox.host.spec.capacity.get(resource)
    return str(-(-milli_value(amount or 0) // (milli_value(reference.get("divisor") or 0) or 1000)))
