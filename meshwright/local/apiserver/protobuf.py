"""Protobuf request bodies, which kubectl's typed commands (create, auth can-i, drain) send and do not fall back from.

`data/proto.json.gz` maps the field numbers of Kubernetes' `generated.proto` files to JSON names: type -> number ->
(name, type, label). Answers stay JSON, which every client accepts.
"""

from __future__ import annotations

import base64
import datetime
import gzip
import struct
from functools import lru_cache
from importlib.resources import files
from typing import Any

import orjson

from meshwright.local.apiserver.clock import rfc3339

MAGIC = b"k8s\0"
_META = "k8s.io.apimachinery.pkg.apis.meta.v1."
_RAW_JSON = ("FieldsV1", "RawExtension", "JSON")

Table = dict[str, dict[str, list[str]]]


class ProtobufError(ValueError):
    """Bytes that are not what they claim to be."""


@lru_cache(maxsize=1)
def _table() -> Table:
    packed = files("meshwright.local.apiserver").joinpath("data", "proto.json.gz").read_bytes()
    table: Table = orjson.loads(gzip.decompress(packed))
    return table


def decode(raw: bytes) -> dict[str, Any]:
    """The object in a body of type `application/vnd.kubernetes.protobuf`.

    Raises:
        ProtobufError: it is malformed, or of a kind without a table.
    """
    if raw[:4] != MAGIC:
        raise ProtobufError("the body does not begin with the Kubernetes protobuf prefix")
    try:
        envelope = dict(_fields(raw[4:]))
        names = {number: value.decode() for number, value in _fields(envelope.get(1, b""))}
        api_version, kind = names.get(1, ""), names.get(2, "")
        body = _message(_type_name(api_version, kind), envelope.get(2, b""))
    except (IndexError, struct.error, UnicodeDecodeError, KeyError, AttributeError, TypeError, ValueError) as error:
        raise ProtobufError(f"the protobuf body cannot be read: {error}") from None
    if not isinstance(body, dict):
        raise ProtobufError(f"the protobuf body holds no object but {kind}")
    return {"apiVersion": api_version, "kind": kind, **body}


def _type_name(api_version: str, kind: str) -> str:
    group, _, version = api_version.rpartition("/")
    name = f"k8s.io.api.{group.split('.')[0] or 'core'}.{version}.{kind}"
    return name if name in _table() else _META + kind


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ProtobufError("a number is too long")


def _fields(data: bytes) -> list[tuple[int, Any]]:
    out: list[tuple[int, Any]] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        value: Any
        if kind == 0:
            value, at = _varint(data, at)
        elif kind == 2:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ProtobufError("a field is longer than its message")
            value, at = data[at : at + size], at + size
        elif kind == 1:
            value, at = struct.unpack("<d", data[at : at + 8])[0], at + 8
        elif kind == 5:
            value, at = struct.unpack("<f", data[at : at + 4])[0], at + 4
        else:
            raise ProtobufError(f"wire type {kind} is not used by Kubernetes")
        out.append((tag >> 3, value))
    return out


def _scalar(kind: str, value: Any) -> Any:
    if kind == "string":
        return value.decode()
    if kind == "bytes":
        return base64.b64encode(value).decode()
    if kind == "bool":
        return bool(value)
    if kind in ("int32", "int64"):
        return value - (1 << 64) if value >> 63 else value
    return value


def _message(kind: str, data: bytes) -> Any:
    short = kind.rsplit(".", 1)[-1]
    parts = _fields(data)
    fields = dict(parts)
    if short in ("Time", "MicroTime") and kind.startswith(_META):
        seconds = fields.get(1)
        return rfc3339(datetime.datetime.fromtimestamp(seconds, datetime.UTC)) if seconds else None
    if short == "Quantity":
        return fields.get(1, b"").decode()
    if short == "IntOrString":
        return fields.get(3, b"").decode() if fields.get(1) else _scalar("int32", fields.get(2, 0))
    if short in _RAW_JSON:
        return orjson.loads(fields.get(1) or b"null")
    return _object(kind, parts)


def _object(kind: str, parts: list[tuple[int, Any]]) -> Any:
    table = _table()
    out: dict[str, Any] = {}
    for number, value in parts:
        if str(number) not in table[kind]:
            continue
        name, sub, label = table[kind][str(number)]
        if label == "map":
            pair = dict(_fields(value))
            out.setdefault(name, {})[pair.get(1, b"").decode()] = _value(sub, pair.get(2, b""))
            continue
        item = _value(sub, value)
        if label == "repeated":
            out.setdefault(name, []).append(item)
        elif item not in ("", None, {}):
            out[name] = item
    wraps_a_list = list(table[kind].values()) == [["items", "string", "repeated"]]
    return out.get("items", []) if wraps_a_list else out


def _value(kind: str, value: Any) -> Any:
    return _message(kind, value) if kind in _table() else _scalar(kind, value)
