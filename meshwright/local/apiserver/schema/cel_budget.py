"""Refusing a schema whose CEL rules could keep the server busy for too long: in one place, or all of them together."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.local.apiserver.errors import Cause, not_allowed
from meshwright.local.apiserver.schema.cel_cost import EXPRESSION_LIMIT, SCHEMA_LIMIT, estimate
from meshwright.local.apiserver.schema.cel_sizes import Schema, most_often, times_within

_ADVICE = (
    "(try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, maps, and strings are"
    " declared)"
)


def check_budget(schema: Schema, path: str) -> list[Cause]:
    """The expressions that cost too much for the objects that this structural schema allows."""
    causes: list[Cause] = []
    total = 0.0
    for where, kind, cost in _costs(schema, path, 1):
        total += cost
        if cost > EXPRESSION_LIMIT:
            excess = _excess(cost / EXPRESSION_LIMIT)
            causes.append(not_allowed(where, f"estimated {kind} cost exceeds budget by factor of {excess} {_ADVICE}"))
        if cost > SCHEMA_LIMIT:
            text = "contributed to estimated rule cost total exceeding cost limit for entire OpenAPIv3 schema"
            causes.append(not_allowed(where, text))
    if total > SCHEMA_LIMIT:
        text = (
            "x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema exceeds budget by factor of"
        )
        causes.append(not_allowed(path, f"{text} {_excess(total / SCHEMA_LIMIT)} {_ADVICE}"))
    return causes


def _costs(schema: Schema, path: str, times: float) -> Iterator[tuple[str, str, float]]:
    """Place, sort and cost of each expression, over all the values that an object can hold there."""
    for index, rule in enumerate(schema.get("x-kubernetes-validations") or ()):
        for kind in ("rule", "messageExpression"):
            if kind in rule:
                where = f"{path}.x-kubernetes-validations[{index}].{kind}"
                yield where, kind, estimate(rule[kind], schema) * most_often(schema, times)
    for key, below in (schema.get("properties") or {}).items():
        yield from _costs(below, f"{path}.properties[{key}]", times)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _costs(schema[key], f"{path}.{key}", times_within(schema, times))


def _excess(factor: float) -> str:
    if factor > 100:
        return "more than 100x"
    return f"{factor:.1f}x" if factor > 1.5 else f"{factor:f}x"
