"""Writes the schemas of administrators' documents into the chart's `values.schema.json`.

`python -m meshwright.crd.chart_schema [DIRECTORY]` writes it; a test compares it with what is committed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from meshwright.planner.topology.site import SiteFabric

SCHEMA_FILE = "helm/meshwright/values.schema.json"
DOCUMENTS: dict[str, type[BaseModel]] = {"fabric": SiteFabric}
"""Chart value -> class of the document."""
_COPIED = (
    "type",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
)

Schema = dict[str, Any]


def document_schema(model: type[BaseModel]) -> Schema:
    """The JSON schema of a document, without references. A field without a default value may be null."""
    source = model.model_json_schema(by_alias=True)
    return _converted(source, source.get("$defs", {}))


def _converted(source: Schema, definitions: dict[str, Schema]) -> Schema:
    nullable = False
    while "$ref" in source or "anyOf" in source:
        if "$ref" in source:
            source = definitions[source["$ref"].rsplit("/", 1)[-1]]
        else:
            nullable = nullable or {"type": "null"} in source["anyOf"]
            (source,) = [option for option in source["anyOf"] if option != {"type": "null"}]
    result: Schema = {key: source[key] for key in _COPIED if key in source}
    if "properties" in source:
        result["additionalProperties"] = False
        result["properties"] = {name: _converted(one, definitions) for name, one in source["properties"].items()}
    elif isinstance(source.get("additionalProperties"), dict):
        result["additionalProperties"] = _converted(source["additionalProperties"], definitions)
    if "propertyNames" in source:
        result["propertyNames"] = _converted(source["propertyNames"], definitions)
    if "items" in source:
        result["items"] = _converted(source["items"], definitions)
    if nullable and "type" in result:
        result["type"] = [result["type"], "null"]
    return result


def with_documents(text: str) -> str:
    """The chart's schema with those of the documents, each of which has one line.

    Raises:
        ValueError: the schema has no line for a document.
    """
    for value, model in DOCUMENTS.items():
        line = f'    "{value}": {json.dumps(document_schema(model))},'
        present = re.findall(rf'(?m)^    "{value}": .*,$', text)
        if len(present) != 1:
            raise ValueError(f'{SCHEMA_FILE}: expected one line `    "{value}": ...,`, found {len(present)}')
        text = text.replace(present[0], line)
    return text


def main() -> None:
    """Write the chart's schema below the given directory, by default the current one."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else ".") / SCHEMA_FILE
    path.write_text(with_documents(path.read_text()))


if __name__ == "__main__":
    main()
