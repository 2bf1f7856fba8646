"""Revisions: the hash of the parts of a spec that need a restart of the workers, such as `1-abcdef0123`.

The number before the hyphen is the scheme: which defaults an absent field has, and which fields are left out. Workers
keep the scheme with which they started. A later version therefore computes the same revision for them, although its
defaults differ, and restarts nobody.

The hash is that of a canonical form of the object's JSON: absent fields have the default of the scheme, keys are
sorted, integral numbers are integers, and null is absent. It does not depend on how a library writes the classes of the
API.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from meshwright.rules.spec_defaults import DEFAULTS, ELASTIC_SCHEME, NO_RESTART, SCHEME

Fields = dict[str, Any]
"""A spec as JSON."""

_DIGITS = 10


def revision_of_fields(fields: Mapping[str, Any], scheme: int = SCHEME) -> str:
    """The revision of a spec: the scheme, and ten hex digits.

    Raises:
        KeyError: the scheme is not known.
    """
    content = json.dumps(restarting_fields(fields, scheme), sort_keys=True, separators=(",", ":"))
    return f"{scheme}-{hashlib.sha256(content.encode()).hexdigest()[:_DIGITS]}"


def scheme_of(revision: str) -> int | None:
    """The scheme of a revision, also of a later version. None if the revision is empty or damaged."""
    number, separator, _ = revision.partition("-")
    return int(number) if separator and number.isascii() and number.isdigit() and len(number) < _DIGITS else None


def restarting_fields(fields: Mapping[str, Any], scheme: int = SCHEME) -> Fields:
    """The canonical form of the fields that determine plan, pods and ranks."""
    parts = with_defaults(fields, scheme)
    if scheme >= ELASTIC_SCHEME and "elastic" in parts:
        parts["replicas"] = "elastic"
        if (scaled := field_at(parts, "elastic.scaledBatch")) is not None:
            parts["scaledBatch"] = scaled
    for path in NO_RESTART[scheme]:
        set_field(parts, path, None)
    return parts


def with_defaults(fields: Mapping[str, Any], scheme: int = SCHEME) -> Fields:
    """A canonical copy in which every absent field has the default of the scheme."""
    filled: Fields = _canonical(fields)
    _add_defaults(filled, _tree(scheme))
    return filled


def without_defaults(fields: Mapping[str, Any], scheme: int) -> Fields:
    """A canonical copy without the values that `with_defaults` adds. Objects that contain other fields remain."""
    short: Fields = _canonical(fields)
    _drop_defaults(short, {}, _tree(scheme))
    return short


def without_later_defaults(requested: Mapping[str, Any], running: Mapping[str, Any]) -> Fields:
    """The requested spec without what only a later version of the CRD has added to it.

    An API server adds the defaults of its CRD to stored objects when they are read. A field that the running spec does
    not have, and that has its default in the requested one, is no edit.

    Args:
        requested: The spec of the object.
        running: The spec that the workers run, as it was stored.
    """
    same: Fields = _canonical(requested)
    _drop_defaults(same, running, _tree(SCHEME))
    return same


def field_at(fields: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None if it is absent."""
    value: Any = fields
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def set_field(fields: Fields, path: str, value: Any) -> None:
    """Set the value at a dotted path if the object around it exists. None removes it."""
    *parents, last = path.split(".")
    holder: Any = fields
    for name in parents:
        holder = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(holder, dict):
        return
    if value is None:
        holder.pop(last, None)
    else:
        holder[last] = value


def _canonical(value: Any) -> Any:
    """A copy in which integral numbers are integers, and null is absent from objects."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


@dataclass(slots=True)
class _Field:
    """A field with a default, or an object with such fields."""

    default: Any = None
    members: dict[str, _Field] = field(default_factory=dict)


@cache
def _tree(scheme: int) -> dict[str, _Field]:
    """The defaults of a scheme, by field. The members of a list are those of each of its items."""
    root = _Field()
    for path, value in DEFAULTS[scheme].items():
        node = root
        for name in path.replace("[]", "").split("."):
            node = node.members.setdefault(name, _Field())
        node.default = _canonical(value)
    return root.members


def _add_defaults(holder: Fields, tree: Mapping[str, _Field]) -> None:
    for name, entry in tree.items():
        if entry.default is not None and name not in holder:
            holder[name] = _canonical(entry.default)
        if entry.members and name in holder:
            for item in _objects(holder[name]):
                _add_defaults(item, entry.members)


def _drop_defaults(holder: Fields, other: Mapping[str, Any], tree: Mapping[str, _Field]) -> None:
    """Remove values that are defaults, unless `other` has the field too. Members first, so that objects get empty."""
    for name, entry in tree.items():
        if name not in holder:
            continue
        beside = _objects(other.get(name))
        for index, item in enumerate(_objects(holder[name])):
            _drop_defaults(item, beside[index] if index < len(beside) else {}, entry.members)
        if name not in other and entry.default is not None and holder[name] == entry.default:
            del holder[name]


def _objects(value: Any) -> list[Fields]:
    """The objects whose members a field has: its value, or the items of its list."""
    if isinstance(value, dict):
        return [value]
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
