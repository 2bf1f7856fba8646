"""The data files of the embedded server: names and types of built-in kinds, in a fixed form, without anybody's text."""

import gzip
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import orjson
import pytest

FILES = ("definitions.json.gz", "proto.json.gz")
# What a definition may contain besides `x-kubernetes-*` extensions. Prose (description, title, example) is left out.
KEYS = {"$ref", "additionalProperties", "default", "enum", "format", "items", "properties", "required", "type"}
NAME = re.compile(r"[A-Za-z0-9$._/#,-]+")


def packed(name: str) -> bytes:
    return files("meshwright_local.apiserver").joinpath("data", name).read_bytes()


def content(name: str) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(gzip.decompress(packed(name)))
    return found


def schemas(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all below it. The keys of `properties` are names of fields, one of which may be `description`."""
    yield path, schema
    for key, field in schema.get("properties", {}).items():
        yield from schemas(field, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from schemas(schema[key], f"{path}.{key}")


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def test_no_schema_has_a_description() -> None:
    found = [
        schema for name, definition in content("definitions.json.gz").items() for schema in schemas(definition, name)
    ]
    assert len(found) > 2000
    assert [path for path, schema in found if "description" in schema] == []
    odd = {(path, key) for path, schema in found for key in schema if key not in KEYS and "x-kubernetes-" not in key}
    assert odd == set()


@pytest.mark.parametrize("name", FILES)
def test_every_string_is_a_name(name: str) -> None:
    assert [text for text in strings(content(name)) if not NAME.fullmatch(text) and text] == []


@pytest.mark.parametrize("name", FILES)
def test_the_same_content_gives_the_same_bytes(name: str) -> None:
    """No time of compression, no file name, keys in order: a change of the content is the only change of the file."""
    raw = packed(name)
    assert raw[3:8] == bytes(5), "flags and time in the header of gzip are zero"
    assert gzip.decompress(raw) == orjson.dumps(content(name), option=orjson.OPT_SORT_KEYS)


def test_every_reference_leads_to_a_definition() -> None:
    definitions = content("definitions.json.gz")
    links = {s["$ref"] for name, definition in definitions.items() for _, s in schemas(definition, name) if "$ref" in s}
    assert links
    assert {link.removeprefix("#/definitions/") for link in links} <= definitions.keys()
