"""What the operator makes of 300 specs, of specs that break rules and of edits is what it was when it was recorded.

Structure and words stand in files of their own: a change of wording alone changes no more than `*-text.jsonl`.
"""

from __future__ import annotations

import pytest

from tests.golden.files import check
from tests.golden.operator.specs import PLAIN, beside, cases, edited, outcome, problems
from tests.tiers import mostly_long

SPECS = 300
BLOCK = 50


@pytest.mark.parametrize("block", mostly_long(range(SPECS // BLOCK), lambda block: block == 0))
def test_revisions_pods_and_what_ranks_are_told(block: int) -> None:
    specs = sorted(cases("specs.jsonl").items())[block * BLOCK : (block + 1) * BLOCK]
    assert len(specs) == BLOCK
    found = {name: outcome("train", case) for name, case in specs}
    base, _ = outcome("train", PLAIN)
    told = beside(base, {name: told for name, (told, _) in found.items()})
    check(f"operator/specs/{block * BLOCK:03}.jsonl", told)
    check(f"operator/specs/{block * BLOCK:03}-text.jsonl", {name: words for name, (_, words) in found.items()})


def test_rules_that_specs_break() -> None:
    invalid = cases("invalid.jsonl")
    found = {name: problems(case["spec"]) for name, case in invalid.items()}
    check("operator/invalid/rules.jsonl", {name: broken for name, (broken, _) in found.items()})
    check("operator/invalid/rules-text.jsonl", {name: words for name, (_, words) in found.items()})


@pytest.mark.long
def test_what_becomes_of_jobs_whose_specs_are_wrong() -> None:
    invalid = cases("invalid.jsonl")
    found = {name: outcome("train", case, valid=False) for name, case in invalid.items()}
    base, _ = outcome("train", PLAIN)
    check("operator/invalid/jobs.jsonl", beside(base, {name: told for name, (told, _) in found.items()}))
    check("operator/invalid/jobs-text.jsonl", {name: words for name, (_, words) in found.items()})


def test_revisions_after_edits_and_what_may_not_be_edited() -> None:
    specs = cases("specs.jsonl")
    found = {name: edited(specs[edit["of"]]["spec"], edit["change"]) for name, edit in cases("edits.jsonl").items()}
    check("operator/edits/outcome.jsonl", {name: done for name, (done, _) in found.items()})
    check("operator/edits/outcome-text.jsonl", {name: words for name, (_, words) in found.items()})
