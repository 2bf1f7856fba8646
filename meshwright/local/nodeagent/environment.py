"""A container's environment and command line, as a kubelet would resolve them.

What containers get here beside their spec, and why:

- `PATH` begins with the directory of this interpreter, so that `python` and `meshwright-worker` mean this installation
  as they mean the image's in a cluster. There are no images.
- `HOME` and the working directory are a directory of the pod's own, and `TMPDIR` a short-named one, so that nothing is
  left behind; sockets in temporary directories must have names of less than 108 bytes.
- `GLOO_SOCKET_IFNAME=lo`: pods have addresses of the loopback network. Gloo would otherwise ask which interface the
  host name resolves to, which on a laptop is none, or one that a firewall guards.
- `CUDA_VISIBLE_DEVICES` is empty: GPUs of these nodes are simulated, also on a machine that has real ones.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from meshwright.local.nodeagent.fields import PodPlace, field, resource_field
from meshwright.local.nodeagent.references import MissingReferenceError, References
from meshwright.local.resources import Object

_EXPANSION = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def base(pod: Object, home: Path, temporary: Path) -> dict[str, str]:
    """What every container of a pod has before its spec is looked at."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', _DEFAULT_PATH)}",
        "HOME": str(home),
        "HOSTNAME": pod["spec"].get("hostname") or pod["metadata"]["name"],
        "LANG": "C.UTF-8",
        "TMPDIR": str(temporary),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }


async def stated(pod: Object, container: Object, place: PodPlace, references: References) -> dict[str, str]:
    """The environment that the spec states: `envFrom`, then `env`, later entries over earlier ones.

    Raises:
        MissingReferenceError: A config map, secret or key that is needed does not exist.
        FieldError: A field that the downward API does not offer.
    """
    result: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        result.update(await _all_of(source, references))
    for entry in container.get("env") or ():
        if "valueFrom" not in entry:
            result[entry["name"]] = expand(entry.get("value") or "", result)
            continue
        value = await _value_from(entry["valueFrom"], pod, container["name"], place, references)
        if value is not None:
            result[entry["name"]] = value
    return result


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by known values; unknown names stay, and `$$` is a dollar sign."""

    def replace(match: re.Match[str]) -> str:
        if match[1] is None:
            return "$"
        return values.get(match[1], match[0])

    return _EXPANSION.sub(replace, text)


async def _all_of(source: Object, references: References) -> dict[str, str]:
    prefix = source.get("prefix") or ""
    if reference := source.get("configMapRef"):
        entries = await references.config_map(reference["name"], optional=bool(reference.get("optional")))
    elif reference := source.get("secretRef"):
        entries = await references.secret(reference["name"], optional=bool(reference.get("optional")))
    else:
        entries = None
    return {prefix + key: value.decode(errors="replace") for key, value in (entries or {}).items()}


async def _value_from(
    source: Object, pod: Object, container: str, place: PodPlace, references: References
) -> str | None:
    if reference := source.get("fieldRef"):
        return field(pod, reference["fieldPath"], place)
    if reference := source.get("resourceFieldRef"):
        return resource_field(pod, reference, container, place)
    if reference := source.get("configMapKeyRef"):
        kind = "configmap"
        entries = await references.config_map(reference["name"], optional=bool(reference.get("optional")))
    elif reference := source.get("secretKeyRef"):
        kind = "secret"
        entries = await references.secret(reference["name"], optional=bool(reference.get("optional")))
    else:
        return None
    if entries is not None and reference["key"] in entries:
        return entries[reference["key"]].decode(errors="replace")
    if reference.get("optional"):
        return None
    raise MissingReferenceError(
        f"couldn't find key {reference['key']} in {kind} {references.namespace}/{reference['name']}"
    )
