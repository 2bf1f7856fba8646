"""The generated CRD: what the API server would refuse never comes out, and what is committed is what is generated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import cel
import pytest
import yaml
from pydantic import Field, create_model

from meshwright.api.base import ApiModel
from meshwright.api.objects import MAX_JOB_NAME, pod_name, secret_name, service_name
from meshwright.crd.__main__ import CRD_FILE, generated_files
from meshwright.crd.definition import custom_resource_definition
from meshwright.crd.rule_placement import rules_of
from meshwright.crd.structural_schema import SchemaError, structural_schema

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "additionalProperties", "default", "description", "enum", "exclusiveMaximum", "exclusiveMinimum", "format",
    "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minimum", "pattern",
    "properties", "required", "type", "x-kubernetes-list-map-keys", "x-kubernetes-list-type",
    "x-kubernetes-validations",
}  # fmt: skip


DROPPED: dict[str, Any] = {"deprecated": True, "examples": ["a"]}


class Color(StrEnum):
    """A color."""

    RED = "Red"
    BLUE = "Blue"


class Named(ApiModel):
    """A named thing."""

    name: Annotated[str, Field(max_length=3)]
    """Its name."""


class Loop(ApiModel):
    """A list of lists of lists."""

    inner: Annotated[list[Loop], Field(max_length=2)] = []
    """More of them."""


class Circle(ApiModel):
    """One kind of shape."""

    kind: Literal["Circle"]
    """Its kind."""


class Square(ApiModel):
    """Another kind of shape."""

    kind: Literal["Square"]
    """Its kind."""


def field_schema(annotation: Any, default: Any = ...) -> dict[str, Any]:
    """The schema of one field of a model."""
    model = create_model("M", __base__=ApiModel, field_a=(annotation, Field(default, description="A field.")))
    return structural_schema(model)["properties"]["fieldA"]


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (
            Annotated[int, Field(ge=1, le=8)] | None,
            {"type": "integer", "minimum": 1, "maximum": 8, "format": "int32"},
        ),
        (
            Annotated[int, Field(ge=0, le=2**53)],
            {"type": "integer", "minimum": 0, "maximum": 2**53, "format": "int64"},
        ),
        (
            Annotated[float, Field(gt=0, lt=1)],
            {
                "type": "number",
                "minimum": 0,
                "exclusiveMinimum": True,
                "maximum": 1,
                "exclusiveMaximum": True,
                "format": "double",
            },
        ),
        (Literal["a"], {"type": "string", "enum": ["a"]}),
        (Literal[0, 2], {"type": "integer", "enum": [0, 2], "format": "int32"}),
        (Color, {"type": "string", "enum": ["Red", "Blue"]}),
        (Color | None, {"type": "string", "enum": ["Red", "Blue"]}),
        (bool, {"type": "boolean"}),
        (
            Annotated[list[Annotated[str, Field(max_length=3)]], Field(max_length=4)],
            {
                "type": "array",
                "maxItems": 4,
                "items": {"type": "string", "maxLength": 3},
                "x-kubernetes-list-type": "atomic",
            },
        ),
        (
            Annotated[dict[str, Annotated[str, Field(max_length=3)]], Field(max_length=4)],
            {"type": "object", "maxProperties": 4, "additionalProperties": {"type": "string", "maxLength": 3}},
        ),
        (
            Annotated[set[Annotated[str, Field(max_length=3)]], Field(max_length=4)],
            {
                "type": "array",
                "maxItems": 4,
                "items": {"type": "string", "maxLength": 3},
                "x-kubernetes-list-type": "set",
            },
        ),
        (
            Annotated[str, Field(max_length=9, title="T", json_schema_extra=DROPPED)] | None,
            {"type": "string", "maxLength": 9},
        ),
        (
            Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time", "writeOnly": True})],
            {"type": "string", "maxLength": 64, "format": "date-time"},
        ),
        (
            Annotated[int, Field(gt=0, lt=9)],
            {
                "type": "integer",
                "minimum": 0,
                "exclusiveMinimum": True,
                "maximum": 9,
                "exclusiveMaximum": True,
                "format": "int32",
            },
        ),
        (
            Annotated[list[Named], Field(max_length=2, json_schema_extra={"x-list-map-key": "name"})],
            {
                "type": "array",
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "description": "A named thing.",
                    "properties": {"name": {"type": "string", "maxLength": 3, "description": "Its name."}},
                    "required": ["name"],
                },
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            },
        ),
        (
            Named,
            {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 3, "description": "Its name."}},
                "required": ["name"],
            },
        ),
    ],
)
def test_each_kind_of_type_gets_its_structural_form(annotation: Any, expected: dict[str, Any]) -> None:
    assert field_schema(annotation) == {**expected, "description": "A field."}


@pytest.mark.parametrize(
    ("annotation", "complaint"),
    [
        (str, "maxLength"),
        (int, "minimum"),
        (Annotated[int, Field(ge=0)], "maximum"),
        (Annotated[list[bool], Field(min_length=1)], "maxItems"),
        (Annotated[list[str], Field(max_length=1)], "maxLength"),
        (dict[str, Annotated[str, Field(max_length=1)]], "maxProperties"),
        (int | str, "union"),
        (Any, "type None"),
        (dict[str, Any], "map"),
        (tuple[bool, bool], "a tuple has no structural form"),
        (Annotated[tuple[bool, ...], Field(min_length=1)], "maxItems"),
        (Annotated[Circle | Square, Field(discriminator="kind")], "union"),
        (Annotated[set[str], Field(max_length=1)], "maxLength"),
        (Circle | Square, "union"),
    ],
)
def test_what_has_no_bound_or_no_form_stops_the_build(annotation: Any, complaint: str) -> None:
    with pytest.raises((SchemaError, KeyError), match=complaint):
        field_schema(annotation)


def test_a_field_without_a_description_stops_the_build() -> None:
    with pytest.raises(SchemaError, match=r"M\.bare: has no description"):
        structural_schema(create_model("M", __base__=ApiModel, bare=(bool, False)))


def test_what_stands_beside_a_reference_wins_and_defaults_stay() -> None:
    optional = field_schema(Named | None, None)
    assert optional["description"] == "A field."
    assert "default" not in optional
    assert "nullable" not in optional
    assert field_schema(Annotated[int, Field(ge=0, le=9)], 4)["default"] == 4
    assert field_schema(Color, Color.BLUE)["default"] == "Blue"
    assert field_schema(Named, Named(name="a"))["default"] == {}, "an object's members bring their own defaults"


def test_a_model_that_holds_itself_stops_the_build() -> None:
    with pytest.raises(SchemaError, match="recursive models are not supported"):
        structural_schema(Loop)


def test_the_key_of_a_list_map_must_be_required() -> None:
    class Item(ApiModel):
        """An item."""

        name: Annotated[str, Field(max_length=3)] = ""
        """Its name."""

    annotation = Annotated[list[Item], Field(max_length=2, json_schema_extra={"x-list-map-key": "name"})]
    with pytest.raises(SchemaError, match="must be required"):
        field_schema(annotation)


generated = cache(generated_files)


def test_the_committed_files_are_the_generated_ones() -> None:
    changed = [name for name, text in generated().items() if (ROOT / name).read_text(encoding="utf-8") != text]
    assert not changed, "run `make generate`"


def test_the_crd_file_is_the_definition_and_fits_an_annotation() -> None:
    text = generated()[CRD_FILE]
    assert yaml.load(text, yaml.CSafeLoader) == custom_resource_definition()
    assert len(text) < 200 * 1024


@cache
def version() -> dict[str, Any]:
    """The served version."""
    return custom_resource_definition()["spec"]["versions"][0]


def root() -> dict[str, Any]:
    """The schema's root."""
    return version()["schema"]["openAPIV3Schema"]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every sub-schema with its path."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


def test_only_keywords_of_structural_schemas_come_out() -> None:
    for path, schema in nodes(root()):
        assert set(schema) <= ALLOWED, path
        assert isinstance(schema["type"], str), path


def test_defaults_fit_their_own_schema() -> None:
    for path, schema in nodes(root()["properties"]["spec"]):
        if "default" in schema and "enum" in schema:
            assert schema["default"] in schema["enum"], path
        elif isinstance(schema.get("default"), int | float) and schema["type"] != "boolean":
            assert schema["minimum"] <= schema["default"] <= schema["maximum"], path


def test_what_a_command_forbids_has_no_default() -> None:
    checkpoint = root()["properties"]["spec"]["properties"]["checkpoint"]["properties"]
    assert "default" not in checkpoint["everySteps"]
    assert "default" not in checkpoint["keep"]


def test_status_has_one_default_and_marks_an_unseen_job() -> None:
    status = root()["properties"]["status"]
    assert status["default"] == {"observedGeneration": -1}
    assert [path for path, schema in nodes(status) if "default" in schema] == [""]


def at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """The sub-schema at a dotted path."""
    for name in path.strip(".").split("."):
        schema = schema["properties"][name]
    return schema


def test_scale_columns_and_rules_point_at_fields_that_exist() -> None:
    scale = version()["subresources"]["scale"]
    assert at(root(), scale["specReplicasPath"])["default"] == 1
    assert at(root(), scale["statusReplicasPath"])["type"] == "integer"
    assert at(root(), scale["labelSelectorPath"])["type"] == "string"
    for column in version()["additionalPrinterColumns"]:
        if "?(" not in column["jsonPath"] and "metadata" not in column["jsonPath"]:
            field = at(root(), column["jsonPath"])
            expected = "date-time" if column["type"] == "date" else column["type"]
            assert expected in (field["type"], field.get("format")), column["name"]
    for rule in rules_of(root()["properties"]["spec"]):
        assert at(root()["properties"]["spec"], rule["fieldPath"])
    for rule in root()["x-kubernetes-validations"][1:]:
        assert at(root(), rule["fieldPath"])
    for selectable in version()["selectableFields"]:
        assert at(root(), selectable["jsonPath"])["type"] in ("string", "boolean", "integer")
    assert len(version()["selectableFields"]) <= 8


def test_every_rule_compiles_and_has_a_message_below_the_limit() -> None:
    spec = root()["properties"]["spec"]
    for rule in [*rules_of(spec), *root()["x-kubernetes-validations"]]:
        cel.compile(rule["rule"])
        assert 0 < len(rule["message"]) <= 2048
        assert "\n" not in rule["message"]


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("a", True),
        ("stdlib-lm", True),
        ("a" * MAX_JOB_NAME, True),
        ("a" * (MAX_JOB_NAME + 1), False),
        ("1a", False),
        ("a.b", False),
        ("a-", False),
    ],
)
def test_names_that_pods_cannot_carry_are_refused(name: str, allowed: bool) -> None:
    rule = root()["x-kubernetes-validations"][0]
    assert cel.compile(rule["rule"]).execute({"self": {"metadata": {"name": name}}}) is allowed


def test_the_longest_name_leaves_room_for_every_worker_and_incarnation() -> None:
    assert len(pod_name("a" * MAX_JOB_NAME, 65535, 999_999_999)) <= 63


def test_the_longest_name_leaves_room_for_the_uid_in_every_owned_object() -> None:
    job, uid = "a" * MAX_JOB_NAME, "0f1e2d3c-0000-4000-8000-000000000000"
    for name in (service_name(job, uid), secret_name(job, uid, {"token": "t"})):
        assert name.startswith(f"{job}-0f1e2d3c")
        assert len(name) <= 63
        assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)


def test_the_reference_lists_every_field() -> None:
    reference = generated()["docs/api.md"]
    for path, _ in nodes(root()["properties"]["spec"]):
        if path:
            assert path.strip(".").removesuffix("[]") in reference


def test_no_bound_is_beyond_what_the_api_server_compares() -> None:
    """It compares whole numbers as int64: a larger bound wraps, and the whole definition is refused."""

    def bounds(schema: Any) -> Iterator[float]:
        if isinstance(schema, dict):
            yield from (v for k, v in schema.items() if k in ("minimum", "maximum") and isinstance(v, int | float))
            yield from (found for value in schema.values() for found in bounds(value))
        elif isinstance(schema, list):
            yield from (found for value in schema for found in bounds(value))

    found = list(bounds(custom_resource_definition()))
    assert found
    assert all(abs(bound) < 2**63 for bound in found)


def test_a_list_with_an_entry_for_each_worker_is_replaced_as_one() -> None:
    """Merging a thousand keys took the API server a third of a second in every write of a status."""
    properties = root()["properties"]["status"]["properties"]
    for placement in (properties["placement"], properties["elastic"]["properties"]["nextPlacement"]):
        workers = placement["properties"]["workers"]
        assert workers["x-kubernetes-list-type"] == "atomic"
        assert "x-kubernetes-list-map-keys" not in workers
    assert properties["conditions"]["x-kubernetes-list-map-keys"] == ["type"]
