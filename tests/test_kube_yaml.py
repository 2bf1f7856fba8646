"""`meshwright.kube_yaml`: values as kubectl reads them. `READ` was compared with kubectl 1.32."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from meshwright.kube_yaml import dump_document, load_documents

READ: list[tuple[str, Any]] = [
    ("3e-4", 0.0003),
    ("2e1", 20),
    ("1.5e3", 1500),
    ("20.0", 20),
    (".5", 0.5),
    ("1_000", 1000),
    ("010", 8),
    ("0o10", 8),
    ("08", 8),
    ("-0x1F", -31),
    ("0b11", 3),
    ("1e20", 10**20),
    ("1e22", 1e22),
    ("1e400", "1e400"),
    ("12e4567", "12e4567"),
    ("12:30:00", "12:30:00"),
    ("2026-01-02", "2026-01-02"),
    ("2026-01-02T10:00:00Z", "2026-01-02T10:00:00Z"),
    ("=", "="),
    ("1.2.3", "1.2.3"),
    ("e1", "e1"),
    ("y", True),
    ("NO", False),
    ("off", False),
    ("~", None),
    ("!!str 12", "12"),
    ("!!binary aGVsbG8=", "hello"),
]


@pytest.mark.parametrize(("text", "value"), READ)
def test_values_are_those_of_kubectl(text: str, value: Any) -> None:
    (found,) = load_documents(f"key: {text}")
    assert found == {"key": value}
    assert type(found["key"]) is type(value)


def test_keys_are_strings() -> None:
    assert load_documents("{1: a, true: b, 2.5: c, n: d}") == [{"1": "a", "true": "b", "2.5": "c", "false": "d"}]


def test_own_keys_replace_merged_ones() -> None:
    text = "{far: {nested: &both {<<: &base {a: 1, b: 2}, b: 3}}, near: {<<: *both, a: 4}}"
    assert load_documents(text) == [{"far": {"nested": {"a": 1, "b": 3}}, "near": {"a": 4, "b": 3}}]


@pytest.mark.parametrize("text", ["{a: 1, a: 2}", "{true: 1, y: 2}", "{~: 1}", "{[1]: 2}"])
def test_what_has_no_equal_in_json_is_an_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        load_documents(text)


@pytest.mark.parametrize("text", ["1234e56", "3e-4", "0o17", "y", "12:30", "2026-01-02", "=", "1_0", "plain"])
def test_a_text_stays_one_in_every_library(text: str) -> None:
    written = dump_document({"key": text})
    assert load_documents(written) == [{"key": text}]
    assert yaml.safe_load(written) == {"key": text}
