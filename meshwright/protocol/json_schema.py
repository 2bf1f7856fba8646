"""The written schema of the protocol: JSON Schema (2020-12) made from the messages that both sides use.

Two definitions of one message would drift apart; this one is generated, and a test compares it with what is committed.
What the coordinator receives is closed (`additionalProperties: false`); what an agent receives is open, since an agent
ignores fields that a newer operator adds.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import models_json_schema

from meshwright.protocol.messages import (
    PROTOCOL_VERSION,
    MeshDocument,
    MeshRequest,
    ReportReply,
    TrustBundle,
    TrustRequest,
    WorkerReport,
)

RECEIVED_BY_COORDINATOR = (MeshRequest, WorkerReport, TrustRequest)
RECEIVED_BY_AGENTS = (MeshDocument, ReportReply, TrustBundle)
PREFIX = "#/$defs/"


def protocol_schema() -> str:
    """The schema as text, with every message under `$defs`."""
    messages = (*RECEIVED_BY_COORDINATOR, *RECEIVED_BY_AGENTS)
    _, schema = models_json_schema([(message, "validation") for message in messages], by_alias=True)
    definitions: dict[str, Any] = schema["$defs"]
    for name in _transitive_references(definitions, [message.__name__ for message in RECEIVED_BY_AGENTS]):
        definitions[name].pop("additionalProperties", None)
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Meshwright's protocol between worker agents and the coordinator, version {PROTOCOL_VERSION}",
        "oneOf": [{"$ref": PREFIX + message.__name__} for message in messages],
        "$defs": _without_extensions(dict(sorted(definitions.items()))),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _without_extensions(schema: Any) -> Any:
    """The schema without what is said to the CRD's generator alone."""
    if isinstance(schema, dict):
        return {key: _without_extensions(value) for key, value in schema.items() if not key.startswith("x-")}
    return [_without_extensions(value) for value in schema] if isinstance(schema, list) else schema


def _transitive_references(definitions: dict[str, Any], names: list[str]) -> set[str]:
    """These definitions and all that they refer to."""
    reached: set[str] = set()
    while names:
        name = names.pop()
        if name not in reached:
            reached.add(name)
            names += _references(definitions[name])
    return reached


def _references(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        reference = schema.get("$ref", "")
        below = [name for value in schema.values() for name in _references(value)]
        return (
            [reference.removeprefix(PREFIX), *below]
            if isinstance(reference, str) and reference.startswith(PREFIX)
            else below
        )
    if isinstance(schema, list):
        return [name for value in schema for name in _references(value)]
    return []
