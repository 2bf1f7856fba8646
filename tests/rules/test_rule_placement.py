"""Each rule stands on the deepest object of the schema that has all its fields."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.crd.rule_placement import VALIDATIONS, add_rule, rules_of
from meshwright.rules.validation import SPEC_RULES
from tests.rules.test_rules import spec_schema


def test_a_rule_on_one_object_stands_there_and_costs_nothing_without_it() -> None:
    """The API server evaluates each rule that it finds at every write of a job, also of its status."""
    schema = spec_schema()["properties"]
    assert len(rules_of(spec_schema())) == len(SPEC_RULES)
    assert len(spec_schema()[VALIDATIONS]) < 0.55 * len(SPEC_RULES)
    held = {rule.get("fieldPath"): rule["rule"] for rule in schema["model"][VALIDATIONS]}
    assert held[".headSize"] == "!has(self.headSize) || self.headSize % 2 == 0"
    assert all("self.mixture" not in rule["rule"] for rule in schema["model"]["properties"]["mixture"][VALIDATIONS])


@pytest.mark.parametrize(
    ("condition", "place"),
    [
        ("!has(self.a) || self.a.x > 1", (".a", "self.x > 1")),
        ("!has(self.a) || !has(self.a.b) || self.a.b.y == 2", (".a.b", "self.y == 2")),
        ("!has(self.a) || (self.a.x > 1 ? self.a.x < 9 : true)", (".a", "(self.x > 1 ? self.x < 9 : true)")),
        ("!has(self.a) || self.a.x > 1 ? true : false", ("", None)),
        ("has(self.a) || self.a.x > 1", ("", None)),
        ("self.a.x > 1", ("", None)),
        ("self.d.x > 1", (".d", "self.x > 1")),
        ("!has(self.a) || self.a.x > self.d.x", ("", None)),
        ("!has(self.a) || self.a.list.all(i, i > 1)", (".a", "self.list.all(i, i > 1)")),
    ],
)
def test_where_a_rule_stands(condition: str, place: tuple[str, str | None]) -> None:
    number, texts = {"type": "integer"}, {"type": "array"}
    b = {"type": "object", "properties": {"y": number}}
    a = {"type": "object", "properties": {"x": number, "list": texts, "b": b}}
    schema: dict[str, Any] = {"properties": {"a": a, "d": {"default": {}, "properties": {"x": number}}}}
    path, left = place
    deepest = ".a.b.y" if path == ".a.b" else ".d.x" if ".d" in path else ".a.x"
    add_rule(schema, condition, {"fieldPath": deepest, "message": "m"})
    assert rules_of(schema) == [{"rule": left or condition, "fieldPath": deepest, "message": "m"}]
    node: dict[str, Any] = schema
    for name in path.split(".")[1:]:
        node = node["properties"][name]
    assert len(node[VALIDATIONS]) == 1
