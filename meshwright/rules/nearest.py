"""The message of a broken rule, with the values of the fields and the nearest values that work."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.rules.facts import Facts, ResolvedFacts
from meshwright.rules.rule import Rule

_PATH = re.compile(r"`((?:model|data|training|parallelism|checkpoint|workers|elastic)\.[A-Za-z0-9.]+|replicas|gpus)`")
_ANOTHER_MODEL = ("model.positions",)
"""Fields of which 0 is no smaller number, but another kind of model."""
Checked = TypeVar("Checked", bound=ParallelTrainingJobSpec | ResolvedFacts)
_SPAN = 2048
"""Largest distance from the value within which others are tried."""


def nearest(value: int, is_valid: Callable[[int], bool], limit: int, least: int = 1) -> str:
    """The closest values that work at or below `value` and above it, from `least` to `limit`, for a message."""
    below = next((n for n in range(min(value, limit), least - 1, -1) if is_valid(n)), None)
    above = next((n for n in range(value + 1, limit + 1) if is_valid(n)), None)
    return ", ".join(str(n) for n in (below, above) if n is not None) or "none"


def sentence(broken: Rule[Facts], facts: ResolvedFacts, rules: Sequence[Rule[Facts]]) -> str:
    """The message of a broken rule, with the field's value, those of other fields, and the nearest values that work.

    Args:
        broken: a rule that does not hold.
        facts: the facts that break it.
        rules: every rule. The nearest values satisfy those that name this field, and those that hold now.
    """
    subject = "" if broken.message.startswith("`") else f"`{broken.field}` "
    text = _with_values(subject + broken.message, facts)
    values = _nearest_values(broken.field, facts, rules)
    return f"{text}; nearest: {values}" if values else text


def advice(broken: Rule[Checked], facts: Checked, rules: Sequence[Rule[Checked]]) -> str:
    """The same as `sentence`, for a message that follows the name of the field."""
    text = _with_values(broken.message, facts)
    value = _value_at(facts, broken.field)
    if not isinstance(value, int) or isinstance(value, bool):
        return text
    values = _nearest_values(broken.field, facts, rules)
    return f"{text}; got {value}{f', nearest: {values}' if values else ''}"


def _with_values(text: str, facts: object) -> str:
    """The text with the value of each field that it names, where it names the field first."""
    seen: set[str] = set()

    def named(match: re.Match[str]) -> str:
        again = match[1] in seen
        seen.add(match[1])
        return match[0] if again else _with_value(match[1], facts)

    return _PATH.sub(named, text)


def _with_value(path: str, facts: object) -> str:
    value = _value_at(facts, path)
    if not isinstance(value, bool | int | float | str):
        return f"`{path}`"
    return f"`{path}: {str(value).lower() if isinstance(value, bool) else value}`"


def _nearest_values(path: str, facts: Any, rules: Sequence[Rule[Any]]) -> str:
    value, bounds = _value_at(facts, path), _bounds(path)
    if bounds is None or not isinstance(value, int) or isinstance(value, bool):
        return ""
    of_field = [rule for rule in rules if rule.field == path]  # first, because most values break one of them
    checked = of_field + [rule for rule in rules if rule.field != path and rule.holds(facts)]

    def works(number: int) -> bool:
        changed = _changed(facts, path.split("."), number)
        return all(rule.holds(changed) for rule in checked)

    first = max(1, bounds[0]) if path in _ANOTHER_MODEL else bounds[0]
    least, most = max(first, value - _SPAN), min(bounds[1], value + _SPAN)
    return "" if (values := nearest(value, works, most, least)) == "none" else values


def _value_at(facts: object, path: str) -> object:
    holder: object = facts
    for part in path.split("."):
        holder = getattr(holder, _attribute(part), None)
    return holder


def _changed(holder: Any, path: list[str], value: int) -> Any:
    """A copy of the facts, or of a part of them, with a different value at a path."""
    name = _attribute(path[0])
    new = value if len(path) == 1 else _changed(getattr(holder, name), path[1:], value)
    return holder.model_copy(update={name: new}) if isinstance(holder, BaseModel) else replace(holder, **{name: new})


def _attribute(name: str) -> str:
    """The attribute of a field with this name on the wire."""
    return re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", name)


@cache
def _schema() -> dict[str, Any]:
    return ParallelTrainingJobSpec.model_json_schema(by_alias=True)


@cache
def _bounds(path: str) -> tuple[int, int] | None:
    """The smallest and the largest value that the schema allows at a path. None if it is not an integer."""
    root = part = _schema()
    for name in path.split("."):
        if "properties" not in part:
            return None
        part = part["properties"][name]
        options = [option for option in part.get("anyOf", [part]) if option.get("type") != "null"]
        part = options[0]
        if "$ref" in part:
            part = root["$defs"][part["$ref"].rsplit("/", 1)[-1]]
    if part.get("type") != "integer":
        return None
    values = part.get("enum") or [part.get("minimum", 0), part.get("maximum", 2**31 - 1)]
    return min(values), max(values)
