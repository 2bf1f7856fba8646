"""Writes the generated files into a checkout: `python -m meshwright.crd [DIRECTORY]`.

A test compares the files with what is committed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

import yaml

from meshwright.api import labels
from meshwright.crd.definition import custom_resource_definition
from meshwright.crd.field_reference import api_reference
from meshwright.protocol.json_schema import protocol_schema

CRD_FILE = f"crds/{labels.GROUP}_{labels.PLURAL}.yaml"
REFERENCE_FILE = "docs/api.md"
PROTOCOL_FILE = "docs/protocol.schema.json"


FLOW_LENGTH = 600  # of the Python text of a mapping or list; longer ones take a line for each item


class _Dumper(yaml.SafeDumper):
    """Writes a field without fields of its own in one line, which keeps a deep schema short and readable."""


def _flows(items: Collection[object], text: str) -> bool:
    return len(text) < FLOW_LENGTH and not any(isinstance(item, dict | list) and item for item in items)


def _represent_mapping(dumper: _Dumper, data: dict[str, object]) -> yaml.Node:
    items = [item for value in data.values() for item in (value if isinstance(value, list) else [value])]
    return dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=_flows(items, str(data)))


def _represent_list(dumper: _Dumper, data: list[object]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=_flows(data, str(data)))


_Dumper.add_representer(dict, _represent_mapping)
_Dumper.add_representer(list, _represent_list)


def generated_files() -> dict[str, str]:
    """Path in the checkout -> content."""
    definition = custom_resource_definition()
    header = "# Generated from meshwright/api by `make generate`; do not edit.\n"
    text = yaml.dump(definition, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
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
