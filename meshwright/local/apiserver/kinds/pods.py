"""Pods: defaults, checks, what may change later, quality of service, priority, graceful deletion."""

from __future__ import annotations

import ipaddress
from typing import Any

import orjson

from meshwright.local.apiserver.clock import timestamp
from meshwright.local.apiserver.errors import Cause, forbidden, invalid_value, not_allowed, required
from meshwright.local.apiserver.kinds.base import ClusterView, JsonObject, Kind
from meshwright.local.apiserver.objectmeta import NameForm, label_value_problem, name_problem

PRIORITY_CLASSES = ("scheduling.k8s.io", "priorityclasses")
SYSTEM_PRIORITIES = {"system-node-critical": 2_000_001_000, "system-cluster-critical": 2_000_000_000}
DEFAULT_GRACE_SECONDS = 30

_SPEC_DEFAULTS: dict[str, Any] = {
    "restartPolicy": "Always",
    "terminationGracePeriodSeconds": DEFAULT_GRACE_SECONDS,
    "dnsPolicy": "ClusterFirst",
    "schedulerName": "default-scheduler",
    "enableServiceLinks": True,
    "securityContext": {},
}
_PROBE_DEFAULTS = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
_MODE = 0o644
_ENUMS = {
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "preemptionPolicy": ("PreemptLowerPriority", "Never"),
}
_MUTABLE = ("activeDeadlineSeconds", "terminationGracePeriodSeconds", "tolerations", "schedulingGates")
_IMMUTABLE_TEXT = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


class PodKind(Kind):
    """Pods."""

    graceful = True
    returns_deleted = True

    def set_defaults(self, obj: JsonObject) -> None:
        """The defaults of a pod's spec."""
        spec = obj.get("spec")
        if isinstance(spec, dict):
            default_pod_spec(spec)

    def on_create(self, obj: JsonObject, view: ClusterView) -> None:
        """First status, and the number behind the priority class."""
        spec = obj.get("spec") or {}
        obj["status"] = {"phase": "Pending", "qosClass": qos_class(spec)}
        if spec.get("schedulingGates"):
            obj["status"]["conditions"] = [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "lastTransitionTime": timestamp(),
                    "reason": "SchedulingGated",
                    "message": "Scheduling is blocked due to non-empty scheduling gates",
                }
            ]
        _set_priority(obj, view)

    def on_update(self, new: JsonObject, old: JsonObject, subresource: str) -> None:
        """What admission set stays when a client leaves it out."""
        for key in ("priority", "preemptionPolicy"):
            if key in old["spec"]:
                new["spec"].setdefault(key, old["spec"][key])
        if isinstance(new.get("status"), dict):
            _agree_on_address(new["status"])

    def validate(self, obj: JsonObject, old: JsonObject | None, subresource: str) -> list[Cause]:
        """Checks of the spec, and on an update of what changed in it."""
        spec = obj.get("spec")
        if not isinstance(spec, dict):
            return [required("spec")]
        if old is None:
            return check_pod_spec(spec, "spec")
        return _check_addresses(obj.get("status")) if subresource else _check_change(spec, old["spec"])

    def lingers(self, obj: JsonObject) -> bool:
        """A pod waits for its node to stop it."""
        return bool(obj["metadata"].get("deletionGracePeriodSeconds"))

    def grace_seconds(self, obj: JsonObject, asked: int | None) -> int:
        """What was asked for, else what the pod says; none where nothing runs."""
        if not obj["spec"].get("nodeName") or obj.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            return 0
        grace = asked if asked is not None else obj["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)
        return int(grace) if grace >= 0 else 1


def _agree_on_address(status: JsonObject) -> None:
    """`podIP` is the first of `podIPs`; where they differ, `podIP` is right."""
    addresses = status.get("podIPs") or []
    first = addresses[0].get("ip") if addresses and isinstance(addresses[0], dict) else None
    if status.get("podIP") and status["podIP"] != first:
        status["podIPs"] = [{"ip": status["podIP"]}]
    elif first:
        status["podIP"] = first


def _check_addresses(status: object) -> list[Cause]:
    causes: list[Cause] = []
    addresses = (status.get("podIPs") if isinstance(status, dict) else None) or []
    families: list[int] = []
    for index, address in enumerate(addresses):
        text = address.get("ip") if isinstance(address, dict) else None
        try:
            families.append(ipaddress.ip_address(str(text)).version)
        except ValueError:
            why = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"
            causes.append(invalid_value(f"status.podIPs[{index}]", text, why))
    if len(families) != len(set(families)):
        why = "may specify no more than one IP for each IP family"
        causes.append(invalid_value("status.podIPs", addresses, why))
    return causes


def default_pod_spec(spec: JsonObject) -> None:
    """Fill in a pod's spec in place; also used for the templates of workloads."""
    for key, value in _SPEC_DEFAULTS.items():
        spec.setdefault(key, orjson.loads(orjson.dumps(value)))
    for key in ("containers", "initContainers"):
        for container in spec.get(key) or ():
            _default_container(container)
    if spec.get("serviceAccountName"):
        spec.setdefault("serviceAccount", spec["serviceAccountName"])
    for volume in spec.get("volumes") or ():
        for source in ("configMap", "secret", "downwardAPI", "projected"):
            if isinstance(volume.get(source), dict):
                volume[source].setdefault("defaultMode", _MODE)
        if isinstance(volume.get("hostPath"), dict):
            volume["hostPath"].setdefault("type", "")


def _default_container(container: JsonObject) -> None:
    image = str(container.get("image") or "")
    tag = image.rpartition("/")[2].partition(":")[2]
    container.setdefault("imagePullPolicy", "IfNotPresent" if tag not in ("", "latest") else "Always")
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    resources = container.setdefault("resources", {})
    if resources.get("limits"):
        resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        probe = container.get(name)
        if isinstance(probe, dict):
            for key, value in _PROBE_DEFAULTS.items():
                probe.setdefault(key, value)
            if isinstance(probe.get("httpGet"), dict):
                probe["httpGet"].setdefault("scheme", "HTTP")
                probe["httpGet"].setdefault("path", "/")
    for entry in container.get("env") or ():
        reference = (entry.get("valueFrom") or {}).get("fieldRef") if isinstance(entry, dict) else None
        if isinstance(reference, dict):
            reference.setdefault("apiVersion", "v1")


def check_pod_spec(spec: JsonObject, path: str) -> list[Cause]:
    """What is wrong with a new pod's spec, whose types already fit the schema."""
    causes: list[Cause] = []
    volumes = [volume["name"] for volume in spec.get("volumes") or ()]
    causes += _check_names(volumes, f"{path}.volumes")
    if not spec.get("containers"):
        causes.append(required(f"{path}.containers"))
    names = [c["name"] for key in ("initContainers", "containers") for c in spec.get(key) or ()]
    causes += _check_names(names, f"{path}.containers")
    for key in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(key) or ()):
            causes += _check_container(container, set(volumes), f"{path}.{key}[{index}]")
    for key, choices in _ENUMS.items():
        if key in spec and spec[key] not in choices:
            supported = ", ".join(f'"{choice}"' for choice in choices)
            text = f'Unsupported value: "{spec[key]}": supported values: {supported}'
            causes.append(Cause(f"{path}.{key}", "FieldValueNotSupported", text))
    for key, value in (spec.get("nodeSelector") or {}).items():
        problem = label_value_problem(value)
        if problem:
            causes.append(invalid_value(f"{path}.nodeSelector[{key}]", value, problem))
    if spec.get("activeDeadlineSeconds", 1) < 1:
        causes.append(invalid_value(f"{path}.activeDeadlineSeconds", spec["activeDeadlineSeconds"], "must be positive"))
    if spec.get("schedulingGates") and spec.get("nodeName"):
        causes.append(not_allowed(f"{path}.nodeName", "cannot be set until all schedulingGates have been cleared"))
    return causes


def _check_names(names: list[str], path: str) -> list[Cause]:
    causes = []
    for index, name in enumerate(names):
        problem = name_problem(NameForm.LABEL, name)
        if problem:
            causes.append(invalid_value(f"{path}[{index}].name", name, problem))
        if name in names[:index]:
            causes.append(Cause(f"{path}[{index}].name", "FieldValueDuplicate", f'Duplicate value: "{name}"'))
    return causes


def _check_container(container: JsonObject, volumes: set[str], path: str) -> list[Cause]:
    causes = [] if container.get("image") else [required(f"{path}.image")]
    paths: list[str] = []
    for index, mount in enumerate(container.get("volumeMounts") or ()):
        if mount["name"] not in volumes:
            where = f"{path}.volumeMounts[{index}].name"
            causes.append(Cause(where, "FieldValueNotFound", f'Not found: "{mount["name"]}"'))
        if mount["mountPath"] in paths:
            causes.append(
                invalid_value(f"{path}.volumeMounts[{index}].mountPath", mount["mountPath"], "must be unique")
            )
        paths.append(mount["mountPath"])
    for index, entry in enumerate(container.get("env") or ()):
        if not entry["name"] or "=" in entry["name"]:
            text = "a valid environment variable name must consist only of printable ASCII characters other than '='"
            causes.append(invalid_value(f"{path}.env[{index}].name", entry["name"], text))
        if entry.get("value") and entry.get("valueFrom"):
            text = "may not be specified when `value` is not empty"
            causes.append(invalid_value(f"{path}.env[{index}].valueFrom", "", text))
    return causes


def _check_change(spec: JsonObject, was: JsonObject) -> list[Cause]:
    gates = {gate["name"] for gate in spec.get("schedulingGates") or ()}
    before = {gate["name"] for gate in was.get("schedulingGates") or ()}
    if gates - before:
        return [not_allowed("spec.schedulingGates", "only deletion is allowed, but found new scheduling gate")]
    if any(t not in (spec.get("tolerations") or ()) for t in was.get("tolerations") or ()):
        return [not_allowed("spec.tolerations", "existing toleration can not be modified except its tolerationSeconds")]
    frozen = _frozen(spec, bool(before)) != _frozen(was, bool(before))
    return [not_allowed("spec", _IMMUTABLE_TEXT)] if frozen else []


def _frozen(spec: JsonObject, gated: bool) -> JsonObject:
    """The part of a spec that an update may not touch; while a pod is gated it may still be aimed at nodes."""
    free = (*_MUTABLE, "nodeSelector", "affinity") if gated else _MUTABLE
    kept = {key: value for key, value in spec.items() if key not in free}
    for key in ("containers", "initContainers"):
        if key in kept:
            kept[key] = [{k: v for k, v in c.items() if k != "image"} for c in kept[key]]
    return kept


def qos_class(spec: JsonObject) -> str:
    """Guaranteed, Burstable or BestEffort, by the CPU and memory the containers ask for."""
    containers = [c.get("resources") or {} for key in ("containers", "initContainers") for c in spec.get(key) or ()]
    wanted = [
        {
            kind: {k: v for k, v in (r.get(kind) or {}).items() if k in ("cpu", "memory")}
            for kind in ("requests", "limits")
        }
        for r in containers
    ]
    if not any(r["requests"] or r["limits"] for r in wanted):
        return "BestEffort"
    guaranteed = all(r["limits"].keys() == {"cpu", "memory"} and r["requests"] == r["limits"] for r in wanted)
    return "Guaranteed" if guaranteed else "Burstable"


def _set_priority(obj: JsonObject, view: ClusterView) -> None:
    spec = obj.get("spec") or {}
    name = spec.get("priorityClassName")
    chosen: JsonObject | None = None
    if name in SYSTEM_PRIORITIES:
        chosen = {"value": SYSTEM_PRIORITIES[name]}
    elif name:
        chosen = view.find(PRIORITY_CLASSES, "", name)
        if chosen is None:
            pod = obj["metadata"]["name"]
            raise forbidden("", "pods", pod, f"no PriorityClass with name {name} was found")
    else:
        chosen = next((c for c in view.all_of(PRIORITY_CLASSES) if c.get("globalDefault")), None)
        if chosen is not None:
            spec["priorityClassName"] = chosen["metadata"]["name"]
    spec["priority"] = (chosen or {}).get("value", 0)
    spec.setdefault("preemptionPolicy", (chosen or {}).get("preemptionPolicy", "PreemptLowerPriority"))
