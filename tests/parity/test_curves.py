from __future__ import annotations

import pytest

from tests.distributed.rank_pool import RankPool
from tests.parity import curves


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_layout_learns_as_one_process_does() -> None:
    pool = RankPool()
    try:
        reference = curves.losses(pool)
        curve = curves.losses(pool, **curves.LAYOUTS["tensor x ZeRO-3"])
    finally:
        pool.close()
    assert curves.learned(reference) < curves.LEARNED
    assert curves.largest_difference(curve, reference) < curves.LIMIT
