"""Checks a value against the structural schema of the CRD, strictly as the API server does at admission."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.api.base import CLAIM_NAME, IMAGE, QUANTITY
from meshwright.api.checkpoint import AGE, EVERY
from meshwright.api.spec import MANAGER_PATTERN
from meshwright.crd.field_names import places_of, same_name
from meshwright.crd.structural_schema import Schema

_NAMES = {
    "object": "an object",
    "array": "a list",
    "string": "a string",
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
}
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
_MAX_SIMILAR = 2
_MAX_LISTED = 12
CHOICE = re.compile(r"\^\(([A-Za-z]+(?:\|[A-Za-z]+)+)\)\$")
"""A pattern that is a list of words."""
FORMS = {
    QUANTITY: "must be a quantity such as `64Gi`, `1.5T` or `500m`",
    AGE: "must be a number of seconds, minutes, hours or days, such as `90s`, `30m`, `12h` or `7d`",
    EVERY: "must be `Auto`, or a number of seconds, minutes, hours or days, such as `90s`, `30m` or `12h`",
    CLAIM_NAME: "must be the name of a PersistentVolumeClaim: lower-case letters, digits, `-` and `.` between them",
    IMAGE: "must be the name of an image, without spaces",
    "^/": "must be an absolute path, such as `/models/llama`",
    r"^/[^:]*[^:/]$": "must be an absolute path without `:` and without `/` at its end, such as `/models`",
    r"^[^/].*$": "must be a path below the root of the volume or URI, without `/` at its beginning",
    r"^[a-z][a-z0-9+.-]*://[^\s]+$": "must be a URI, such as `s3://bucket/prefix`",
    r"^[a-z][a-z0-9+.-]*://.+$": "must be a URI, such as `s3://bucket/prefix`",
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$": "must have only lower-case letters, digits and `-` between them",
    r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$": "must have only lower-case letters, digits, `.` and `-` between them",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "must have only letters, digits and `_`, and not begin with a digit",
    r"^https?://[^/?#@\s]+/?$": "must be an address without a path, such as `https://s3.example.com`",
    MANAGER_PATTERN: "must be `domain/name`, such as `kueue.x-k8s.io/multikueue`",
    r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$": "must be the name of an extended resource, such as `nvidia.com/gpu`",
}
"""Patterns of the schema in words."""
_ALMOST_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(i?)(?:b|bytes?)?", re.IGNORECASE)
_ALMOST_DURATION = re.compile(
    r"([1-9][0-9]{0,5})\s*([smhd])(?:ecs?|econds?|ins?|inutes?|rs?|ours?|ays?)?", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class ManifestProblem:
    """One thing that the cluster would reject."""

    field: str
    """Path in the manifest, such as `spec.parallelism.tensor`."""
    message: str
    """What must hold and the fix."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def check_value(value: Any, schema: Schema, path: str, root: Schema | None = None) -> Iterator[ManifestProblem]:
    """The problems of a value, and of all values in it, by a schema.

    Args:
        value: the value.
        schema: its schema.
        path: where it is.
        root: the schema in which the fields that this one does not have are looked up. By default this one.
    """
    kind, root = schema["type"], root or schema
    if not _is_of(value, kind):
        yield ManifestProblem(path, _wrong_type(value, schema))
        return
    if problem := _out_of_bounds(value, schema):
        yield ManifestProblem(path, problem)
    if kind == "object":
        yield from _check_object(value, schema, path, root)
    elif kind == "array":
        for index, item in enumerate(value):
            yield from check_value(item, schema["items"], f"{path}[{index}]", root)
        yield from _duplicates(value, schema, path)


def _check_object(value: Mapping[str, Any], schema: Schema, path: str, root: Schema) -> Iterator[ManifestProblem]:
    known, rest = schema.get("properties", {}), schema.get("additionalProperties")
    for name in schema.get("required", ()):
        if value.get(name) is None:
            yield ManifestProblem(f"{path}.{name}", "is missing")
    for name, part in value.items():
        where = f"{path}.{name}"
        if name in known:
            if part is not None:  # the API server drops a null
                yield from check_value(part, known[name], where, root)
        elif isinstance(rest, dict):
            yield from check_value(part, rest, where, root)
        else:
            yield ManifestProblem(where, unknown_field(str(name), tuple(known), places_of(str(name), path, root)))


def _duplicates(items: list[Any], schema: Schema, path: str) -> Iterator[ManifestProblem]:
    """Items of a set, or of a list that is a map, that are there twice."""
    keys = schema.get("x-kubernetes-list-map-keys", ())
    if not keys and schema.get("x-kubernetes-list-type") != "set":
        return
    seen: list[Any] = []
    for index, item in enumerate(items):
        identity = [item.get(key) for key in keys] if keys and isinstance(item, Mapping) else item
        if identity in seen:
            named = ", ".join(f"{key} `{item.get(key)}`" for key in keys) if keys else f"`{item}`"
            yield ManifestProblem(f"{path}[{index}]", f"is there twice: {named}")
        seen.append(identity)


def _is_of(value: Any, kind: str) -> bool:
    if kind == "boolean":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    expected: dict[str, type | tuple[type, ...]] = {
        "number": (int, float),
        "string": str,
        "array": list,
        "object": Mapping,
    }
    return isinstance(value, expected[kind])


def _wrong_type(value: Any, schema: Schema) -> str:
    kind = schema["type"]
    message = f"must be {_NAMES[kind]}, got {kind_of(value)}"
    if kind in ("integer", "number") and isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return message
        return f"{message}: write {int(number) if number.is_integer() else number:g}" if number == number else message
    if kind == "string" and isinstance(value, bool):
        words = "y, yes, on and true" if value else "n, no, off and false"
        return f'{message}: write "{yaml_text(value)}", or the word in the file in quotes: YAML reads {words} alike'
    if kind == "string" and isinstance(value, int | float):
        return f'{message}: write "{yaml_text(value)}"'
    if kind == "array" and isinstance(value, str) and schema["items"]["type"] == "string":
        return f"{message}: write {json.dumps(_words(value))}"
    if kind == "object" and schema.get("properties"):
        return f"{message}: its fields are {_listed(tuple(schema['properties']))}"
    return message


def _words(text: str) -> list[str]:
    """The words of a command, as a shell divides them."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def kind_of(value: Any) -> str:
    """The kind of a value and, if it is short, the value."""
    if value is None:
        return "nothing"
    name = _NAMES.get(_KINDS.get(type(value), ""), type(value).__name__)
    if isinstance(value, dict | list):
        return name
    return f'{name} ("{value}")' if isinstance(value, str) else f"{name} ({yaml_text(value)})"


def yaml_text(value: Any) -> str:
    """A value as YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _out_of_bounds(value: Any, schema: Schema) -> str:
    """Which bound of its schema a value breaks; empty if it breaks none."""
    if "enum" in schema and value not in schema["enum"]:
        return _unknown_value(value, schema["enum"])
    if isinstance(value, str):
        return _bad_string(value, schema)
    if isinstance(value, list | Mapping):
        return _bad_size(value, schema)
    if not isinstance(value, bool):
        return _bad_number(value, schema)
    return ""


def _bad_number(value: float, schema: Schema) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum", False), schema.get("exclusiveMaximum", False)
    if least is not None and (value <= least if above else value < least):
        return f"must be {'greater than' if above else 'at least'} {least}, got {value}"
    if most is not None and (value >= most if below else value > most):
        return f"must be {'less than' if below else 'at most'} {most}, got {value}"
    return ""


def _bad_string(value: str, schema: Schema) -> str:
    least, pattern = schema.get("minLength", 0), schema.get("pattern")
    if not value and least:
        return "must not be empty"
    if len(value) > schema.get("maxLength", len(value)):
        return f"must have at most {schema['maxLength']} characters, got {len(value)}"
    if pattern is not None and not re.search(pattern, value):
        return _wrong_form(value, pattern)
    return f"must have at least {least} characters" if len(value) < least else ""


def _wrong_form(value: str, pattern: str) -> str:
    """What a string must look like that does not match a pattern, and the nearest one that does."""
    if choice := CHOICE.fullmatch(pattern):
        return _unknown_value(value, choice[1].split("|"))
    message = f"{FORMS.get(pattern, f'must match `{pattern}`')}, got `{value}`"
    nearest = ""
    if pattern == QUANTITY and (found := _ALMOST_QUANTITY.fullmatch(value.strip())):
        unit = found[2].upper() + found[3].lower()
        nearest = found[1] + ("k" if unit == "K" else unit)
    elif pattern in (AGE, EVERY) and (found := _ALMOST_DURATION.fullmatch(value.strip())):
        nearest = found[1] + found[2].lower()
    elif pattern in (CLAIM_NAME, IMAGE):
        nearest = "".join(value.split()) if pattern == IMAGE else re.sub(r"[^a-z0-9.]+", "-", value.lower()).strip("-.")
    return f"{message}: write `{nearest}`" if nearest and re.search(pattern, nearest) else message


def _bad_size(value: Any, schema: Schema) -> str:
    least = schema.get("minItems", 0)
    most: int = schema.get("maxItems") or schema.get("maxProperties") or len(value)
    if not least <= len(value) <= most:
        return f"must have {least} to {most} entries, got {len(value)}"
    return ""


def _unknown_value(value: Any, allowed: list[Any]) -> str:
    texts = [str(one) for one in allowed]
    close = _similar(str(value), texts)
    if close:
        return f"unknown value `{value}`: did you mean {close}?"
    return f"unknown value `{value}`: use one of {', '.join(texts)}"


def unknown_field(name: str, known: Sequence[str], places: Sequence[str] = ()) -> str:
    """The message about a field that does not exist.

    Args:
        name: the field.
        known: the fields that exist in its place.
        places: the paths of fields elsewhere that this one may stand for.
    """
    same = next((one for one in known if same_name(one, name)), None)
    if same is not None:
        return f"unknown field: write `{same}`"
    if places:
        return f"unknown field here: did you mean {' or '.join(f'`{place}`' for place in places)}?"
    close = _similar(name, known)
    return f"unknown field: {f'did you mean {close}?' if close else f'use one of {_listed(known)}'}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"{', '.join(sorted(names)[:_MAX_LISTED])}{more}"


def _similar(name: str, known: Sequence[str]) -> str:
    """The most similar of the known names, as text; empty if none is similar. Case is ignored."""
    by_lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), by_lower, _MAX_SIMILAR, cutoff=0.6)
    return " or ".join(f"`{by_lower[one]}`" for one in close)
