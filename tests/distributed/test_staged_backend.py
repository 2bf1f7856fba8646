"""The backend that lets several ranks use one GPU, on copies of CPU tensors: it must move what gloo moves."""

from __future__ import annotations

import pytest

from meshwright.api.precision import Precision
from tests.distributed.cases import Numbers, train_on_random_tokens, train_staged
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_compiled_layouts import LAYOUTS
from tests.tiers import mostly_long


@pytest.mark.parametrize("name", mostly_long(list(LAYOUTS), lambda name: name in ("tensor", "ZB-V")))
def test_staged_ranks_compute_the_same_bits(pool: RankPool, name: str) -> None:
    run = small_run(**{"precision": Precision.FP64, "layers": 2, **LAYOUTS[name]})
    plain = pool.run(train_on_random_tokens, run, 2)
    for got, want in zip(pool.run(train_staged, run, 2, "cpu"), plain, strict=True):
        assert got.value.difference(Numbers.of(want)) == 0
