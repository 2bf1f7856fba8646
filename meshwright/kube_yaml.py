"""Reads and writes YAML as kubectl, Helm and Flux do, so that a manifest means the same here and in a cluster.

They read YAML 1.1 with the exceptions of Go's library and turn it into JSON. PyYAML differs: it takes `3e-4` for text,
`12:30` for 750 and `2026-01-02` for a date, which JSON does not have.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_OTHER = {_TAG + kind for kind in ("bool", "float", "int", "timestamp", "value")}
_INTEGER = re.compile(r"[-+]?(?:0[bB][01_]+|0[oO]?[0-7_]+|0[xX][0-9a-fA-F_]+|0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9_]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9_]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_BOOL = re.compile(r"(?:y|Y|yes|Yes|YES|n|N|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$")
_LARGEST_WHOLE = 1e21  # JSON of Go has an exponent from here on


class KubeLoader(yaml.SafeLoader):
    """Loads values as kubectl does. Rejects keys that are there twice, of which kubectl drops the first unnoticed."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OTHER]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    bool_values = {**yaml.SafeLoader.bool_values, "y": True, "n": False}

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """See `yaml.composer.Composer`. Keys become strings, as in JSON."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        node.value = [(self._key(key), value) for key, value in node.value]
        seen = set()
        for key, _ in node.value:  # before `<<` merges others into them, which a key replaces
            if key.tag != _TAG + "str":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key `{key.value}` is there twice", key.start_mark)
            seen.add(key.value)
        return node

    def _key(self, node: yaml.Node) -> yaml.Node:
        if not isinstance(node, yaml.ScalarNode) or node.tag in (_TAG + "str", _TAG + "merge"):
            return node
        value = self.construct_object(node)
        if value is None:
            raise yaml.constructor.ConstructorError(None, None, "a key has no name", node.start_mark)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return yaml.ScalarNode(_TAG + "str", text, node.start_mark, node.end_mark)

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """Binary data as text, which is all that JSON has."""
        return self.construct_yaml_binary(node).decode()

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """See `yaml.SafeLoader.construct_yaml_int`. Also reads `0o17`, and no base 60."""
        text = self.construct_scalar(node).replace("_", "").lower()
        sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
        base = {"0b": 2, "0o": 8, "0x": 16}.get(digits[:2])
        if base is not None:
            return sign * int(digits[2:], base)
        return sign * int(digits, 8 if len(digits) > 1 and digits.startswith("0") else 10)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> Any:
        """See `yaml.SafeLoader.construct_yaml_float`. A whole number becomes an integer, as in the JSON of kubectl."""
        text = self.construct_scalar(node).replace("_", "").lower()
        value = float(text.replace(".inf", "inf").replace(".nan", "nan"))
        if math.isinf(value) and "inf" not in text:
            return str(self.construct_scalar(node))  # too large for a number: text
        return int(value) if math.isfinite(value) and value.is_integer() and abs(value) < _LARGEST_WHOLE else value


class _Dumper(yaml.SafeDumper):
    """Quotes a text that either library would read as a number, a date or a boolean, such as the commit `1234e56`."""


for _kind in (KubeLoader, _Dumper):
    _kind.add_implicit_resolver(_TAG + "bool", _BOOL, list("yYnNtTfFoO"))
    _kind.add_implicit_resolver(_TAG + "int", _INTEGER, list("-+0123456789"))
    _kind.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))
KubeLoader.add_constructor(_TAG + "binary", KubeLoader.construct_text)
KubeLoader.add_constructor(_TAG + "int", KubeLoader.construct_yaml_int)
KubeLoader.add_constructor(_TAG + "float", KubeLoader.construct_yaml_float)


def load_documents(text: str) -> list[Any]:
    """The documents of a text in YAML or JSON, without empty ones.

    Raises:
        yaml.YAMLError: it is not valid YAML, or a mapping has a key twice.
        ValueError, RecursionError: likewise.
    """
    return [one for one in yaml.load_all(text, KubeLoader) if one is not None]  # noqa: S506 - a SafeLoader


def dump_document(document: Any) -> str:
    """A document as YAML, with the order of its keys."""
    return str(yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True))
