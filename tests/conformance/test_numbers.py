"""Numbers and their bounds, which the server compares in Go's types: int64 and float64."""

import json

import pytest

from .conftest import CRDS, GROUP, definition

WRAPPED = "-9223372036854775808"
MAXIMUM, MULTIPLE = "Maximum boundary value", "MultipleOf value"


def place(field):
    return {"type": "object", "properties": {"spec": {"type": "object", "properties": {"a": field}}}}


@pytest.mark.parametrize(
    ("field", "below", "message"),
    [
        (
            {"type": "number", "maximum": 1e30, "default": 16},
            "",
            f"Invalid value: 16:  in body should be less than or equal to {WRAPPED}",
        ),
        (
            {"type": "integer", "format": "int64", "maximum": 1e30, "default": 16},
            "",
            f'Invalid value: "": {MAXIMUM} must be of type integer with format int64 in ',
        ),
        (
            {
                "type": "object",
                "properties": {"b": {"type": "integer", "maximum": 2**63 - 1}},
                "default": {"b": 4},
            },
            "",
            f'Invalid value: "": {MAXIMUM} must be of type integer (default format) in b',
        ),
        (
            {"type": "array", "items": {"type": "integer", "maximum": 3}, "default": [4]},
            ".[0]",
            "Invalid value: 4: [0] in body should be less than or equal to 3",
        ),
    ],
)
async def test_defaults_are_checked_against_bounds(api, field, below, message):
    """A definition whose bound wraps cannot have a default: it is refused, where and in the words of the server."""
    code, status = await api.call("POST", CRDS, definition("bounds", "Bound", schema=place(field)))
    where = f"spec.validation.openAPIV3Schema.properties[spec].properties[a].default{below}"
    assert (code, status["reason"]) == (422, "Invalid"), status
    assert status["details"]["causes"] == [{"reason": "FieldValueInvalid", "message": message, "field": where}]
    text = f'CustomResourceDefinition.apiextensions.k8s.io "bounds.{GROUP}" is invalid: {where}: {message}'
    assert status["message"] == text


@pytest.mark.parametrize(
    "field",
    [
        {"type": "number", "maximum": 1e30},
        {"type": "number", "maximum": 1e30, "default": 16.5},
        {"type": "number", "minimum": -1e30, "default": 16},
        {"type": "integer", "maximum": 1e30},
        {"type": "integer", "maximum": 9223372036854774784, "default": 16},
    ],
)
async def test_bounds_that_no_default_meets_are_accepted(api, field):
    code, crd = await api.call("POST", f"{CRDS}?dryRun=All", definition("bounds", "Bound", schema=place(field)))
    assert code == 201, crd


def less(bound):
    return f"should be less than or equal to {bound}"


INTEGER = "must be of type integer (default format) in spec"
FIELDS = {
    "wide": {"type": "number", "maximum": 1e30},
    "deep": {"type": "number", "minimum": 1e30},
    "cut": {"type": "number", "maximum": 2.5},
    "whole": {"type": "integer"},
    "small": {"type": "integer", "format": "int32"},
    "far": {"type": "integer", "maximum": 1e30},
    "part": {"type": "integer", "maximum": 2.5},
    "either": {"x-kubernetes-int-or-string": True, "maximum": 1e30},
    "step": {"type": "number", "multipleOf": 2.5},
    "half": {"type": "number", "multipleOf": 0.5},
}
ANSWERS = [
    ("wide", "16", [less(WRAPPED)]),
    ("wide", "16.5", []),
    ("wide", "1e31", [less("1e+30")]),
    ("deep", "16", []),
    ("deep", "16.5", ["should be greater than or equal to 1e+30"]),
    ("cut", "2", []),
    ("cut", "3", [less("2")]),
    ("cut", "2.6", [less("2.5")]),
    ("whole", "9223372036854775807", []),
    ("whole", "9223372036854775808", ['must be of type integer: "number"', f"Checked value {INTEGER}.whole"]),
    ("whole", "2.5", ['must be of type integer: "number"', f"Checked value {INTEGER}.whole"]),
    ("small", "5000000000", ["Checked value must be of type integer with format int32 in spec.small"]),
    ("far", "16", [f"{MAXIMUM} {INTEGER}.far"]),
    ("part", "2", [f"{MAXIMUM} {INTEGER}.part"]),
    ("part", "3", [f"{MAXIMUM} {INTEGER}.part", less("2.5")]),
    ("either", "5", [less(WRAPPED)]),
    ("either", '"5"', []),
    ("step", "4", []),
    ("step", "5", ["should be a multiple of 2"]),
    ("step", "7.5", []),
    ("half", "7.5", []),
    ("half", "4", ["factor MultipleOf declared for spec.half must be positive: 0"]),
]


async def test_values_are_compared_in_gos_types(api):
    schema = {"type": "object", "properties": {"spec": {"type": "object", "properties": FIELDS}}}
    crd = definition("numbers", "Number", schema=schema)
    await api.define(crd)
    path = f"/apis/{GROUP}/v1/namespaces/{api.namespace}/numbers"
    head = {"apiVersion": f"{GROUP}/v1", "kind": "Number", "metadata": {"generateName": "n-"}}
    for name, number, wrong in ANSWERS:
        body = json.dumps({**head, "spec": {name: "?"}}).replace('"?"', number)
        code, answer = await api.call("POST", path, body.encode())
        assert code == (422 if wrong else 201), (name, number, answer)
        causes = answer["details"]["causes"] if wrong else []
        assert len(causes) == len(wrong), (name, number, causes)
        for cause, words in zip(causes, wrong, strict=True):
            assert cause["message"].endswith(words), (name, number, cause)
            assert cause["field"] == ("<nil>" if " value must be" in words else f"spec.{name}")
    await api.call("DELETE", f"{CRDS}/numbers.{GROUP}")
