"""Pods: defaults, validation, permitted updates, quality of service, priority, graceful deletion."""

from __future__ import annotations

import ipaddress
from typing import Any

import orjson

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver import status_errors
from meshwright_local.apiserver.admission.container_life import PROBES, life_causes
from meshwright_local.apiserver.admission.ephemeral import ephemeral_causes
from meshwright_local.apiserver.admission.metadata import problem
from meshwright_local.apiserver.admission.pod_spec import container_causes, spec_causes
from meshwright_local.apiserver.admission.quota import apply_limits, containers_of
from meshwright_local.apiserver.admission.runtime_classes import apply_runtime_class
from meshwright_local.apiserver.resource_types import Rules, set_condition
from meshwright_local.apiserver.status_errors import Cause
from meshwright_local.apiserver.store import Store
from meshwright_local.kube import timestamps
from meshwright_local.kube.resources import has_ended

EPHEMERAL = "ephemeralcontainers"
"""The subresource through which ephemeral containers are added."""
PRIORITY_CLASSES = ("scheduling.k8s.io", "priorityclasses")
NODES = ("", "nodes")
_TOPOLOGY = ("topology.kubernetes.io/region", "topology.kubernetes.io/zone")
_SYSTEM_PRIORITIES = {"system-node-critical": 2_000_001_000, "system-cluster-critical": 2_000_000_000}
_GRACE_SECONDS = 30
_SPEC_DEFAULTS: KubeObject = {
    "restartPolicy": "Always",
    "terminationGracePeriodSeconds": _GRACE_SECONDS,
    "dnsPolicy": "ClusterFirst",
    "schedulerName": "default-scheduler",
    "securityContext": {},
}
_PROBE_DEFAULTS = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
_ENUMS = {
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "preemptionPolicy": ("PreemptLowerPriority", "Never"),
}
_MUTABLE = ("activeDeadlineSeconds", "tolerations", "schedulingGates")
_IMMUTABLE_TEXT = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


class PodRules(Rules):
    """Deletion of a pod waits until its node's agent has stopped it."""

    graceful = True
    returns_deleted = True

    def defaults(self, obj: KubeObject) -> None:
        """Set the defaults of a pod's spec."""
        if isinstance(obj.get("spec"), dict):
            default_pod_spec(obj["spec"])

    def create(self, obj: KubeObject, store: Store) -> None:
        """Apply runtime class and limit ranges, and set the first status and the value of the priority class."""
        spec = obj["spec"]
        apply_runtime_class(obj, store)
        apply_limits(store, obj)
        obj["status"] = {"phase": "Pending", "qosClass": qos_class(spec)}
        if spec.get("schedulingGates"):
            text = "Scheduling is blocked due to non-empty scheduling gates"
            set_condition(obj, "PodScheduled", "False", timestamps.now(), reason="SchedulingGated", message=text)
        _set_priority(obj, store)
        label_topology(obj, store)

    def update(self, new: KubeObject, old: KubeObject, subresource: str) -> None:
        """Restore fields that admission has set and the client left out; set `podIP` to the first of `podIPs`."""
        assigned = {key: old["spec"][key] for key in ("priority", "preemptionPolicy") if key in old["spec"]}
        new["spec"] = {**assigned, **new["spec"]}
        status = new.get("status") or {}
        first = next((address.get("ip") for address in status.get("podIPs") or ()), None)
        if status.get("podIP") and status["podIP"] != first:
            status["podIPs"] = [{"ip": status["podIP"]}]
        elif first:
            status["podIP"] = first

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        """Validate a new spec, the changes of an update, and the addresses in a status."""
        if not isinstance(obj.get("spec"), dict):
            return [status_errors.required("spec")]
        if old is None:
            if obj["spec"].get("ephemeralContainers"):
                return [status_errors.not_allowed("spec.ephemeralContainers", "cannot be set on create")]
            return check_pod_spec(obj["spec"], "spec")
        if subresource == EPHEMERAL:
            return list(ephemeral_causes(obj["spec"], old["spec"]))
        return _check_addresses(obj.get("status") or {}) if subresource else _check_change(obj["spec"], old["spec"])

    def deletion_pending(self, obj: KubeObject) -> bool:
        """Whether some of the grace period is left."""
        return bool(obj["metadata"].get("deletionGracePeriodSeconds"))

    def grace(self, obj: KubeObject, requested: int | None) -> int:
        """Return the requested grace period, else that of the pod; 0 if nothing runs."""
        if not obj["spec"].get("nodeName") or has_ended(obj):
            return 0
        grace = requested if requested is not None else obj["spec"].get("terminationGracePeriodSeconds", _GRACE_SECONDS)
        return int(grace) if grace >= 0 else 1


def label_topology(pod: KubeObject, store: Store) -> None:
    """Give a pod the labels of its node for region and zone, as 1.35 and later do."""
    node = store.find(NODES, "", pod["spec"].get("nodeName") or "") or {}
    there = (node.get("metadata") or {}).get("labels") or {}
    labels = {key: there[key] for key in _TOPOLOGY if key in there}
    if labels:
        pod["metadata"]["labels"] = {**(pod["metadata"].get("labels") or {}), **labels}


def _set_priority(obj: KubeObject, store: Store) -> None:
    spec, name = obj["spec"], obj["spec"].get("priorityClassName")
    chosen: KubeObject | None = {"value": _SYSTEM_PRIORITIES[name]} if name in _SYSTEM_PRIORITIES else None
    if name and chosen is None:
        chosen = store.find(PRIORITY_CLASSES, "", name)
        if chosen is None:
            why = f"no PriorityClass with name {name} was found"
            raise status_errors.forbidden("", "pods", obj["metadata"]["name"], why)
    elif not name:
        chosen = next((c for c in store.all(PRIORITY_CLASSES) if c.get("globalDefault")), None)
        if chosen is not None:
            spec["priorityClassName"] = chosen["metadata"]["name"]
    computed = {
        "priority": (chosen or {}).get("value", 0),
        "preemptionPolicy": (chosen or {}).get("preemptionPolicy", "PreemptLowerPriority"),
    }
    for key, value in computed.items():
        if spec.setdefault(key, value) != value:
            why = f"{key} ({spec[key]}) must not be provided in pod spec; it is {value}, from the PriorityClass"
            raise status_errors.forbidden("", "pods", obj["metadata"]["name"], why)


def _check_addresses(status: KubeObject) -> list[Cause]:
    causes: list[Cause] = []
    addresses, families = status.get("podIPs") or [], []
    for index, address in enumerate(addresses):
        try:
            families.append(ipaddress.ip_address(str(address.get("ip"))).version)
        except ValueError:
            why = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"
            causes.append(status_errors.invalid_value(f"status.podIPs[{index}]", address.get("ip"), why))
    if len(families) != len(set(families)):
        causes.append(
            status_errors.invalid_value(
                "status.podIPs", addresses, "may specify no more than one IP for each IP family"
            )
        )
    return causes


def default_pod_spec(spec: KubeObject) -> None:
    """Fill in a pod's spec in place."""
    default_template_spec(spec)
    spec.setdefault("enableServiceLinks", True)
    for _, container in containers_of(spec):
        resources = container["resources"]
        if resources.get("limits"):
            resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}


def default_template_spec(spec: KubeObject) -> None:
    """Fill in the spec of a pod template in place: what depends on a pod is left to its pods."""
    spec |= {**orjson.loads(orjson.dumps(_SPEC_DEFAULTS)), **{k: v for k, v in spec.items() if v != ""}}
    if spec["terminationGracePeriodSeconds"] < 0:
        spec["terminationGracePeriodSeconds"] = 1
    if spec.get("serviceAccountName"):
        spec.setdefault("serviceAccount", spec["serviceAccountName"])
    for container in (*(one for _, one in containers_of(spec)), *(spec.get("ephemeralContainers") or ())):
        _default_container(container)
    for volume in spec.get("volumes") or ():
        if volume.keys() <= {"name"}:
            volume["emptyDir"] = {}
        for source in ("configMap", "secret", "downwardAPI", "projected"):
            if isinstance(volume.get(source), dict):
                volume[source].setdefault("defaultMode", 0o644)
        for item in (volume.get("downwardAPI") or {}).get("items") or ():
            if item.get("fieldRef"):
                item["fieldRef"].setdefault("apiVersion", "v1")
        if isinstance(volume.get("hostPath"), dict):
            volume["hostPath"].setdefault("type", "")


def _default_container(container: KubeObject) -> None:
    tag = str(container.get("image") or "").rpartition("/")[2].partition(":")[2]
    container.setdefault("imagePullPolicy", "IfNotPresent" if tag not in ("", "latest") else "Always")
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    container.setdefault("resources", {})
    for name in PROBES:
        if container.get(name):
            container[name] |= {**_PROBE_DEFAULTS, **{key: value for key, value in container[name].items() if value}}
            if container[name].get("grpc"):
                container[name]["grpc"].setdefault("service", "")
    hooks = container.get("lifecycle") or {}
    hooks.pop("stopSignal", None)  # off by default in 1.36
    if not hooks:
        container.pop("lifecycle", None)
    for handler in (*(hooks.get(name) for name in ("postStart", "preStop")), *(container.get(name) for name in PROBES)):
        if handler and handler.get("httpGet"):
            handler["httpGet"] |= {"scheme": "HTTP", "path": "/", **handler["httpGet"]}
    for entry in container.get("env") or ():
        reference = (entry.get("valueFrom") or {}).get("fieldRef")
        if reference:
            reference.setdefault("apiVersion", "v1")


def check_pod_spec(spec: KubeObject, path: str) -> list[Cause]:
    """Return the errors of a new pod's spec, whose types already match the schema."""
    containers, volumes = containers_of(spec, path), [volume["name"] for volume in spec.get("volumes") or ()]
    named = [(f"{path}.volumes[{index}]", name) for index, name in enumerate(volumes)]
    causes = _check_names(named) + _check_names([(where, c["name"]) for where, c in containers])
    if not spec.get("containers"):
        causes.append(status_errors.required(f"{path}.containers"))
    for where, container in containers:
        causes += _check_container(container, volumes, where)
        causes += container_causes(container, where, host_network=bool(spec.get("hostNetwork")))
        causes += life_causes(container, where, spec.get("terminationGracePeriodSeconds", _GRACE_SECONDS))
    causes += spec_causes(spec, path)
    for key, choices in _ENUMS.items():
        if spec.get(key, choices[0]) not in choices:
            causes.append(status_errors.unsupported_value(f"{path}.{key}", spec[key], choices))
    for key, value in (spec.get("nodeSelector") or {}).items():
        if text := problem("value", value):
            causes.append(status_errors.invalid_value(f"{path}.nodeSelector[{key}]", value, text))
    if spec.get("activeDeadlineSeconds", 1) < 1:
        causes.append(
            status_errors.invalid_value(
                f"{path}.activeDeadlineSeconds", spec["activeDeadlineSeconds"], "must be positive"
            )
        )
    if spec.get("schedulingGates") and spec.get("nodeName"):
        causes.append(
            status_errors.not_allowed(f"{path}.nodeName", "cannot be set until all schedulingGates have been cleared")
        )
    return causes


def _check_names(named: list[tuple[str, str]]) -> list[Cause]:
    wrong = [
        status_errors.invalid_value(f"{where}.name", name, text)
        for where, name in named
        if (text := problem("label", name))
    ]
    seen: set[str] = set()
    for where, name in named:
        wrong += [status_errors.duplicate(f"{where}.name", name)] if name in seen else []
        seen.add(name)
    return wrong


def _check_container(container: KubeObject, volumes: list[str], path: str) -> list[Cause]:
    causes = [] if container.get("image") else [status_errors.required(f"{path}.image")]
    mounts = container.get("volumeMounts") or []
    for index, mount in enumerate(mounts):
        if mount["name"] not in volumes:
            where = f"{path}.volumeMounts[{index}].name"
            causes.append(Cause(where, "FieldValueNotFound", f'Not found: "{mount["name"]}"'))
        if mount["mountPath"] in [earlier["mountPath"] for earlier in mounts[:index]]:
            where = f"{path}.volumeMounts[{index}].mountPath"
            causes.append(status_errors.invalid_value(where, mount["mountPath"], "must be unique"))
    for index, entry in enumerate(container.get("env") or ()):
        if not entry["name"] or "=" in entry["name"]:
            text = "a valid environment variable name must consist only of printable ASCII characters other than '='"
            causes.append(status_errors.invalid_value(f"{path}.env[{index}].name", entry["name"], text))
        if entry.get("value") and entry.get("valueFrom"):
            text = "may not be specified when `value` is not empty"
            causes.append(status_errors.invalid_value(f"{path}.env[{index}].valueFrom", "", text))
    return causes


def _check_change(spec: KubeObject, was: KubeObject) -> list[Cause]:
    gates, before = ({gate["name"] for gate in s.get("schedulingGates") or ()} for s in (spec, was))
    if gates - before:
        return [
            status_errors.not_allowed("spec.schedulingGates", "only deletion is allowed, but found new scheduling gate")
        ]
    if any(t not in (spec.get("tolerations") or ()) for t in was.get("tolerations") or ()):
        return [
            status_errors.not_allowed(
                "spec.tolerations", "existing toleration can not be modified except its tolerationSeconds"
            )
        ]
    deadline, limit = spec.get("activeDeadlineSeconds"), was.get("activeDeadlineSeconds")
    if limit is not None and (deadline is None or deadline > limit):
        text = "must be less than or equal to previous value"
        return [status_errors.invalid_value("spec.activeDeadlineSeconds", deadline, text)]
    frozen = _frozen(spec, gated=bool(before)) != _frozen(was, gated=bool(before))
    return [status_errors.not_allowed("spec", _IMMUTABLE_TEXT)] if frozen else []


def _frozen(spec: KubeObject, *, gated: bool) -> KubeObject:
    """Return the immutable part of a spec. While a pod is gated, its node selection may still change."""
    free = (*_MUTABLE, "nodeSelector", "affinity") if gated else _MUTABLE
    fixed: KubeObject = {key: value for key, value in spec.items() if key not in free}
    for key in ("containers", "initContainers"):
        fixed[key] = [{k: v for k, v in c.items() if k != "image"} for c in spec.get(key) or ()]
    return fixed


def qos_class(spec: KubeObject) -> str:
    """Return Guaranteed, Burstable or BestEffort, by the containers' CPU and memory requests."""

    def requested(container: KubeObject, kind: str) -> dict[str, Any]:
        values = (container.get("resources") or {}).get(kind) or {}
        return {name: values[name] for name in ("cpu", "memory") if name in values}

    wanted = [(requested(c, "requests"), requested(c, "limits")) for _, c in containers_of(spec)]
    if not any(requests or limits for requests, limits in wanted):
        return "BestEffort"
    guaranteed = all(len(limits) == 2 and requests == limits for requests, limits in wanted)
    return "Guaranteed" if guaranteed else "Burstable"
