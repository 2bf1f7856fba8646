"""The written schema of the protocol: JSON Schema (2020-12) made from the messages that both sides use.

Two definitions of one message would drift apart; this one is generated, and a test compares it with what is committed.
Messages are open: each side ignores fields that a newer version of the other side adds.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import models_json_schema

from meshwright.protocol.messages import (
    MeshDocument,
    MeshRequest,
    ReportReply,
    TrustBundle,
    TrustRequest,
    WorkerReport,
)
from meshwright.protocol.versions import NEWEST

RECEIVED_BY_COORDINATOR = (MeshRequest, WorkerReport, TrustRequest)
RECEIVED_BY_AGENTS = (MeshDocument, ReportReply, TrustBundle)
PREFIX = "#/$defs/"


def protocol_schema() -> str:
    """The schema as text, with every message under `$defs`."""
    messages = (*RECEIVED_BY_COORDINATOR, *RECEIVED_BY_AGENTS)
    _, schema = models_json_schema([(message, "validation") for message in messages], by_alias=True)
    definitions: dict[str, Any] = schema["$defs"]
    for definition in definitions.values():
        if definition.get("additionalProperties") is False:
            del definition["additionalProperties"]
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Meshwright's protocol between worker agents and the coordinator, version {NEWEST}",
        "oneOf": [{"$ref": PREFIX + message.__name__} for message in messages],
        "$defs": _without_extensions(dict(sorted(definitions.items()))),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _without_extensions(schema: Any) -> Any:
    """The schema without what is said to the CRD's generator alone."""
    if isinstance(schema, dict):
        return {key: _without_extensions(value) for key, value in schema.items() if not key.startswith("x-")}
    return [_without_extensions(value) for value in schema] if isinstance(schema, list) else schema
