"""The part of the parity matrix that every test run has; `make parity` runs all of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwright.api.spec import Precision
from tests.distributed.pool import RankPool
from tests.parity.case import Case
from tests.parity.matrix import all_cases
from tests.parity.measure import LIMITS, Oracle, check_refused, measure

CASES = all_cases()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def oracle(pool: RankPool) -> Oracle:
    return Oracle(pool)


@pytest.mark.parametrize("case", [case for case in CASES if case.smoke and not case.refused], ids=lambda c: c.name)
def test_equals_one_process(pool: RankPool, oracle: Oracle, case: Case) -> None:
    precision = Precision.FP64 if case.exact else Precision.FP32
    gradient, parameter = LIMITS[precision] if case.exact else (case.tolerance, float("inf"))
    errors = measure(case, pool, oracle, precision)
    assert errors.within(gradient, parameter), errors


@pytest.mark.parametrize("case", [case for case in CASES if case.refused], ids=lambda c: c.name)
def test_illegal_combinations_are_refused(case: Case) -> None:
    check_refused(case)
