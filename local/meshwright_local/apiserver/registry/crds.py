"""CustomResourceDefinitions: their validation, and the resources that they define.

Definitions are accepted and served within the write that creates them, so `Established` is true in its response. A
structural schema has a type for every field and keeps value checks (`anyOf`, `not`, ...) apart from structure, so it
can prune, default and merge without guessing. CEL rules and patterns are compiled when the definition is written, so
errors appear then and not when an object is validated.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver import status_errors
from meshwright_local.apiserver.resource_types import Column, Resource, Rules, set_condition
from meshwright_local.apiserver.schema.cel import REASONS, CelError, compile_expression
from meshwright_local.apiserver.schema.structural import apply_defaults, custom_schema, prune, published_schema
from meshwright_local.apiserver.schema.validation import compile_pattern, validate
from meshwright_local.apiserver.status_errors import Cause
from meshwright_local.apiserver.store import ResourceKey, Store
from meshwright_local.kube import timestamps

CRDS = ("apiextensions.k8s.io", "customresourcedefinitions")
CLEANUP_FINALIZER = "customresourcecleanup.apiextensions.k8s.io"
_VERSION = re.compile(r"v(\d+)(?:(alpha|beta)(\d+))?")
_TYPES = ("object", "array", "string", "integer", "number", "boolean")
_UNSTRUCTURAL = ("$ref", "definitions", "dependencies", "id", "patternProperties", "additionalItems")
_SCALE_ROOTS = {"specReplicasPath": ".spec.", "statusReplicasPath": ".status."}
_UNBRANCHED = ("type", "default", "additionalProperties", "nullable", "title", "description")


class CrdRules(Rules):
    """CustomResourceDefinitions."""

    def defaults(self, obj: KubeObject) -> None:
        """Default the names from the kind, and the conversion to none."""
        spec = obj["spec"]
        spec.setdefault("conversion", {"strategy": "None"})
        kind = spec["names"]["kind"]
        spec["names"] |= {"singular": kind.lower(), "listKind": f"{kind}List", **spec["names"]}

    def create(self, obj: KubeObject, store: Store) -> None:
        """Accept or reject the names, and add the finalizer for the objects."""
        obj["metadata"]["finalizers"] = sorted({*(obj["metadata"].get("finalizers") or ()), CLEANUP_FINALIZER})
        spec, now = obj["spec"], timestamps.now()
        others = [c["spec"] for c in store.all(CRDS) if is_established(c) and c["spec"]["group"] == spec["group"]]
        taken = {name for s in others for name in _all_names(s["names"])}
        refused = next((name for name in _all_names(spec["names"]) if name in taken), None)
        stored = [version["name"] for version in spec["versions"] if version["storage"]]
        obj["status"] = {"acceptedNames": spec["names"] if refused is None else {}, "storedVersions": stored}
        if refused is None:
            accepted, text = ("True", "NoConflicts", "no conflicts found"), "the initial names have been accepted"
            established = ("True", "InitialNamesAccepted", text)
        else:
            accepted = ("False", "NamesConflict", f'"{refused}" is already in use')
            established = ("False", "NotAccepted", "not all names are accepted")
        for kind, (status, reason, message) in (("NamesAccepted", accepted), ("Established", established)):
            set_condition(obj, kind, status, now, reason=reason, message=message)

    def update(self, new: KubeObject, old: KubeObject, subresource: str) -> None:
        """Retain the stored versions, and the finalizer until the objects are gone."""
        if subresource == "status":
            return
        if not new["metadata"].get("deletionTimestamp"):
            new["metadata"]["finalizers"] = sorted({*(new["metadata"].get("finalizers") or ()), CLEANUP_FINALIZER})
        status = dict(new.get("status") or {})
        storage = [v["name"] for v in new["spec"].get("versions") or () if v.get("storage")]
        status["storedVersions"] = list(dict.fromkeys([*(status.get("storedVersions") or ()), *storage]))
        new["status"] = status | ({"acceptedNames": new["spec"]["names"]} if is_established(old) else {})

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        """Validate names, versions, schemas and immutable fields."""
        if subresource == "status":
            return []
        spec, names, causes = obj["spec"], obj["spec"]["names"], []
        expected = f"{names['plural']}.{spec['group']}"
        if obj["metadata"]["name"] != expected:
            text = f'must be spec.names.plural+"."+spec.group (here {expected})'
            causes.append(status_errors.invalid_value("metadata.name", obj["metadata"]["name"], text))
        if "." not in spec["group"]:
            causes.append(
                status_errors.invalid_value("spec.group", spec["group"], "should be a domain with at least one dot")
            )
        if spec["conversion"].get("strategy") != "None":
            text = 'the embedded server converts between versions only by the strategy "None"'
            causes.append(
                status_errors.invalid_value("spec.conversion.strategy", spec["conversion"].get("strategy"), text)
            )
        was = old["spec"] if old is not None else spec
        fixed = [(key, spec[key], was[key]) for key in ("group", "scope")]
        fixed += [(f"names.{key}", names[key], was["names"][key]) for key in ("plural", "kind")]
        causes += [
            status_errors.invalid_value(f"spec.{key}", now, "field is immutable")
            for key, now, before in fixed
            if now != before
        ]
        names_left = {version["name"] for version in spec.get("versions") or ()}
        stored = (obj.get("status") or {}).get("storedVersions") or ()
        causes += [
            status_errors.invalid_value(
                f"status.storedVersions[{index}]", name, "missing from spec.versions: objects may be stored in it"
            )
            for index, name in enumerate(stored)
            if name not in names_left
        ]
        return causes + _check_versions(spec.get("versions") or [])

    def delete(self, obj: KubeObject) -> None:
        """Set the condition that the objects are being deleted first."""
        text = "CustomResource deletion is in progress"
        set_condition(obj, "Terminating", "True", timestamps.now(), reason="InstanceDeletionInProgress", message=text)


def is_established(crd: KubeObject) -> bool:
    """Return whether the resource is served."""
    conditions = (crd.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)


def crd_key(crd: KubeObject) -> ResourceKey:
    """Return the store key of a definition's objects."""
    return crd["spec"]["group"], crd["spec"]["names"]["plural"]


def version_rank(version: str) -> tuple[int, int, int, str]:
    """Return the sort key of versions: stable before beta before alpha, newer before older, others last by name."""
    match = _VERSION.fullmatch(version)
    if match is None:
        return 3, 0, 0, version
    major, stage, minor = match.groups()
    return {None: 0, "beta": 1, "alpha": 2}[stage], -int(major), -int(minor or 0), version


def custom_resources(crd: KubeObject) -> Iterator[Resource]:
    """Return the resources of a definition: one for each served version."""
    spec, names = crd["spec"], crd["spec"]["names"]
    for version in crd["spec"]["versions"] if is_established(crd) else ():
        if not version.get("served"):
            continue
        subresources = version.get("subresources") or {}
        raw = (version.get("schema") or {}).get("openAPIV3Schema")
        gvk = {"group": spec["group"], "version": version["name"], "kind": names["kind"]}
        yield Resource(
            spec["group"],
            version["name"],
            names["plural"],
            names["kind"],
            custom_schema(raw),
            Rules(),
            published_schema(raw, gvk),
            namespaced=spec["scope"] == "Namespaced",
            singular=names.get("singular") or names["kind"].lower(),
            list_kind=names.get("listKind") or names["kind"] + "List",
            short_names=tuple(names.get("shortNames") or ()),
            categories=tuple(names.get("categories") or ()),
            has_status="status" in subresources,
            counts_generation=True,
            fields={f["jsonPath"].lstrip("."): "" for f in version.get("selectableFields") or ()},
            scale={key: path.lstrip(".") for key, path in (subresources.get("scale") or {}).items()},
            custom=True,
            deprecation=_deprecation(version, gvk),
            columns=tuple(
                Column(c["name"], c["type"], c["jsonPath"], c.get("priority", 0), c.get("format", ""))
                for c in version.get("additionalPrinterColumns") or ()
            ),
        )


def _deprecation(version: KubeObject, gvk: KubeObject) -> str:
    """The warning for who uses a version; empty unless it is deprecated."""
    if not version.get("deprecated"):
        return ""
    standard = f"{gvk['group']}/{gvk['version']} {gvk['kind']} is deprecated"
    return str(version.get("deprecationWarning") or standard)


def _all_names(names: KubeObject) -> list[str]:
    return [names["plural"], names["singular"], *(names.get("shortNames") or ())]


def _check_versions(versions: list[Any]) -> list[Cause]:
    if not versions:
        return [status_errors.required("spec.versions", "must have at least one version")]
    causes: list[Cause] = []
    schemas = [(version.get("schema") or {}).get("openAPIV3Schema") for version in versions]
    shared = all(schema == schemas[0] for schema in schemas)  # the server has one place for a schema of all versions
    if sum(bool(v["storage"]) for v in versions) != 1:
        text = "must have exactly one version marked as storage version"
        causes.append(status_errors.invalid_value("spec.versions", versions, text))
    for index, version in enumerate(versions):
        path = f"spec.versions[{index}]"
        if version["name"] in [earlier["name"] for earlier in versions[:index]]:
            causes.append(status_errors.duplicate(f"{path}.name", version["name"]))
        schema = schemas[index]
        if isinstance(schema, dict):
            if not (shared and index):
                where = "spec.validation" if shared else f"{path}.schema"
                causes += _structural_causes(json.dumps(schema), f"{where}.openAPIV3Schema")
        else:
            causes.append(status_errors.required(f"{path}.schema.openAPIV3Schema", "schemas are required"))
        scale = (version.get("subresources") or {}).get("scale") or {}
        paths = [(f"subresources.scale.{key}", text, _SCALE_ROOTS.get(key, ".")) for key, text in scale.items()]
        for key in ("additionalPrinterColumns", "selectableFields"):
            paths += [(f"{key}[{i}].jsonPath", c["jsonPath"], ".") for i, c in enumerate(version.get(key) or ())]
        wrong = [(where, text, root) for where, text, root in paths if not str(text).startswith(root)]
        causes += [
            status_errors.invalid_value(f"{path}.{where}", text, f"must begin with {root}")
            for where, text, root in wrong
        ]
    return causes


@lru_cache(maxsize=16)
def _structural_causes(schema: str, path: str) -> tuple[Cause, ...]:
    """The errors of a schema, as JSON. Every write of a definition checks it, and most writes leave it as it was."""
    return tuple(check_structural(json.loads(schema), path))


def check_structural(schema: KubeObject, path: str) -> list[Cause]:
    """Return the errors of a schema that is not structural; `path` is its path in messages."""
    causes: list[Cause] = []
    if schema.get("type") != "object":
        causes.append(status_errors.invalid_value(f"{path}.type", schema.get("type"), "must be object at the root"))
    metadata = (schema.get("properties") or {}).get("metadata") or {}
    unexpected = set(metadata) - {"type", "description", "properties"}
    if unexpected or set(metadata.get("properties") or ()) - {"name", "generateName"}:
        text = "must not specify anything other than name and generateName, but metadata is implicitly specified"
        causes.append(status_errors.not_allowed(f"{path}.properties[metadata]", text))
    _check_place(causes, schema, path, comparable=True)
    return causes or _check_defaults(schema, path)


def _check_place(causes: list[Cause], node: KubeObject, path: str, *, comparable: bool) -> None:
    """Check a schema and all below it; `comparable`: its earlier value can be identified, for `oldSelf`."""
    causes += [
        status_errors.not_allowed(f"{path}.{key}", "is not allowed in a structural schema")
        for key in _UNSTRUCTURAL
        if key in node
    ]
    causes += [*_check_shape(node, path), *_check_list(node, path), *_check_rules(node, path, comparable=comparable)]
    if "pattern" in node:
        try:
            compile_pattern(node["pattern"])
        except re.error as error:
            text = f"must be a valid regular expression, but isn't: {error}"
            causes.append(status_errors.invalid_value(f"{path}.pattern", node["pattern"], text))
    for key in ("allOf", "anyOf", "oneOf"):
        for index, branch in enumerate(node.get(key) or ()):
            causes += _check_branch(node, branch, f"{path}.{key}[{index}]")
    causes += _check_branch(node, node.get("not") or {}, f"{path}.not")
    for key, sub in (node.get("properties") or {}).items():
        _check_place(causes, sub, f"{path}.properties[{key}]", comparable=comparable)
    if isinstance(node.get("additionalProperties"), dict):
        _check_place(causes, node["additionalProperties"], f"{path}.additionalProperties", comparable=comparable)
    if isinstance(node.get("items"), dict):
        keyed = node.get("x-kubernetes-list-type") == "map"
        _check_place(causes, node["items"], f"{path}.items", comparable=comparable and keyed)


def _check_shape(node: KubeObject, path: str) -> list[Cause]:
    kind, causes = node.get("type"), []
    if kind is None:
        if not (node.get("x-kubernetes-int-or-string") or node.get("x-kubernetes-preserve-unknown-fields")):
            causes.append(status_errors.required(f"{path}.type", "must not be empty for specified object fields"))
    elif kind not in _TYPES:
        causes.append(status_errors.unsupported_value(f"{path}.type", kind, _TYPES))
    if kind == "array" and not isinstance(node.get("items"), dict):
        causes.append(status_errors.required(f"{path}.items", "must be specified"))
    if node.get("uniqueItems"):
        causes.append(status_errors.not_allowed(f"{path}.uniqueItems", "uniqueItems cannot be set to true"))
    if node.get("properties") and node.get("additionalProperties") is not None:
        text = "additionalProperties and properties are mutual exclusive"
        causes.append(status_errors.not_allowed(f"{path}.additionalProperties", text))
    return causes


def _check_list(node: KubeObject, path: str) -> list[Cause]:
    causes, keys, items = [], node.get("x-kubernetes-list-map-keys") or [], node.get("items") or {}
    where = f"{path}.x-kubernetes-list-map-keys"
    if node.get("x-kubernetes-list-type") == "map" and not keys:
        causes.append(status_errors.required(where, "must not be empty if x-kubernetes-list-type is map"))
    for key in keys:
        sub = (items.get("properties") or {}).get(key)
        if sub is None:
            causes.append(status_errors.invalid_value(where, key, "entries must all be names of item properties"))
        elif key not in (items.get("required") or ()) and "default" not in sub:
            text = "is in x-kubernetes-list-map-keys, so it must have a default or be a required property"
            causes.append(status_errors.required(f"{path}.items.properties[{key}].default", text))
    return causes


def _check_branch(node: KubeObject, branch: KubeObject, path: str) -> list[Cause]:
    """Check a branch of `anyOf` and the like, which may only validate values, not define structure."""
    causes: list[Cause] = []
    for key in branch:
        typed = key == "type" and node.get("x-kubernetes-int-or-string")
        if (key in _UNBRANCHED or key.startswith("x-kubernetes-")) and not typed:
            causes.append(status_errors.not_allowed(f"{path}.{key}", "must be empty to be structural"))
    for key, sub in (branch.get("properties") or {}).items():
        within = (node.get("properties") or {}).get(key)
        if within is None and not isinstance(node.get("additionalProperties"), dict):
            causes.append(status_errors.required(f"{path}.properties[{key}]", "because it is defined in the branch"))
        causes += _check_branch(within or {}, sub, f"{path}.properties[{key}]")
    return causes


def _check_rules(node: KubeObject, path: str, *, comparable: bool) -> list[Cause]:
    causes = []
    for index, rule in enumerate(node.get("x-kubernetes-validations") or ()):
        where = f"{path}.x-kubernetes-validations[{index}]"
        for key in ("rule", "messageExpression"):
            try:
                transition = key in rule and compile_expression(rule[key]).transition
            except CelError as error:
                causes.append(status_errors.invalid_value(f"{where}.{key}", rule[key], str(error)))
                continue
            if transition and not comparable:
                text = "oldSelf cannot be used on the uncorrelatable portion of the schema"
                causes.append(status_errors.invalid_value(f"{where}.{key}", rule[key], text))
        if rule.get("reason", REASONS[0]) not in REASONS:
            causes.append(status_errors.unsupported_value(f"{where}.reason", rule["reason"], REASONS))
    return causes


def _check_defaults(node: KubeObject, path: str) -> list[Cause]:
    """Check that defaults are valid. Otherwise every object that needs them would be rejected."""
    causes: list[Cause] = []
    if "default" in node:
        value, where = copy.deepcopy(node["default"]), f"{path}.default"
        place = custom_schema({"properties": {"it": {**node, "x-kubernetes-validations": []}}}).properties["it"]
        if prune(place, value):
            text = f"Invalid value: {json.dumps(node['default'], separators=(',', ':'))}: must not have unknown fields"
            causes.append(Cause(where, "FieldValueInvalid", text))
        apply_defaults(place, value)
        for cause in validate(place, value):
            below = "" if cause.field in ("", "<nil>") else f".{cause.field}"
            causes.append(cause._replace(field=where + below))
    for key, sub in (node.get("properties") or {}).items():
        causes += _check_defaults(sub, f"{path}.properties[{key}]")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            causes += _check_defaults(node[key], f"{path}.{key}")
    return causes
