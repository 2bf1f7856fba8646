"""Agents and operators of different releases: each reads what the other writes.

Both ignore unknown fields. So a field may be added if it is optional, and none may become required, vanish or change
its type: the recorded protocol of each release is compared. `test_released.py` sends the recorded requests of agents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from meshwright.protocol.json_schema import protocol_schema
from tests.compatibility.test_released import RELEASES, ROOT

BOUNDS = ("maxLength", "maxItems", "maximum", "minimum", "pattern")
Schema = Mapping[str, Any]


def recorded(release: str) -> dict[str, Schema]:
    text = (ROOT / release / "agent" / "protocol.schema.json").read_text(encoding="utf-8")
    return dict(json.loads(text)["$defs"])


def current() -> dict[str, Schema]:
    return dict(json.loads(protocol_schema())["$defs"])


def broken(old: Mapping[str, Schema], new: Mapping[str, Schema]) -> Iterator[str]:
    """What one side of a connection could not read of the other."""
    for name, before in old.items():
        if (after := new.get(name)) is None:
            yield f"{name} is gone"
            continue
        if gone := set(before.get("enum", ())) - set(after.get("enum", ())):
            yield f"{name} no longer has {sorted(gone)}"
        if added := set(after.get("required", ())) - set(before.get("required", ())):
            yield f"{name}: {sorted(added)} became required, which others do not send"
        for field, schema in before.get("properties", {}).items():
            there = after.get("properties", {}).get(field)
            if there is None:
                yield f"{name}.{field} is gone"
            elif not accepts(schema, there):
                yield f"{name}.{field}: {shape(schema)} became {shape(there)}"


def shape(schema: Schema) -> Any:
    """Type and bounds of a field, without texts and defaults."""
    if "anyOf" in schema:
        return sorted(map(json.dumps, map(shape, schema["anyOf"])))
    kept = {key: schema[key] for key in ("type", "$ref", "enum", "const", *BOUNDS) if key in schema}
    nested = {key: shape(schema[key]) for key in ("items", "additionalProperties") if isinstance(schema.get(key), dict)}
    return {**kept, **nested}


def accepts(before: Schema, after: Schema) -> bool:
    """Whether every value of `before` is one of `after`: the same, or also others."""
    old, new = (value if isinstance(value, list) else [json.dumps(value)] for value in (shape(before), shape(after)))
    return set(old) <= set(new)


def test_every_release_has_its_protocol_recorded() -> None:
    assert RELEASES
    for release in RELEASES:
        assert "WorkerReport" in recorded(release), release


@pytest.mark.parametrize("release", RELEASES)
def test_agents_and_operators_of_that_release_understand_this_one(release: str) -> None:
    assert list(broken(recorded(release), current())) == []


def test_the_comparison_finds_what_breaks() -> None:
    old = recorded(RELEASES[0])
    new = json.loads(json.dumps(old))
    assert list(broken(old, new)) == []
    report = new["WorkerReport"]
    report["required"].append("message")
    del report["properties"]["failure"]
    report["properties"]["generation"]["type"] = "string"
    new["AgentState"]["enum"].remove("Idle")
    del new["TrustBundle"]
    report["properties"]["added"] = {"type": "string"}
    found = list(broken(old, new))
    assert len(found) == 5, found
    assert any(text.startswith("WorkerReport.generation: ") for text in found)
