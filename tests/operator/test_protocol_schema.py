"""The written schema describes the messages as they really travel, and the documentation names all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.base import ApiModel
from meshwright.protocol.json_schema import protocol_schema
from meshwright.protocol.messages import AgentState, Evaluation, MeshRequest, ReportReply
from tests.operator.builders import report
from tests.operator.test_coordinator import mesh_document

SCHEMA: dict[str, Any] = json.loads(protocol_schema())
HELLO = MeshRequest(worker=1, incarnation=0, pod_uid="uid", address="10.0.0.1", store_port=20000)
REPORT = report(0, AgentState.RUNNING)


TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "type": lambda wanted, value: isinstance(value, TYPES[wanted]) and (wanted == "boolean") == isinstance(value, bool),
    "enum": lambda wanted, value: value in wanted,
    "minimum": lambda wanted, value: value >= wanted,
    "maximum": lambda wanted, value: value <= wanted,
    "exclusiveMinimum": lambda wanted, value: value > wanted,
    "exclusiveMaximum": lambda wanted, value: value < wanted,
    "minLength": lambda wanted, value: len(value) >= wanted,
    "maxLength": lambda wanted, value: len(value) <= wanted,
    "minItems": lambda wanted, value: len(value) >= wanted,
    "maxItems": lambda wanted, value: len(value) <= wanted,
    "pattern": lambda wanted, value: re.search(wanted, value) is not None,
    "required": lambda wanted, value: set(wanted) <= set(value),
}
SILENT = {"title", "description", "default", "$defs", "$ref", "anyOf", "properties", "additionalProperties", "items"}


def errors(name: str, message: object) -> list[str]:
    return broken(SCHEMA["$defs"][name], message, name)


def broken(schema: dict[str, Any], value: Any, where: str) -> list[str]:
    """What `value` breaks; a keyword that is not known here fails the test."""
    assert schema.keys() <= CHECKS.keys() | SILENT, schema.keys()
    if "$ref" in schema:
        return errors(schema["$ref"].rsplit("/", 1)[1], value)
    if "anyOf" in schema:
        ways = [broken(one, value, where) for one in schema["anyOf"]]
        return [] if [] in ways else [f"{where}: {ways}"]
    found = [
        f"{where}: {key} {schema[key]}" for key in CHECKS.keys() & schema.keys() if not CHECKS[key](schema[key], value)
    ]
    if isinstance(value, list):
        return found + [error for item in value for error in broken(schema.get("items", {}), item, f"{where}[]")]
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [f"{where}.{key} is not known" for key in value.keys() - known.keys() if others is False]
        found += [e for key in known.keys() & value.keys() for e in broken(known[key], value[key], f"{where}.{key}")]
    return found


def test_a_message_without_an_evaluation_is_that_of_an_older_agent() -> None:
    assert "evaluation" not in REPORT.wire()
    assert errors("WorkerReport", report(0, AgentState.RUNNING, evaluation=Evaluation(step=1, loss=2.0)).wire()) == []


@pytest.mark.parametrize("message", [HELLO, REPORT, ReportReply(generation=3), mesh_document()])
def test_messages_fit_their_schema(message: ApiModel) -> None:
    assert errors(type(message).__name__, message.wire()) == []


def test_messages_are_open() -> None:
    new = {"newField": 1}
    assert errors("WorkerReport", {**REPORT.wire(), **new}) == []
    assert errors("MeshRequest", {**HELLO.wire(), **new}) == []
    assert errors("MeshRequest", {**HELLO.wire(), "worker": -1})
    document = mesh_document().wire()
    run = document["run"]
    assert isinstance(run, dict)
    assert errors("MeshDocument", {**document, **new, "run": {**run, **new}}) == []


def test_the_documentation_names_every_message_and_answer() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    for word in ("MeshRequest", "MeshDocument", "WorkerReport", "ReportReply", "Meshwright-Counter", "Retry-After"):
        assert word in text
    for code in (204, 400, 401, 404, 408, 409, 410, 411, 413, 426, 429, 503):
        assert str(code) in text
