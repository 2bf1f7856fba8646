"""Where a rule of a spec stands in the schema: at the deepest object that has all fields that it reads.

The API server evaluates every rule at each write, also of the status. A step along a path costs it in proportion to the
fields of the object, so rules on `spec` took it longer than everything else that it does for a write. A rule on an
object that is left out is not evaluated at all.
"""

from __future__ import annotations

import re
from typing import Any

from meshwright.crd.structural_schema import Schema

VALIDATIONS = "x-kubernetes-validations"

_READ = re.compile(r"\bself\.([a-z]\w*)(?!\w*\()((?:\.[a-z]\w*(?!\w*\())*)")
"""A field that a condition reads: its first step and the others, without a method that is called on it."""


def add_rule(spec: Schema, condition: str, validation: dict[str, Any]) -> None:
    """Add a rule to the schema of a spec: `condition` in CEL over `self`, the spec, and the rest of the validation."""
    node, field = spec, str(validation["fieldPath"])
    while (name := _only_object(node, condition, field)) is not None:
        condition = re.sub(rf"\bself\.{name}\.", "self.", condition.removeprefix(_guard(name)))
        node, field = node["properties"][name], field.removeprefix(f".{name}")
    rest = {key: value for key, value in validation.items() if key != "fieldPath"}
    node.setdefault(VALIDATIONS, []).append({"rule": condition, **({"fieldPath": field} if field else {}), **rest})


def fill_defaults(node: Schema) -> dict[str, Any]:
    """Complete the default of each object that has rules, because the API server checks them on the default as it is
    written, without those of its members. Return the members of the object that have a default.
    """
    members = {}
    for name, child in node.get("properties", {}).items():
        filled = fill_defaults(child)
        if "default" in child:
            members[name] = filled if child["type"] == "object" else child["default"]
    if VALIDATIONS in node and "default" in node:
        node["default"] = members
    return members


def rules_of(node: Schema, path: str = "") -> list[dict[str, Any]]:
    """All rules in a schema, with the path of their object before the path of their field."""
    own = [{**rule, "fieldPath": path + rule.get("fieldPath", "")} for rule in node.get(VALIDATIONS, ())]
    children = node.get("properties", {}).items()
    return own + [rule for name, child in children for rule in rules_of(child, f"{path}.{name}")]


def _guard(name: str) -> str:
    return f"!has(self.{name}) || "


def _only_object(node: Schema, condition: str, field: str) -> str | None:
    """The one member of an object that a condition reads, if it can stand there: an object with fields, which exists
    whenever the condition has to hold, and which the error names.
    """
    rest = condition
    names = {match[1] for match in _READ.finditer(condition)}
    if len(names) != 1:
        return None
    (name,) = names
    child = node["properties"].get(name, {})
    if "properties" not in child or (field != f".{name}" and not field.startswith(f".{name}.")):
        return None
    if condition.startswith(_guard(name)):
        rest = condition.removeprefix(_guard(name))
        if _has_outer_conditional(rest):
            return None
    elif name not in node.get("required", ()) and "default" not in child:
        return None
    # What asks for the object itself cannot stand in it.
    return name if all(match[2] for match in _READ.finditer(rest)) else None


def _has_outer_conditional(condition: str) -> bool:
    """Whether the condition is `a ? b : c`. In `guard || a ? b : c`, the guard is a part of `a`."""
    depth = 0
    for character in condition:
        depth += (character in "([{") - (character in ")]}")
        if character == "?" and not depth:
            return True
    return False
