"""The operator does with specs and edits what it did when the golden files were recorded.

Messages are in separate files: a change of wording changes only `*-text.jsonl`.
"""

from __future__ import annotations

from math import ceil

import pytest

from tests.golden.files import check, check_sample
from tests.golden.operator.specs import PLAIN, beside, cases, edited, outcome, problems
from tests.tiers import mostly_long

SPECS = sorted(cases("specs.jsonl").items())
BLOCK = 30
INVALID = ("r012", "r027", "r029", "r055", "r083", "r088", "r146", "r149", "s022", "s024", "s036")
"""Invalid specs that together have many different messages."""


@pytest.mark.parametrize("block", mostly_long(range(ceil(len(SPECS) / BLOCK)), lambda block: block == 0))
def test_revision_pods_mesh_document_and_status(block: int) -> None:
    specs = SPECS[block * BLOCK : (block + 1) * BLOCK]
    found = {name: outcome("train", case) for name, case in specs}
    base, _ = outcome("train", PLAIN)
    outcomes = beside(base, {name: value for name, (value, _) in found.items()})
    check(f"operator/specs/{block * BLOCK:03}.jsonl", outcomes)
    check(f"operator/specs/{block * BLOCK:03}-text.jsonl", {name: messages for name, (_, messages) in found.items()})


def test_a_sample_of_the_long_files() -> None:
    base, _ = outcome("train", PLAIN)
    for block in (3, 6, 9):
        name, case = SPECS[block * BLOCK]
        found, messages = outcome("train", case)
        check_sample(f"operator/specs/{block * BLOCK:03}.jsonl", beside(base, {name: found}))
        check_sample(f"operator/specs/{block * BLOCK:03}-text.jsonl", {name: messages})
    invalid = cases("invalid.jsonl")
    sample = {name: outcome("train", invalid[name], valid=False) for name in INVALID}
    check_sample("operator/invalid/jobs.jsonl", beside(base, {name: value for name, (value, _) in sample.items()}))
    check_sample("operator/invalid/jobs-text.jsonl", {name: messages for name, (_, messages) in sample.items()})


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
