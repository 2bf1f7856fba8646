"""Each rule in CEL and in Python says the same about the same spec."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.crd.definition import custom_resource_definition
from meshwright.crd.rule_placement import VALIDATIONS
from meshwright.rules.rule import Rule
from meshwright.rules.validation import SPEC_RULES, check_spec
from meshwright_local.apiserver.schema.cel import compile_expression, converted
from tests.rules.broken_specs import CASES
from tests.rules.specs import GOOD, changed
from tests.rules.valid_specs import FINE


def broken_in_cel(spec: ParallelTrainingJobSpec) -> list[Rule[ParallelTrainingJobSpec]]:
    """The rules that CEL refuses, over the spec with the defaults that the API server fills in."""
    defaulted = converted({"self": spec.wire()})
    return [rule for rule in SPEC_RULES if compile_expression(rule.cel).evaluate(defaulted) is not True]


def broken_in_schema(node: dict[str, Any], value: dict[str, Any], path: str = "") -> list[tuple[str, str]]:
    """Field and message of the rules in a schema that CEL refuses, each evaluated on its own object if that exists."""
    variables = converted({"self": value})
    found = [
        ((path + rule.get("fieldPath", "")).lstrip("."), rule["message"])
        for rule in node.get(VALIDATIONS, ())
        if compile_expression(rule["rule"]).evaluate(variables) is not True
    ]
    for name, child in node.get("properties", {}).items():
        if isinstance(value.get(name), dict):
            found += broken_in_schema(child, value[name], f"{path}.{name}")
    return found


@cache
def spec_schema() -> dict[str, Any]:
    """The schema of a spec in the CRD."""
    (version,) = custom_resource_definition()["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


@pytest.mark.parametrize(("base", "changes", "field"), CASES)
def test_a_bad_spec_is_refused_by_both_languages_for_the_same_rules(
    base: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    spec = ParallelTrainingJobSpec.model_validate(changed(base, changes))
    problems = check_spec(spec)
    assert field in [problem.field for problem in problems]
    assert [(p.field, p.message) for p in problems] == [(r.field, r.message) for r in broken_in_cel(spec)]
    assert sorted(broken_in_schema(spec_schema(), spec.wire())) == sorted((p.field, p.message) for p in problems)


@pytest.mark.parametrize(("base", "changes"), FINE)
def test_a_good_spec_passes_in_both_languages(base: dict[str, Any], changes: dict[str, Any]) -> None:
    spec = ParallelTrainingJobSpec.model_validate(changed(base, changes))
    assert check_spec(spec) == []
    assert broken_in_cel(spec) == []
    assert broken_in_schema(spec_schema(), spec.wire()) == []


def test_the_table_is_long_and_breaks_every_rule() -> None:
    assert len(CASES) >= 40
    specs = [ParallelTrainingJobSpec.model_validate(changed(base, changes)) for base, changes, _ in CASES]
    never = [rule.message for rule in SPEC_RULES if all(rule.holds(spec) for spec in specs)]
    assert never == []


def test_an_explicit_null_is_the_same_as_a_field_left_out() -> None:
    spec = ParallelTrainingJobSpec.model_validate(changed(GOOD, {"model": {"preset": "tiny", "layers": None}}))
    assert "layers" in spec.model_dump()["model"]
    assert check_spec(spec) == []


def test_no_two_rules_say_the_same() -> None:
    assert len({rule.cel for rule in SPEC_RULES}) == len(SPEC_RULES)
    assert len({(rule.field, rule.message) for rule in SPEC_RULES}) == len(SPEC_RULES)
