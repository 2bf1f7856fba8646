"""The rules of a pod's spec beyond its types: resources, volumes, tolerations, node affinity and names.

These are the rules that a template of a user or of a controller breaks most easily. A real API server rejects a pod
that breaks one, so a cluster that accepted it would hide the fault of whoever made it.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.admission.metadata import key_problem, problem
from meshwright_local.apiserver.status_errors import (
    Cause,
    duplicate,
    invalid_value,
    not_allowed,
    required,
    unsupported_value,
)
from meshwright_local.kube import quantities

_STANDARD = ("cpu", "memory", "ephemeral-storage")
_HUGE_PAGES = "hugepages-"
_VOLUME_NAMES = {"configMap": "name", "secret": "secretName", "persistentVolumeClaim": "claimName", "hostPath": "path"}
_NAMES = {"hostname": "label", "subdomain": "label", "nodeName": "subdomain", "serviceAccountName": "subdomain"}
_SOURCES = ("fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
_CONTAINER_ENUMS = {
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
}


def spec_causes(spec: KubeObject, path: str) -> Iterator[Cause]:
    """Return the errors of a spec outside its containers."""
    for key, form in _NAMES.items():
        if spec.get(key) and (text := problem(form, spec[key])):
            yield invalid_value(f"{path}.{key}", spec[key], text)
    for index, gate in enumerate(spec.get("schedulingGates") or ()):
        if text := key_problem(gate["name"]):
            yield invalid_value(f"{path}.schedulingGates[{index}]", gate["name"], text)
        if gate in spec["schedulingGates"][:index]:
            yield duplicate(f"{path}.schedulingGates[{index}]", gate["name"])
    if spec.get("dnsPolicy") == "None" and not spec.get("dnsConfig"):
        yield required(f"{path}.dnsConfig", "must provide `dnsConfig` when `dnsPolicy` is None")
    for index, volume in enumerate(spec.get("volumes") or ()):
        yield from _volume_causes(volume, f"{path}.volumes[{index}]")
    for index, toleration in enumerate(spec.get("tolerations") or ()):
        yield from toleration_causes(toleration, f"{path}.tolerations[{index}]")
    yield from _affinity_causes(spec, path)
    for index, spread in enumerate(spec.get("topologySpreadConstraints") or ()):
        if spread.get("maxSkew", 0) <= 0:
            where = f"{path}.topologySpreadConstraints[{index}].maxSkew"
            yield invalid_value(where, spread.get("maxSkew", 0), "must be greater than zero")


def container_causes(container: KubeObject, path: str, *, host_network: bool) -> Iterator[Cause]:
    """Return the errors of one container's resources, ports and environment."""
    if container.get("image") and container["image"] != container["image"].strip():
        text = "must not have leading or trailing whitespace"
        yield invalid_value(f"{path}.image", container["image"], text)
    for key, choices in _CONTAINER_ENUMS.items():
        if container.get(key, choices[0]) not in choices:
            yield unsupported_value(f"{path}.{key}", container[key], choices)
    yield from resource_causes(container.get("resources") or {}, f"{path}.resources")
    for index, port in enumerate(container.get("ports") or ()):
        yield from _port_causes(port, f"{path}.ports[{index}]", host_network=host_network)
    for index, mount in enumerate(container.get("volumeMounts") or ()):
        if ".." in str(mount.get("subPath") or "").split("/"):
            yield invalid_value(f"{path}.volumeMounts[{index}].subPath", mount["subPath"], "must not contain '..'")
    for index, entry in enumerate(container.get("env") or ()):
        source = entry.get("valueFrom")
        if source is not None and not any(source.get(key) for key in _SOURCES):
            text = "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef`"
            yield invalid_value(f"{path}.env[{index}].valueFrom", "", text)


def resource_causes(resources: KubeObject, path: str) -> Iterator[Cause]:
    """Return the errors of requests and limits: names, signs, whole devices, and requests beyond limits."""
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    for kind, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            value = quantities.parse(amount)[0]
            if "/" not in name and name not in _STANDARD and not name.startswith(_HUGE_PAGES):
                text = "must be a standard resource for containers"
                yield invalid_value(f"{path}.{kind}[{name}]", name, text)
            elif value < 0:
                yield invalid_value(f"{path}.{kind}[{name}]", amount, "must be greater than or equal to 0")
            elif "/" in name and value.denominator != 1:
                yield invalid_value(f"{path}.{kind}[{name}]", amount, "must be an integer")
    for name, amount in requests.items():
        exact = name not in _STANDARD  # devices and huge pages cannot be promised to more than one pod
        if name not in limits:
            if exact:
                yield required(f"{path}.limits", "Limit must be set for non overcommitable resources")
            continue
        wanted, limit = (quantities.parse(values[name])[0] for values in (requests, limits))
        if exact and wanted != limit:
            yield invalid_value(f"{path}.requests", amount, f"must be equal to {name} limit of {limits[name]}")
        elif wanted > limit:
            text = f"must be less than or equal to {name} limit of {limits[name]}"
            yield invalid_value(f"{path}.requests", amount, text)


def _port_causes(port: KubeObject, path: str, *, host_network: bool) -> Iterator[Cause]:
    number, name = port.get("containerPort") or 0, port.get("name") or ""
    if not number:
        yield required(f"{path}.containerPort")
    elif not 0 < number < 65536:
        yield invalid_value(f"{path}.containerPort", number, "must be between 1 and 65535, inclusive")
    if len(name) > 15:
        yield invalid_value(f"{path}.name", name, "must be no more than 15 characters")
    if host_network and port.get("hostPort", number) != number:
        text = "must match `containerPort` when `hostNetwork` is true"
        yield invalid_value(f"{path}.hostPort", port["hostPort"], text)


def _volume_causes(volume: KubeObject, path: str) -> Iterator[Cause]:
    sources = [key for key in volume if key != "name"]
    for key in sources[1:]:
        yield not_allowed(f"{path}.{key}", "may not specify more than 1 volume type")
    for key, name in _VOLUME_NAMES.items():
        if isinstance(volume.get(key), dict) and not volume[key].get(name):
            yield required(f"{path}.{key}.{name}")
    where = str((volume.get("hostPath") or {}).get("path") or "")
    if ".." in where.split("/"):
        yield invalid_value(f"{path}.hostPath.path", where, "must not contain '..'")
    for key in ("configMap", "secret", "projected", "downwardAPI"):
        mode = (volume.get(key) or {}).get("defaultMode", 0)
        if not 0 <= mode <= 0o777:
            text = "must be a number between 0 and 0777 (octal), both inclusive"
            yield invalid_value(f"{path}.{key}.defaultMode", mode, text)


def toleration_causes(toleration: KubeObject, path: str) -> Iterator[Cause]:
    """Return the errors of a toleration."""
    key, operator, effect = (toleration.get(name) or "" for name in ("key", "operator", "effect"))
    if not key and operator != "Exists":
        text = 'operator must be Exists when `key` is empty, which means "match all values and all keys"'
        yield invalid_value(f"{path}.operator", operator, text)
    elif key and (why := key_problem(key)):
        yield invalid_value(f"{path}.key", key, why)
    if operator == "Exists" and toleration.get("value"):
        yield invalid_value(f"{path}.operator", toleration["value"], "value must be empty when `operator` is 'Exists'")
    elif operator not in ("", "Equal", "Exists", "Lt", "Gt"):
        yield unsupported_value(f"{path}.operator", operator, ("Equal", "Exists"))
    if effect and effect not in _EFFECTS:
        yield unsupported_value(f"{path}.effect", effect, _EFFECTS)
    if toleration.get("tolerationSeconds") is not None and effect != "NoExecute":
        yield invalid_value(f"{path}.effect", effect, "effect must be 'NoExecute' when `tolerationSeconds` is set")


def _affinity_causes(spec: KubeObject, path: str) -> Iterator[Cause]:
    affinity, path = (spec.get("affinity") or {}).get("nodeAffinity") or {}, f"{path}.affinity.nodeAffinity"
    needed = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if needed is not None:
        path = f"{path}.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
        terms = needed.get("nodeSelectorTerms") or ()
        if not terms:
            yield required(path, "must have at least one node selector term")
        for index, term in enumerate(terms):
            for key in ("matchExpressions", "matchFields"):
                for place, requirement in enumerate(term.get(key) or ()):
                    yield from _requirement_causes(requirement, f"{path}[{index}].{key}[{place}]", key)


def _requirement_causes(requirement: KubeObject, path: str, where: str) -> Iterator[Cause]:
    operator, values = requirement.get("operator"), requirement.get("values") or ()
    if where == "matchFields":
        if operator not in ("In", "NotIn"):
            yield invalid_value(f"{path}.operator", operator, "not a valid selector operator")
        elif len(values) != 1:
            text = "must be only one value when `operator` is 'In' or 'NotIn' for node field selector"
            yield required(f"{path}.values", text)
        return
    if operator not in _OPERATORS:
        yield invalid_value(f"{path}.operator", operator, "not a valid selector operator")
    elif operator in ("In", "NotIn") and not values:
        yield required(f"{path}.values", "must be specified when `operator` is 'In' or 'NotIn'")
    elif operator in ("Exists", "DoesNotExist") and values:
        text = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'"
        yield not_allowed(f"{path}.values", text)
    elif operator in ("Gt", "Lt") and len(values) != 1:
        yield required(f"{path}.values", "must be specified single value when `operator` is 'Lt' or 'Gt'")
    if why := key_problem(requirement.get("key") or ""):
        yield invalid_value(f"{path}.key", requirement.get("key") or "", why)
