"""The generated files as text. A test compares them with what is committed."""

from __future__ import annotations

import yaml

from meshwright.api import labels
from meshwright.crd.definition import custom_resource_definition
from meshwright.crd.field_reference import api_reference
from meshwright.protocol.json_schema import protocol_schema

CRD_FILE = f"crds/{labels.GROUP}_{labels.PLURAL}.yaml"
REFERENCE_FILE = "docs/api.md"
PROTOCOL_FILE = "docs/protocol.schema.json"


def generated_files() -> dict[str, str]:
    """Path in the checkout -> content."""
    definition = custom_resource_definition()
    header = "# Generated from meshwright/api by `make generate`; do not edit.\n"
    text = yaml.safe_dump(definition, sort_keys=False, width=120, allow_unicode=True)
    return {CRD_FILE: header + text, REFERENCE_FILE: api_reference(definition), PROTOCOL_FILE: protocol_schema()}
