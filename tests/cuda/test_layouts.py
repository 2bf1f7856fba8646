"""Layouts of several ranks on the kernels of one GPU, against the same ranks on the CPU, in fp64."""

from __future__ import annotations

import pytest

from meshwright.api.precision import Precision
from tests.distributed.cases import train_staged
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.staged_backend import ASKED
from tests.distributed.test_compiled_layouts import LAYOUTS


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_on_a_gpu_train_as_on_the_cpu(pool: RankPool, name: str) -> None:
    run = small_run(**{"precision": Precision.FP64, "layers": 2, **LAYOUTS[name]})
    on_gpu, on_cpu = (pool.run(train_staged, run, 2, kind, timeout=300) for kind in (ASKED or "cuda", "cpu"))
    for got, want in zip(on_gpu, on_cpu, strict=True):
        # Cosines of the fp32 rotary table differ in the last digit, and Adam divides by the gradient's own size.
        assert got.value.difference(want.value) < 1e-5
