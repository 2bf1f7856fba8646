"""Tensor, pipeline, context and data parallelism at once, on 16 ranks, without experts and with distributed ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meshwright.api.precision import Precision
from tests.distributed.rank_pool import RankPool
from tests.parity.case import Case
from tests.parity.measure import Oracle, measure

pytestmark = pytest.mark.long

RANKS = 16
FOUR_DIMENSIONS, FIVE_DIMENSIONS = 1e-5, 5e-5
"""Largest error of any gradient tensor in fp32, relative to the tensor's largest element."""


def cases(expert: int) -> list[Any]:
    rows = []
    for schedule in ("1F1B", "ZBV", "DualPipe"):
        # Flat shards, of stage 1, serve neither a stage on two ranks nor distributed experts.
        flat = schedule != "DualPipe" and expert == 1
        for zero in (1 if flat else 2, 3):
            layout = {"tensor": 2, "pipeline": 2, "context": 2, "data": 2, "expert": expert, "zero": zero}
            how = {"micro_batches": 4, "parallelism": {"schedule": schedule}}
            how["replicas"] = {"strategy": "ZeRO" if zero == 1 else "FSDP"}
            common = {"layers": 4, "mixture": "Mixtral" if expert > 1 else None}
            name = f"{schedule}, ZeRO-{zero}"
            rows.append(pytest.param(Case(name, {**layout, **how}, common), id=name))
    return rows


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(timeout=600)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    oracle = Oracle()
    yield oracle
    oracle.close()


@pytest.mark.parametrize("case", cases(expert=1))
def test_four_dimensions_equal_one_process(pool: RankPool, oracle: Oracle, case: Case) -> None:
    check(pool, oracle, case, FOUR_DIMENSIONS)


@pytest.mark.parametrize("case", cases(expert=2))
def test_five_dimensions_equal_one_process(pool: RankPool, oracle: Oracle, case: Case) -> None:
    check(pool, oracle, case, FIVE_DIMENSIONS)


def check(pool: RankPool, oracle: Oracle, case: Case, limit: float) -> None:
    assert case.run().layout.world_size == RANKS
    measured = measure(case, pool, oracle, [Precision.FP32, Precision.FP64]).errors
    single, double = measured[Precision.FP32], measured[Precision.FP64]
    assert single.gradient <= limit, single
    assert single.loss <= limit, single
    # Rounding of the sixteenth digit: nothing is computed twice or left out.
    assert double.within(1e-12, 1e-12, 1e-10), double
