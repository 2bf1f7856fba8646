"""A search asks the rule book about candidates, and gets what admission says of the same degrees."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.rules.facts import ResolvedFacts
from meshwright.rules.validation import FACT_RULES, broken_rules, is_allowed, rules_on
from tests.rules.broken_specs import CASES
from tests.rules.specs import GOOD, changed, mixture

DEGREES: dict[str, list[Any]] = {
    "tensor": [1, 2, 4, 8],
    "pipeline": [1, 2, 3, 4, 8],
    "context": [1, 2, 64],
    "expert": [1, 2, 4],
    "micro_batches": [1, 2, 3, 4, 8],
    "zero_stage": [0, 1, 2, 3],
}

FIELDS = [f"parallelism.{name}" for name in ("tensor", "pipeline", "context", "expert", "microBatches", "zeroStage")]


def facts_of(spec: ParallelTrainingJobSpec) -> ResolvedFacts:
    """The facts of a spec as a search makes them."""
    parts = ("replicas", "parallelism", "model", "data", "training", "checkpoint", "runtime", "workers")
    return ResolvedFacts(**{part: getattr(spec, part) for part in parts})


def candidates(base: ResolvedFacts, count: int) -> Iterator[ResolvedFacts]:
    """Facts that differ from `base` in their degrees alone."""
    source = random.Random(5)
    for _ in range(count):
        degrees = {name: source.choice(values) for name, values in DEGREES.items()}
        yield replace(base, parallelism=base.parallelism.model_copy(update=degrees))


@pytest.mark.parametrize(("base", "changes", "field"), CASES)
def test_a_candidate_breaks_the_rules_that_a_spec_breaks(
    base: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    spec = ParallelTrainingJobSpec.model_validate(changed(base, changes))
    facts = facts_of(spec)
    assert broken_rules(facts) == [rule for rule in FACT_RULES if not rule.holds(spec)]
    assert is_allowed(facts) == (not broken_rules(facts))


@pytest.mark.parametrize("changes", [{}, mixture(), {"training.outer": {"method": "DiLoCo", "islands": 2}}])
def test_rules_on_the_fields_that_differ_are_enough(changes: dict[str, Any]) -> None:
    base = facts_of(ParallelTrainingJobSpec.model_validate(changed(GOOD, changes)))
    rules = rules_on(base, FIELDS)
    assert len(rules) < len(FACT_RULES)
    found = [(is_allowed(candidate, rules), is_allowed(candidate)) for candidate in candidates(base, 2000)]
    assert {first for first, _ in found} == {True, False}
    assert all(first is second for first, second in found)


def test_what_the_shared_facts_break_is_asked_again() -> None:
    base = facts_of(ParallelTrainingJobSpec.model_validate(changed(GOOD, {"training.lora": {}, "training.fp8": {}})))
    assert not is_allowed(base, rules_on(base, ["parallelism.tensor"]))
