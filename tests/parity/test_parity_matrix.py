"""The part of the parity matrix that every test run has; `make parity` runs all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.rank_pool import RankPool
from tests.parity.case import Case, meshes_of
from tests.parity.matrix import all_cases
from tests.parity.measure import Oracle, check_refused, measure
from tests.parity.report import layout, limits

CASES = all_cases()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    oracle = Oracle()
    yield oracle
    oracle.close()


NEED_FOUR = ("ring x Ulysses", "hpZ", "HSDP (ZeRO-1)", "HSDP (FSDP2, HYBRID_SHARD)")
"""Techniques that there are only on four ranks."""


CROSSED = (
    "ZB-V with tied embeddings and uneven stages",
    "dropout, checkpointing",
    "fp8 experts, rowwise",
    "latent attention with a mixture (DeepSeek)",
)
"""Techniques together, beside those with a cross in their names."""


def crossed(technique: str) -> bool:
    """Whether it is two techniques together. Experts by themselves have a case with data parallelism."""
    return technique in CROSSED or (" x " in technique and technique not in (*NEED_FOUR, "experts x data"))


def _smoke() -> Iterator[Any]:
    """The smoke cases: of a technique the first one always if few ranks do, its others in the long tier.

    So are those of two techniques together, each of which has a case by itself.
    """
    seen: set[str] = set()
    for case in sorted((case for case in CASES if case.smoke and not case.refused), key=meshes_of):
        few = case.run().layout.world_size <= (4 if case.technique in NEED_FOUR else 2)
        quick = few and case.technique not in seen and not crossed(case.technique)
        yield pytest.param(case, id=case.name, marks=[] if quick else [pytest.mark.long])
        seen.add(case.technique)


@pytest.mark.parametrize("case", list(_smoke()))
def test_equals_one_process(pool: RankPool, oracle: Oracle, case: Case) -> None:
    precision = case.formats[-1]
    errors = measure(case, pool, oracle, [precision]).errors[precision]
    assert errors.within(*limits(case, precision)), errors


@pytest.mark.parametrize("case", [case for case in CASES if case.refused], ids=lambda c: c.name)
def test_illegal_combinations_are_rejected(case: Case) -> None:
    check_refused(case)


def test_the_page_has_a_row_for_every_case() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parity.md").read_text()
    missing = [
        case.name for case in CASES if case.technique not in page or not (case.together or f"| {layout(case)}" in page)
    ]
    assert not missing, "run `make parity`"
