"""Writes the generated files into a checkout: `python -m meshwright.crd [DIRECTORY]`.

A test compares the files with what is committed.
"""

from __future__ import annotations

import sys
from pathlib import Path

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
    text = yaml.safe_dump(definition, sort_keys=False, width=300, allow_unicode=True)
    return {CRD_FILE: header + text, REFERENCE_FILE: api_reference(definition), PROTOCOL_FILE: protocol_schema()}


def main() -> None:
    """Write every generated file below the given directory, by default the current one."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for name, text in generated_files().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
