"""Whether the schema of a CustomResourceDefinition is structural, as `apiextensions.k8s.io/v1` requires.

A structural schema says of every place what type it has, keeps value checks (`anyOf`, `not`, ...) apart from structure,
and so can be pruned, defaulted and merged without guessing. CEL rules and patterns are compiled here, so that a mistake
shows when the definition is written and not when an object meets it.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from meshwright.local.apiserver.errors import Cause, invalid_value, not_allowed, required, shown
from meshwright.local.apiserver.schema.cel import CelError, compile_expression
from meshwright.local.apiserver.schema.cel_budget import check_budget
from meshwright.local.apiserver.schema.custom import custom_schema
from meshwright.local.apiserver.schema.formats import compile_pattern
from meshwright.local.apiserver.schema.pruning import apply_defaults, prune
from meshwright.local.apiserver.schema.validation import validate

_TYPES = ("object", "array", "string", "integer", "number", "boolean")
_FORBIDDEN_EVERYWHERE = ("$ref", "definitions", "dependencies", "id", "patternProperties", "additionalItems")
_FORBIDDEN_IN_BRANCHES = ("type", "default", "additionalProperties", "nullable", "title", "description")
_REASONS = ("FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired", "FieldValueDuplicate")


def check_structural(schema: dict[str, Any], path: str) -> list[Cause]:
    """What is not structural in a schema; `path` names it in messages."""
    causes = _Check(path).run(schema)
    return causes or [*_check_defaults(schema, path), *check_budget(schema, path)]


class _Check:
    def __init__(self, path: str) -> None:
        self._path = path
        self._causes: list[Cause] = []

    def run(self, schema: dict[str, Any]) -> list[Cause]:
        if schema.get("type") != "object":
            self._causes.append(invalid_value(f"{self._path}.type", schema.get("type"), "must be object at the root"))
        self._metadata(schema)
        self._place(schema, self._path, comparable=True)
        return self._causes

    def _metadata(self, schema: dict[str, Any]) -> None:
        metadata = (schema.get("properties") or {}).get("metadata") or {}
        if set(metadata) - {"type", "description", "properties"} or set(metadata.get("properties") or ()) - {
            "name",
            "generateName",
        }:
            text = "must not specify anything other than name and generateName, but metadata is implicitly specified"
            self._causes.append(not_allowed(f"{self._path}.properties[metadata]", text))

    def _place(self, node: dict[str, Any], path: str, *, comparable: bool) -> None:
        self._type(node, path)
        self._causes += [
            not_allowed(f"{path}.{key}", "is not allowed in a structural schema")
            for key in _FORBIDDEN_EVERYWHERE
            if key in node
        ]
        if node.get("properties") and node.get("additionalProperties") is not None:
            text = "additionalProperties and properties are mutual exclusive"
            self._causes.append(not_allowed(f"{path}.additionalProperties", text))
        self._list(node, path)
        self._values(node, path)
        self._rules(node, path, comparable)
        for key, sub in (node.get("properties") or {}).items():
            self._place(sub, f"{path}.properties[{key}]", comparable=comparable)
        if isinstance(node.get("additionalProperties"), dict):
            self._place(node["additionalProperties"], f"{path}.additionalProperties", comparable=comparable)
        if isinstance(node.get("items"), dict):
            keyed = node.get("x-kubernetes-list-type") == "map"
            self._place(node["items"], f"{path}.items", comparable=comparable and keyed)

    def _type(self, node: dict[str, Any], path: str) -> None:
        kind = node.get("type")
        if kind is None:
            if not (node.get("x-kubernetes-int-or-string") or node.get("x-kubernetes-preserve-unknown-fields")):
                self._causes.append(required(f"{path}.type", "must not be empty for specified object fields"))
        elif kind not in _TYPES:
            supported = ", ".join(shown(t) for t in _TYPES)
            text = f"Unsupported value: {shown(kind)}: supported values: {supported}"
            self._causes.append(Cause(f"{path}.type", "FieldValueNotSupported", text))
        if kind == "array" and not isinstance(node.get("items"), dict):
            self._causes.append(required(f"{path}.items", "must be specified"))
        if node.get("uniqueItems"):
            self._causes.append(not_allowed(f"{path}.uniqueItems", "uniqueItems cannot be set to true"))

    def _list(self, node: dict[str, Any], path: str) -> None:
        kind, keys = node.get("x-kubernetes-list-type"), node.get("x-kubernetes-list-map-keys") or []
        if kind == "map" and not keys:
            text = "must not be empty if x-kubernetes-list-type is map"
            self._causes.append(required(f"{path}.x-kubernetes-list-map-keys", text))
        items = node.get("items") or {}
        for key in keys:
            sub = (items.get("properties") or {}).get(key)
            if sub is None:
                where = f"{path}.x-kubernetes-list-map-keys"
                self._causes.append(invalid_value(where, key, "entries must all be names of item properties"))
            elif key not in (items.get("required") or ()) and "default" not in sub:
                text = "is in x-kubernetes-list-map-keys, so it must have a default or be a required property"
                self._causes.append(required(f"{path}.items.properties[{key}].default", text))

    def _values(self, node: dict[str, Any], path: str) -> None:
        if "pattern" in node:
            try:
                compile_pattern(node["pattern"])
            except re.error as error:
                text = f"must be a valid regular expression, but isn't: {error}"
                self._causes.append(invalid_value(f"{path}.pattern", node["pattern"], text))
        branches = [
            (f"{path}.{k}[{i}]", b) for k in ("allOf", "anyOf", "oneOf") for i, b in enumerate(node.get(k) or ())
        ]
        if isinstance(node.get("not"), dict):
            branches.append((f"{path}.not", node["not"]))
        for where, branch in branches:
            self._branch(node, branch, where)

    def _branch(self, node: dict[str, Any], branch: dict[str, Any], path: str) -> None:
        for key in branch:
            typed = key == "type" and node.get("x-kubernetes-int-or-string")
            if (key in _FORBIDDEN_IN_BRANCHES or key.startswith("x-kubernetes-")) and not typed:
                self._causes.append(not_allowed(f"{path}.{key}", "must be empty to be structural"))
        for key, sub in (branch.get("properties") or {}).items():
            within = (node.get("properties") or {}).get(key)
            if within is None and not isinstance(node.get("additionalProperties"), dict):
                self._causes.append(required(f"{path}.properties[{key}]", "because it is defined in the branch"))
            self._branch(within or {}, sub, f"{path}.properties[{key}]")

    def _rules(self, node: dict[str, Any], path: str, comparable: bool) -> None:
        for index, rule in enumerate(node.get("x-kubernetes-validations") or ()):
            where = f"{path}.x-kubernetes-validations[{index}]"
            for key in ("rule", "messageExpression"):
                if key not in rule:
                    continue
                try:
                    expression = compile_expression(rule[key])
                except CelError as error:
                    self._causes.append(invalid_value(f"{where}.{key}", rule[key], str(error)))
                    continue
                if expression.transition and not comparable:
                    text = "oldSelf cannot be used on the uncorrelatable portion of the schema"
                    self._causes.append(invalid_value(f"{where}.{key}", rule[key], text))
            if rule.get("reason", _REASONS[0]) not in _REASONS:
                text = f"Unsupported value: {shown(rule['reason'])}: supported values: {', '.join(_REASONS)}"
                self._causes.append(Cause(f"{where}.reason", "FieldValueNotSupported", text))


def _check_defaults(schema: dict[str, Any], path: str) -> list[Cause]:
    """Defaults must fit the place they are for, or every object that needs them would be refused."""
    causes: list[Cause] = []

    def visit(node: dict[str, Any], where: str) -> None:
        if "default" in node:
            value = copy.deepcopy(node["default"])
            part = custom_schema({**node, "x-kubernetes-validations": []})
            part.properties = {k: v for k, v in part.properties.items() if k in (node.get("properties") or {})}
            dropped = prune(part, value)
            apply_defaults(part, value)
            causes.extend(invalid_value(f"{where}.default", value, f"must not have unknown field {d}") for d in dropped)
            causes.extend(Cause(f"{where}.default", c.reason, f"{c.field}: {c.message}") for c in validate(part, value))
        for key, sub in (node.get("properties") or {}).items():
            visit(sub, f"{where}.properties[{key}]")
        for key in ("items", "additionalProperties"):
            if isinstance(node.get(key), dict):
                visit(node[key], f"{where}.{key}")

    visit(schema, path)
    return causes
