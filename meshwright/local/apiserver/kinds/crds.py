"""CustomResourceDefinitions: names, versions, structural schemas, and the conditions that say a resource is served.

Definitions are accepted and served within the write that creates them, so `Established` is true in the very answer.
"""

from __future__ import annotations

from typing import Any

from meshwright.local.apiserver.clock import timestamp
from meshwright.local.apiserver.errors import Cause, invalid_value, required
from meshwright.local.apiserver.kinds.base import ClusterView, JsonObject, Kind
from meshwright.local.apiserver.schema.structural import check_structural

CRD_KEY = ("apiextensions.k8s.io", "customresourcedefinitions")
CLEANUP_FINALIZER = "customresourcecleanup.apiextensions.k8s.io"


class CrdKind(Kind):
    """CustomResourceDefinitions."""

    def set_defaults(self, obj: JsonObject) -> None:
        """Names that follow from the kind, and no conversion."""
        spec = obj.get("spec") or {}
        spec.setdefault("conversion", {"strategy": "None"})
        names = spec.get("names")
        if isinstance(names, dict) and names.get("kind"):
            names.setdefault("singular", names["kind"].lower())
            names.setdefault("listKind", names["kind"] + "List")

    def on_create(self, obj: JsonObject, view: ClusterView) -> None:
        """Accept or refuse the names, and have deletion wait for the objects."""
        obj["metadata"]["finalizers"] = sorted({*(obj["metadata"].get("finalizers") or ()), CLEANUP_FINALIZER})
        spec = obj["spec"]
        taken = _names_of_others(spec["group"], spec["names"]["plural"], view)
        refused = next((n for n in _all_names(spec["names"]) if n in taken), None)
        conditions = [_condition("NamesAccepted", "True", "NoConflicts", "no conflicts found")]
        if refused is None:
            text = "the initial names have been accepted"
            conditions.append(_condition("Established", "True", "InitialNamesAccepted", text))
        else:
            text = f'"{refused}" is already in use'
            conditions = [_condition("NamesAccepted", "False", "NamesConflict", text)]
            conditions.append(_condition("Established", "False", "NotAccepted", "not all names are accepted"))
        obj["status"] = {
            "acceptedNames": spec["names"] if refused is None else {},
            "conditions": conditions,
            "storedVersions": [v["name"] for v in spec["versions"] if v["storage"]],
        }

    def on_update(self, new: JsonObject, old: JsonObject, subresource: str) -> None:
        """Versions that objects may be stored in are remembered; the finalizer stays until the objects are gone."""
        if subresource == "status":
            return
        if not new["metadata"].get("deletionTimestamp"):
            new["metadata"]["finalizers"] = sorted({*(new["metadata"].get("finalizers") or ()), CLEANUP_FINALIZER})
        status = dict(new.get("status") or {})
        storage = [v["name"] for v in (new.get("spec") or {}).get("versions") or () if v.get("storage")]
        status["storedVersions"] = list(dict.fromkeys([*(status.get("storedVersions") or ()), *storage]))
        if is_established(old):
            status["acceptedNames"] = new["spec"]["names"]
        new["status"] = status

    def validate(self, obj: JsonObject, old: JsonObject | None, subresource: str) -> list[Cause]:
        """Names, versions, schemas, and what stays as it was."""
        if subresource == "status":
            return []
        spec, causes = obj["spec"], []
        names = spec["names"]
        expected = f"{names['plural']}.{spec['group']}"
        if obj["metadata"]["name"] != expected:
            text = f'must be spec.names.plural+"."+spec.group (here {expected})'
            causes.append(invalid_value("metadata.name", obj["metadata"]["name"], text))
        if "." not in spec["group"]:
            causes.append(invalid_value("spec.group", spec["group"], "should be a domain with at least one dot"))
        if (spec.get("conversion") or {}).get("strategy") != "None":
            text = 'the embedded server converts between versions only by the strategy "None"'
            causes.append(invalid_value("spec.conversion.strategy", spec["conversion"].get("strategy"), text))
        causes += _check_versions(spec)
        if old is not None:
            for path in ("group", "scope"):
                if old["spec"][path] != spec[path]:
                    causes.append(invalid_value(f"spec.{path}", spec[path], "field is immutable"))
            for path in ("plural", "kind"):
                if old["spec"]["names"][path] != names[path]:
                    causes.append(invalid_value(f"spec.names.{path}", names[path], "field is immutable"))
        return causes

    def on_delete(self, obj: JsonObject) -> None:
        """Say that the objects are being deleted first."""
        text = "CustomResource deletion is in progress"
        others = [c for c in obj["status"].get("conditions") or () if c["type"] != "Terminating"]
        obj["status"]["conditions"] = [*others, _condition("Terminating", "True", "InstanceDeletionInProgress", text)]


def is_established(crd: JsonObject) -> bool:
    """Whether the resource is served."""
    conditions = (crd.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)


def _condition(kind: str, status: str, reason: str, message: str) -> JsonObject:
    return {
        "type": kind,
        "status": status,
        "lastTransitionTime": timestamp(),
        "reason": reason,
        "message": message,
    }


def _all_names(names: dict[str, Any]) -> list[str]:
    return [names["plural"], names["singular"], *(names.get("shortNames") or ())]


def _names_of_others(group: str, plural: str, view: ClusterView) -> set[str]:
    others = (c["spec"] for c in view.all_of(CRD_KEY) if is_established(c))
    return {n for s in others if s["group"] == group and s["names"]["plural"] != plural for n in _all_names(s["names"])}


def _check_versions(spec: dict[str, Any]) -> list[Cause]:
    versions = spec.get("versions") or []
    if not versions:
        return [required("spec.versions", "must have at least one version")]
    causes: list[Cause] = []
    if sum(bool(v["storage"]) for v in versions) != 1:
        text = "must have exactly one version marked as storage version"
        causes.append(invalid_value("spec.versions", versions, text))
    seen: set[str] = set()
    for index, version in enumerate(versions):
        path = f"spec.versions[{index}]"
        if version["name"] in seen:
            text = f'Duplicate value: "{version["name"]}"'
            causes.append(Cause(f"{path}.name", "FieldValueDuplicate", text))
        seen.add(version["name"])
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if not isinstance(schema, dict):
            causes.append(required(f"{path}.schema.openAPIV3Schema", "schemas are required"))
        else:
            causes += check_structural(schema, f"{path}.schema.openAPIV3Schema")
        causes += _check_extras(version, path)
    return causes


def _check_extras(version: dict[str, Any], path: str) -> list[Cause]:
    causes = []
    scale = (version.get("subresources") or {}).get("scale")
    if scale is not None:
        for key, root in (("specReplicasPath", ".spec."), ("statusReplicasPath", ".status.")):
            if not str(scale.get(key, "")).startswith(root):
                text = f"should be a json path under {root[:-1]}"
                causes.append(invalid_value(f"{path}.subresources.scale.{key}", scale.get(key), text))
    for index, column in enumerate(version.get("additionalPrinterColumns") or ()):
        if not column["jsonPath"].startswith("."):
            where = f"{path}.additionalPrinterColumns[{index}].jsonPath"
            causes.append(invalid_value(where, column["jsonPath"], "must begin with a dot"))
    for index, field in enumerate(version.get("selectableFields") or ()):
        if not field["jsonPath"].startswith(".") or field["jsonPath"].startswith(".metadata"):
            text = "is an invalid path: must begin with a dot and must not point to fields in metadata"
            causes.append(invalid_value(f"{path}.selectableFields[{index}].jsonPath", field["jsonPath"], text))
    return causes
