"""The other built-in kinds that do more than be stored."""

from __future__ import annotations

import base64
import binascii
import ipaddress
from typing import Any

from meshwright.local.apiserver.errors import Cause, forbidden, invalid_value, not_allowed, required
from meshwright.local.apiserver.kinds.base import ClusterView, JsonObject, Kind
from meshwright.local.apiserver.kinds.pods import check_pod_spec, default_pod_spec
from meshwright.local.apiserver.objectmeta import NameForm, qualified_name_problem

SERVICES = ("", "services")
STORAGE_CLASSES = ("storage.k8s.io", "storageclasses")
DEFAULT_CLASS_ANNOTATION = "storageclass.kubernetes.io/is-default-class"
SERVICE_NETWORK = ipaddress.IPv4Network("10.96.0.0/16")
PERMANENT_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")


class NamespaceKind(Kind):
    """Namespaces: their end waits until a controller has emptied them and called `/finalize`."""

    name_form = NameForm.LABEL

    def set_defaults(self, obj: JsonObject) -> None:
        """Every namespace is labelled with its own name."""
        labels = obj["metadata"].setdefault("labels", {})
        if isinstance(labels, dict):
            labels["kubernetes.io/metadata.name"] = obj["metadata"].get("name", "")

    def on_create(self, obj: JsonObject, view: ClusterView) -> None:
        """The finalizer that the namespace controller takes off."""
        obj["spec"] = {"finalizers": ["kubernetes"]}
        obj["status"] = {"phase": "Active"}

    def on_update(self, new: JsonObject, old: JsonObject, subresource: str) -> None:
        """Only `/finalize` changes `spec.finalizers`."""
        if subresource != "finalize":
            new["spec"] = old.get("spec", {})

    def on_delete(self, obj: JsonObject) -> None:
        """The phase that tells everyone to stop creating in it."""
        name = obj["metadata"]["name"]
        if name in PERMANENT_NAMESPACES:
            raise forbidden("", "namespaces", name, "this namespace may not be deleted")
        obj["status"] = {**obj.get("status", {}), "phase": "Terminating"}

    def lingers(self, obj: JsonObject) -> bool:
        """Until `spec.finalizers` is empty."""
        return bool((obj.get("spec") or {}).get("finalizers"))


class ServiceKind(Kind):
    """Services: type, ports and a cluster IP of their own."""

    name_form = NameForm.DNS_1035
    returns_deleted = True

    def set_defaults(self, obj: JsonObject) -> None:
        """The defaults of a service's spec."""
        spec = obj.setdefault("spec", {})
        if not isinstance(spec, dict):
            return
        spec.setdefault("type", "ClusterIP")
        spec.setdefault("sessionAffinity", "None")
        if spec["type"] == "ExternalName":
            return
        spec.setdefault("internalTrafficPolicy", "Cluster")
        spec.setdefault("ipFamilies", ["IPv4"])
        spec.setdefault("ipFamilyPolicy", "SingleStack")
        for port in spec.get("ports") or ():
            if isinstance(port, dict) and "port" in port:
                port.setdefault("targetPort", port["port"])

    def on_create(self, obj: JsonObject, view: ClusterView) -> None:
        """An address, unless the service is headless or has one."""
        spec = obj["spec"]
        obj["status"] = {"loadBalancer": {}}
        if spec["type"] == "ExternalName":
            return
        if not spec.get("clusterIP"):
            taken = {s["spec"].get("clusterIP") for s in view.all_of(SERVICES)}
            spec["clusterIP"] = next(str(ip) for ip in SERVICE_NETWORK.hosts() if str(ip) not in taken)
        spec["clusterIPs"] = [spec["clusterIP"]]

    def on_update(self, new: JsonObject, old: JsonObject, subresource: str) -> None:
        """The address stays when a client leaves it out."""
        for key in ("clusterIP", "clusterIPs"):
            if key in old["spec"]:
                new["spec"].setdefault(key, old["spec"][key])

    def validate(self, obj: JsonObject, old: JsonObject | None, subresource: str) -> list[Cause]:
        """Ports, their names, and that the address does not change."""
        spec, causes = obj["spec"], []
        headless = spec.get("clusterIP") == "None"
        ports = spec.get("ports") or []
        if not ports and not headless and spec["type"] != "ExternalName":
            causes.append(required("spec.ports"))
        for index, port in enumerate(ports):
            if not 0 < port["port"] < 65536:
                text = "must be between 1 and 65535, inclusive"
                causes.append(invalid_value(f"spec.ports[{index}].port", port["port"], text))
            if len(ports) > 1 and not port.get("name"):
                causes.append(required(f"spec.ports[{index}].name"))
        same_type = old is not None and old["spec"].get("type") == spec["type"]
        if old is not None and same_type and old["spec"].get("clusterIP") != spec.get("clusterIP"):
            causes.append(invalid_value("spec.clusterIPs[0]", spec.get("clusterIP"), "field is immutable"))
        return causes


class DataKind(Kind):
    """Config maps and secrets: keys that can be file names, and `immutable`."""

    def set_defaults(self, obj: JsonObject) -> None:
        """Secrets have a type, and their `stringData` becomes `data`."""
        if obj.get("kind") != "Secret":
            return
        obj.setdefault("type", "Opaque")
        plain = obj.pop("stringData", None)
        if isinstance(plain, dict):
            encoded = {k: base64.b64encode(v.encode()).decode() for k, v in plain.items() if isinstance(v, str)}
            obj["data"] = {**(obj.get("data") or {}), **encoded}

    def validate(self, obj: JsonObject, old: JsonObject | None, subresource: str) -> list[Cause]:
        """Keys, base64, and what `immutable` forbids."""
        causes = []
        binary = obj.get("data") if obj["kind"] == "Secret" else obj.get("binaryData")
        for key in {**(obj.get("data") or {}), **(obj.get("binaryData") or {})}:
            if "/" in key or key in (".", "..") or qualified_name_problem(key.strip("._-") or "/"):
                text = "a valid config key must consist of alphanumeric characters, '-', '_' or '.'"
                causes.append(invalid_value(f"data[{key}]", key, text))
        for key, value in (binary or {}).items():
            if not _is_base64(value):
                causes.append(invalid_value(f"data[{key}]", "<omitted>", "illegal base64 data"))
        if old is not None and old.get("immutable"):
            same = all(obj.get(key) == old.get(key) for key in ("data", "binaryData", "type"))
            if not obj.get("immutable"):
                causes.append(not_allowed("immutable", "field is immutable when `immutable` is set"))
            if not same:
                causes.append(not_allowed("data", "field is immutable when `immutable` is set"))
        return causes


class ClaimKind(Kind):
    """Persistent volume claims: a class, a phase, and a spec that only its binder completes."""

    returns_deleted = True

    def set_defaults(self, obj: JsonObject) -> None:
        """Claims ask for a file system unless they say otherwise."""
        if isinstance(obj.get("spec"), dict):
            obj["spec"].setdefault("volumeMode", "Filesystem")

    def on_create(self, obj: JsonObject, view: ClusterView) -> None:
        """Pending, and of the default class when none is named."""
        obj["status"] = {"phase": "Pending"}
        spec = obj.get("spec") or {}
        if "storageClassName" not in spec:
            for storage in view.all_of(STORAGE_CLASSES):
                if (storage["metadata"].get("annotations") or {}).get(DEFAULT_CLASS_ANNOTATION) == "true":
                    spec["storageClassName"] = storage["metadata"]["name"]

    def validate(self, obj: JsonObject, old: JsonObject | None, subresource: str) -> list[Cause]:
        """What a claim must ask for, and what may not change afterwards."""
        spec: dict[str, Any] = obj.get("spec") or {}
        if old is None:
            causes = []
            if not spec.get("accessModes"):
                causes.append(required("spec.accessModes", "at least 1 access mode is required"))
            if not ((spec.get("resources") or {}).get("requests") or {}).get("storage"):
                causes.append(required("spec.resources[storage]"))
            return causes
        free = ("resources", "volumeAttributesClassName", *(() if old["spec"].get("volumeName") else ("volumeName",)))
        frozen = ({k: v for k, v in s.items() if k not in free} for s in (spec, old["spec"]))
        if next(frozen) == next(frozen):
            return []
        text = "spec is immutable after creation except resources.requests and volumeAttributesClassName"
        return [not_allowed("spec", text)]


class VolumeKind(Kind):
    """Persistent volumes."""

    def on_create(self, obj: JsonObject, view: ClusterView) -> None:
        """Pending until a binder says otherwise."""
        obj["status"] = {"phase": "Pending"}

    def set_defaults(self, obj: JsonObject) -> None:
        """The defaults of a volume's spec."""
        if isinstance(obj.get("spec"), dict):
            obj["spec"].setdefault("persistentVolumeReclaimPolicy", "Retain")
            obj["spec"].setdefault("volumeMode", "Filesystem")


class StorageClassKind(Kind):
    """Storage classes."""

    def set_defaults(self, obj: JsonObject) -> None:
        """Volumes go with their claims and are bound at once, unless the class says otherwise."""
        obj.setdefault("reclaimPolicy", "Delete")
        obj.setdefault("volumeBindingMode", "Immediate")


class PriorityClassKind(Kind):
    """Priority classes."""

    def set_defaults(self, obj: JsonObject) -> None:
        """Pods of a class preempt lower ones unless it says otherwise."""
        obj.setdefault("preemptionPolicy", "PreemptLowerPriority")

    def validate(self, obj: JsonObject, old: JsonObject | None, subresource: str) -> list[Cause]:
        """The value stays what pods were admitted with."""
        if old is not None and obj.get("value") != old.get("value"):
            return [not_allowed("value", "may not be changed in an update.")]
        return []


class WorkloadKind(Kind):
    """Kinds with a pod template: Deployment, ReplicaSet, StatefulSet, DaemonSet, Job."""

    def set_defaults(self, obj: JsonObject) -> None:
        """The defaults of the template, and one replica where replicas are counted."""
        spec = obj.get("spec")
        if not isinstance(spec, dict):
            return
        if obj.get("kind") in ("Deployment", "ReplicaSet", "StatefulSet"):
            spec.setdefault("replicas", 1)
        template = (spec.get("template") or {}).get("spec") if isinstance(spec.get("template"), dict) else None
        if isinstance(template, dict):
            default_pod_spec(template)

    def validate(self, obj: JsonObject, old: JsonObject | None, subresource: str) -> list[Cause]:
        """The template must be one that pods could be made from."""
        template = (obj.get("spec") or {}).get("template") or {}
        return [] if subresource == "status" else check_pod_spec(template.get("spec") or {}, "spec.template.spec")


class RbacKind(Kind):
    """Roles and their bindings, whose names may hold colons."""

    name_form = NameForm.PATH_SEGMENT


class ReturningKind(Kind):
    """Kinds whose deletion answers with the object, as the real server does for historical reasons."""

    returns_deleted = True


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return False
    return True
