"""The built-in resources as a table, and the behavior of kinds that are not only stored (pods have their own file).

Resources that configure the API server itself are served only if this one implements them: no admission webhook is
accepted and then ignored.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Iterator
from typing import Any

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver import status_errors
from meshwright_local.apiserver.admission.metadata import key_problem, problem
from meshwright_local.apiserver.admission.pods import PodRules
from meshwright_local.apiserver.admission.quota import LimitRangeRules, QuotaRules
from meshwright_local.apiserver.admission.runtime_classes import RuntimeClassRules
from meshwright_local.apiserver.auth.identity import RBAC
from meshwright_local.apiserver.registry.checked_kinds import (
    BindingRules,
    BudgetRules,
    ClaimRules,
    EventRules,
    LeaseRules,
    PriorityClassRules,
    RoleRules,
)
from meshwright_local.apiserver.registry.crds import CrdRules
from meshwright_local.apiserver.registry.workload_kinds import SCALE, WorkloadRules
from meshwright_local.apiserver.resource_types import Resource, Rules
from meshwright_local.apiserver.schema.structural import builtin_types
from meshwright_local.apiserver.status_errors import Cause
from meshwright_local.apiserver.store import Store

PERMANENT_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
_SERVICES = ("", "services")
_SERVICE_TYPES = ("ClusterIP", "ExternalName", "LoadBalancer", "NodePort")
_PROTOCOLS = ("SCTP", "TCP", "UDP")
_MAX_DATA_BYTES = 1024 * 1024
_SECRET_DATA = {"kubernetes.io/tls": ("tls.crt", "tls.key"), "kubernetes.io/dockerconfigjson": (".dockerconfigjson",)}
_NETWORK = ipaddress.IPv4Network("10.96.0.0/16")


class _Namespaces(Rules):
    """Namespaces: deletion waits until a controller has emptied them and called `/finalize`."""

    name_form = "label"

    def defaults(self, obj: KubeObject) -> None:
        labels = obj["metadata"].setdefault("labels", {})
        labels["kubernetes.io/metadata.name"] = obj["metadata"].get("name", "")

    def create(self, obj: KubeObject, store: Store) -> None:
        obj.update(spec={"finalizers": ["kubernetes"]}, status={"phase": "Active"})

    def update(self, new: KubeObject, old: KubeObject, subresource: str) -> None:
        if subresource != "finalize":
            new["spec"] = old.get("spec", {})

    def delete(self, obj: KubeObject) -> None:
        if obj["metadata"]["name"] in PERMANENT_NAMESPACES:
            raise status_errors.forbidden(
                "", "namespaces", obj["metadata"]["name"], "this namespace may not be deleted"
            )
        obj["status"] = {**obj.get("status", {}), "phase": "Terminating"}

    def deletion_pending(self, obj: KubeObject) -> bool:
        return bool((obj.get("spec") or {}).get("finalizers"))


class _Services(Rules):
    """Services: type, ports and cluster IP."""

    name_form = "dns-1035"
    put_creates = True
    returns_deleted = True

    def defaults(self, obj: KubeObject) -> None:
        spec = obj.setdefault("spec", {})
        spec |= {"type": "ClusterIP", "sessionAffinity": "None", **spec}
        if spec["type"] != "ExternalName":
            own = {"internalTrafficPolicy": "Cluster", "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack"}
            spec |= {**own, **spec}
            for port in spec.get("ports") or ():
                port["targetPort"] = port.get("targetPort") or port["port"]

    def create(self, obj: KubeObject, store: Store) -> None:
        spec = obj["spec"]
        obj["status"] = {"loadBalancer": {}}
        if spec["type"] == "ExternalName":
            return
        if not spec.get("clusterIP"):
            taken = {service["spec"].get("clusterIP") for service in store.all(_SERVICES)}
            spec["clusterIP"] = next(str(ip) for ip in _NETWORK.hosts() if str(ip) not in taken)
        spec["clusterIPs"] = [spec["clusterIP"]]

    def update(self, new: KubeObject, old: KubeObject, subresource: str) -> None:
        assigned = {key: old["spec"][key] for key in ("clusterIP", "clusterIPs") if key in old["spec"]}
        new["spec"] = {**assigned, **new["spec"]}

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        spec, causes = obj["spec"], []
        ports = spec.get("ports") or []
        if not ports and spec.get("clusterIP") != "None" and spec["type"] != "ExternalName":
            causes.append(status_errors.required("spec.ports"))
        for index, port in enumerate(ports):
            if not 0 < port["port"] < 65536:
                text = "must be between 1 and 65535, inclusive"
                causes.append(status_errors.invalid_value(f"spec.ports[{index}].port", port["port"], text))
            if len(ports) > 1 and not port.get("name"):
                causes.append(status_errors.required(f"spec.ports[{index}].name"))
            causes += _port_causes(port, ports[:index], f"spec.ports[{index}]")
        if spec["type"] not in _SERVICE_TYPES:
            causes.append(status_errors.unsupported_value("spec.type", spec["type"], _SERVICE_TYPES))
        if spec["type"] == "ExternalName" and not spec.get("externalName"):
            causes.append(status_errors.required("spec.externalName"))
        same_type = old is not None and old["spec"].get("type") == spec["type"]
        if old is not None and same_type and old["spec"].get("clusterIP") != spec.get("clusterIP"):
            causes.append(
                status_errors.invalid_value("spec.clusterIPs[0]", spec.get("clusterIP"), "field is immutable")
            )
        return causes


def _port_causes(port: KubeObject, earlier: list[KubeObject], path: str) -> Iterator[Cause]:
    """Return the errors of a service's port: its name, its protocol, and that both are its own."""
    name, protocol = port.get("name") or "", port.get("protocol", "TCP")
    if name and (text := problem("label", name)):
        yield status_errors.invalid_value(f"{path}.name", name, text)
    if name and name in [other.get("name") for other in earlier]:
        yield status_errors.duplicate(f"{path}.name", name)
    if protocol not in _PROTOCOLS:
        yield status_errors.unsupported_value(f"{path}.protocol", protocol, _PROTOCOLS)
    if (port["port"], protocol) in [(other["port"], other.get("protocol", "TCP")) for other in earlier]:
        yield status_errors.duplicate(path, f"{port['port']}/{protocol}")


class _Data(Rules):
    """Config maps and secrets: valid keys, and `immutable`."""

    def defaults(self, obj: KubeObject) -> None:
        if obj["kind"] == "Secret":
            obj.setdefault("type", "Opaque")
            plain = (obj.pop("stringData", None) or {}).items()
            encoded = {key: base64.b64encode(value.encode()).decode() for key, value in plain}
            if encoded:
                obj["data"] = {**(obj.get("data") or {}), **encoded}

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        causes = []
        for key in {**(obj.get("data") or {}), **(obj.get("binaryData") or {})}:
            if "/" in key or key in (".", "..") or key_problem(key.strip("._-") or "/"):
                text = "a valid config key must consist of alphanumeric characters, '-', '_' or '.'"
                causes.append(status_errors.invalid_value(f"data[{key}]", key, text))
        for key, value in (obj.get("data" if obj["kind"] == "Secret" else "binaryData") or {}).items():
            if not _is_base64(value):
                causes.append(status_errors.invalid_value(f"data[{key}]", "<omitted>", "illegal base64 data"))
        values = {**(obj.get("data") or {}), **(obj.get("binaryData") or {})}.values()
        if sum(len(value.encode()) for value in values) > _MAX_DATA_BYTES * (4 / 3 if obj["kind"] == "Secret" else 1):
            where = "data" if obj["kind"] == "Secret" else "[]"
            text = f"Too long: may not be more than {_MAX_DATA_BYTES} bytes"
            causes.append(Cause(where, "FieldValueTooLong", text))
        if obj["kind"] == "Secret":
            causes += _secret_causes(obj, old)
        if old is not None and old.get("immutable"):
            text = "field is immutable when `immutable` is set"
            fields = [f for f in ("immutable", "data", "binaryData") if obj.get(f) != old.get(f)]
            causes += [status_errors.not_allowed(field, text) for field in fields]
        return causes


def _secret_causes(obj: KubeObject, old: KubeObject | None) -> list[Cause]:
    """Return the errors of a secret's type, and of the data that its type needs."""
    if old is not None and obj.get("type") != old.get("type"):
        return [status_errors.invalid_value("type", obj.get("type"), "field is immutable")]
    needed = _SECRET_DATA.get(obj["type"], ())
    return [status_errors.required(f"data[{key}]") for key in needed if key not in (obj.get("data") or {})]


def _is_base64(text: str) -> bool:
    try:
        return base64.b64decode(text, validate=True) is not None
    except ValueError:
        return False


class _Volumes(Rules):
    def create(self, obj: KubeObject, store: Store) -> None:
        obj["status"] = {"phase": "Pending"}
        if isinstance(obj.get("spec"), dict):
            obj["spec"] = {"persistentVolumeReclaimPolicy": "Retain", "volumeMode": "Filesystem", **obj["spec"]}


class _Returning(Rules):
    returns_deleted = True


class _Endpoints(Rules):
    put_creates = True


_POD_FIELDS = {"spec.hostNetwork": "false"} | {
    **{f"spec.{name}": "" for name in ("nodeName", "restartPolicy", "schedulerName", "serviceAccountName")},
    **{f"status.{name}": "" for name in ("phase", "podIP", "nominatedNodeName")},
}
_SERVICE_FIELDS = {"spec.clusterIP": "", "spec.type": ""}
_ABOUT = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
_EVENT_FIELDS = [*(f"involvedObject.{n}" for n in _ABOUT), "reason", "reportingComponent", "source.component", "type"]
_CLUSTER: dict[str, Any] = {"namespaced": False}
_PLAIN: dict[str, Any] = {"has_status": False}
_WITH_GENERATION: dict[str, Any] = {"counts_generation": True}
_CLASSES: dict[str, Any] = {**_CLUSTER, **_PLAIN, **_WITH_GENERATION}
_IN_ALL_CATEGORY: dict[str, Any] = {"categories": ("all",)}
_WORKLOAD: dict[str, Any] = {**_IN_ALL_CATEGORY, **_WITH_GENERATION}
_SCALED: dict[str, Any] = {**_WORKLOAD, "scale": SCALE}
_Row = tuple[str, str, str, str, Rules, dict[str, Any]]
_TABLE: tuple[_Row, ...] = (
    # group, kind, plural, short names, rules, more
    ("", "Pod", "pods", "po", PodRules(), {"fields": _POD_FIELDS, **_IN_ALL_CATEGORY, **_WITH_GENERATION}),
    ("", "Service", "services", "svc", _Services(), {**_IN_ALL_CATEGORY, "fields": _SERVICE_FIELDS}),
    ("", "ConfigMap", "configmaps", "cm", _Data(), _PLAIN),
    ("", "Secret", "secrets", "", _Data(), {**_PLAIN, "fields": {"type": ""}}),
    ("", "Namespace", "namespaces", "ns", _Namespaces(), {**_CLUSTER, "fields": {"status.phase": ""}}),
    ("", "Event", "events", "ev", EventRules(), {**_PLAIN, "fields": dict.fromkeys(_EVENT_FIELDS, "")}),
    ("", "Node", "nodes", "no", Rules(), {**_CLUSTER, "fields": {"spec.unschedulable": "false"}}),
    ("", "PersistentVolumeClaim", "persistentvolumeclaims", "pvc", ClaimRules(), {}),
    ("", "PersistentVolume", "persistentvolumes", "pv", _Volumes(), _CLUSTER),
    ("", "ServiceAccount", "serviceaccounts", "sa", _Returning(), _PLAIN),
    ("", "Endpoints", "endpoints", "ep", _Endpoints(), _PLAIN),
    ("", "ResourceQuota", "resourcequotas", "quota", QuotaRules(), {}),
    ("", "LimitRange", "limitranges", "limits", LimitRangeRules(), _PLAIN),
    ("apps", "Deployment", "deployments", "deploy", WorkloadRules(), _SCALED),
    ("apps", "ReplicaSet", "replicasets", "rs", WorkloadRules(), _SCALED),
    ("apps", "StatefulSet", "statefulsets", "sts", WorkloadRules(), _SCALED),
    ("apps", "DaemonSet", "daemonsets", "ds", WorkloadRules(), _WORKLOAD),
    ("batch", "Job", "jobs", "", WorkloadRules(), _WORKLOAD),
    ("batch", "CronJob", "cronjobs", "cj", Rules(), _WORKLOAD),
    ("coordination.k8s.io", "Lease", "leases", "", LeaseRules(), _PLAIN),
    ("scheduling.k8s.io", "PriorityClass", "priorityclasses", "pc", PriorityClassRules(), _CLASSES),
    ("node.k8s.io", "RuntimeClass", "runtimeclasses", "", RuntimeClassRules(), {**_CLUSTER, **_PLAIN}),
    ("storage.k8s.io", "StorageClass", "storageclasses", "sc", Rules(), {**_CLUSTER, **_PLAIN}),
    ("policy", "PodDisruptionBudget", "poddisruptionbudgets", "pdb", BudgetRules(), _WITH_GENERATION),
    (RBAC, "Role", "roles", "", RoleRules(), _PLAIN),
    (RBAC, "RoleBinding", "rolebindings", "", BindingRules(), _PLAIN),
    (RBAC, "ClusterRole", "clusterroles", "", RoleRules(), {**_CLUSTER, **_PLAIN}),
    (RBAC, "ClusterRoleBinding", "clusterrolebindings", "", BindingRules(), {**_CLUSTER, **_PLAIN}),
    ("networking.k8s.io", "NetworkPolicy", "networkpolicies", "netpol", Rules(), {**_PLAIN, **_WITH_GENERATION}),
    ("networking.k8s.io", "Ingress", "ingresses", "ing", Rules(), _WITH_GENERATION),
    (
        "apiextensions.k8s.io",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        "crd crds",
        CrdRules(),
        {**_CLUSTER, **_WITH_GENERATION},
    ),
)


def builtin_resources() -> Iterator[Resource]:
    """Return every built-in resource, all in version v1."""
    types = builtin_types()
    for group, kind, plural, short, rules, more in _TABLE:
        name = types.names[group, "v1", kind]
        more = {"singular": kind.lower(), "list_kind": f"{kind}List", "short_names": tuple(short.split()), **more}
        reference = {"$ref": f"#/definitions/{name}"}
        yield Resource(group, "v1", plural, kind, types.node(name), rules, reference, **more)
