"""The field reference of the documentation, from the same schema as the CRD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.api import labels
from meshwright.crd.structural_schema import Schema
from meshwright.rules.edits import IMMUTABLE_PATHS, LIVE, NEXT_START, Effect
from meshwright.rules.validation import SPEC_RULES


def api_reference(definition: dict[str, Any]) -> str:
    """Markdown: every field of `spec` and `status`, and the rules over several fields."""
    root = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    spec, status = root["properties"]["spec"], root["properties"]["status"]
    rules = [(_field_of(rule), rule["message"]) for rule in root["x-kubernetes-validations"]]
    rules += [(rule.field, rule.message) for rule in SPEC_RULES]
    lines = [
        f"# {labels.KIND} ({labels.API_VERSION})",
        "",
        "<!-- Generated from meshwright/api by `make generate`; do not edit. -->",
        "",
        root["description"],
        "",
        "A field marked * is required. All others may be left out.",
        "",
        "## Rules over several fields",
        "",
        "Checked on admission, and again before planning.",
        "",
        "| field | rule |",
        "|---|---|",
        *(f"| `{field}` | {_cell(message)} |" for field, message in rules),
        "",
        "## Edits of a job that runs",
        "",
        "An edit that restarts the gang is checked first. While it does not fit, or cannot be planned, the gang keeps "
        "running with its previous spec, and the `Ready` condition has the reason.",
        "",
        *_edits(),
        "",
        "## spec",
        "",
        *_table(spec),
        "",
        "## status",
        "",
        *_table(status),
        "",
    ]
    return "\n".join(lines)


def _field_of(rule: dict[str, Any]) -> str:
    path = str(rule.get("fieldPath", ".metadata.name")).lstrip(".")
    return path.removeprefix("spec.")


def _edits() -> Iterator[str]:
    yield "| edit of | what it does |"
    yield "|---|---|"
    for effect, fields in ((Effect.LIVE, LIVE), (Effect.NEXT_START, NEXT_START), (Effect.REJECTED, IMMUTABLE_PATHS)):
        yield f"| {', '.join(f'`{field}`' for field in fields)} | {effect.value} |"
    yield f"| everything else | {Effect.RESTART.value} |"


def _table(schema: Schema) -> Iterator[str]:
    yield "| field | type | default | description |"
    yield "|---|---|---|---|"
    for path, field, required in _fields(schema, ""):
        default = f"`{field['default']}`" if "default" in field and field["type"] != "object" else ""
        star = " *" if required else ""
        yield f"| `{path}`{star} | {_type(field)} | {default} | {_cell(field['description'])} |"


def _fields(schema: Schema, prefix: str) -> Iterator[tuple[str, Schema, bool]]:
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        path = f"{prefix}{name}"
        yield path, field, name in required
        inner = field["items"] if field["type"] == "array" else field
        if "properties" in inner:
            yield from _fields(inner, f"{path}[]." if field["type"] == "array" else f"{path}.")


def _type(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    kind = str(field["type"])
    if kind == "array":
        return f"list of {field['items']['type']}"
    if "additionalProperties" in field:
        return f"map of {field['additionalProperties']['type']}"
    if "minimum" in field and "maximum" in field:
        low = ">" if field.get("exclusiveMinimum") else "≥"
        high = "<" if field.get("exclusiveMaximum") else "≤"
        return f"{kind} {low} {field['minimum']}, {high} {field['maximum']}"
    return kind


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
