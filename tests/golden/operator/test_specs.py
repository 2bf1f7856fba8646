"""The operator does with specs and edits what it did when the golden files were recorded.

Messages are in separate files: a change of wording changes only `*-text.jsonl`.
"""

from __future__ import annotations

from math import ceil

import pytest

from tests.golden.files import check
from tests.golden.operator.specs import PLAIN, beside, cases, edited, outcome, problems
from tests.tiers import mostly_long

SPECS = sorted(cases("specs.jsonl").items())
BLOCK = 30


@pytest.mark.parametrize("block", mostly_long(range(ceil(len(SPECS) / BLOCK)), lambda block: block == 0))
def test_revision_pods_mesh_document_and_status(block: int) -> None:
    specs = SPECS[block * BLOCK : (block + 1) * BLOCK]
    found = {name: outcome("train", case) for name, case in specs}
    base, _ = outcome("train", PLAIN)
    outcomes = beside(base, {name: value for name, (value, _) in found.items()})
    check(f"operator/specs/{block * BLOCK:03}.jsonl", outcomes)
    check(f"operator/specs/{block * BLOCK:03}-text.jsonl", {name: messages for name, (_, messages) in found.items()})


def test_broken_rules() -> None:
    invalid = cases("invalid.jsonl")
    found = {name: problems(case["spec"]) for name, case in invalid.items()}
    check("operator/invalid/rules.jsonl", {name: broken for name, (broken, _) in found.items()})
    check("operator/invalid/rules-text.jsonl", {name: messages for name, (_, messages) in found.items()})


@pytest.mark.long
def test_jobs_with_invalid_specs() -> None:
    invalid = cases("invalid.jsonl")
    found = {name: outcome("train", case, valid=False) for name, case in invalid.items()}
    base, _ = outcome("train", PLAIN)
    check("operator/invalid/jobs.jsonl", beside(base, {name: value for name, (value, _) in found.items()}))
    check("operator/invalid/jobs-text.jsonl", {name: messages for name, (_, messages) in found.items()})


def test_edits() -> None:
    specs = cases("specs.jsonl")
    found = {name: edited(specs[edit["of"]]["spec"], edit["change"]) for name, edit in cases("edits.jsonl").items()}
    check("operator/edits/outcome.jsonl", {name: done for name, (done, _) in found.items()})
    check("operator/edits/outcome-text.jsonl", {name: messages for name, (_, messages) in found.items()})
