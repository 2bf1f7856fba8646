"""Request bodies: JSON, YAML or protobuf into plain objects."""

from __future__ import annotations

import re
from typing import Any

import orjson
import yaml

from meshwright.local.apiserver.errors import bad_request, unsupported_media_type
from meshwright.local.apiserver.protobuf import MAGIC, ProtobufError, decode

JSON, YAML, PROTOBUF = "application/json", "application/yaml", "application/vnd.kubernetes.protobuf"
OBJECT_TYPES = (JSON, YAML, PROTOBUF)
MAX_BODY_BYTES = 3 * 1024 * 1024


class _Loader(yaml.CSafeLoader):
    """YAML as the real server reads it: what looks like a date stays text, and `y` and `n` are booleans."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}
_Loader.bool_values = {**yaml.CSafeLoader.bool_values, "y": True, "n": False}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^[yYnN]$"), list("yYnN"))


def media_type(header: str) -> str:
    """The media type in a Content-Type header, without its parameters; empty when there is none."""
    return header.partition(";")[0].strip().lower()


def parse_object(content_type: str, raw: bytes) -> dict[str, Any]:
    """The object in the body of a create or replace.

    Raises:
        ApiError: 400 when it is none, 415 for another content type.
    """
    if content_type not in ("", *OBJECT_TYPES):
        raise unsupported_media_type(OBJECT_TYPES)
    value = parse(content_type, raw)
    if not isinstance(value, dict):
        raise bad_request("the object provided is unrecognized: the body must hold one object")
    return value


def parse(content_type: str, raw: bytes) -> Any:
    """Whatever value a body holds.

    Raises:
        ApiError: 400 when it cannot be read.
    """
    try:
        if content_type == PROTOBUF or raw[:4] == MAGIC:
            return decode(raw)
        if "yaml" in content_type and raw.lstrip()[:1] not in (b"{", b"["):
            return _as_json(yaml.load(raw, Loader=_Loader))  # noqa: S506 - derived from the safe loader
        return orjson.loads(raw)
    except (ValueError, yaml.YAMLError, ProtobufError) as error:
        raise bad_request(f"the object provided is unrecognized: {error}") from None


def _as_json(value: Any) -> Any:
    """The value as JSON would bring it: keys are text, and nothing is shared or odd.

    Raises:
        ValueError: YAML's own types, such as binary, or numbers that JSON lacks.
    """
    try:
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
    except TypeError as error:
        raise ValueError(str(error)) from None
