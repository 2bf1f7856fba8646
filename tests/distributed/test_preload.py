"""What the process that forks ranks imports for them."""

from __future__ import annotations

import sys

from meshwright_worker.rank.task import RankTask
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool


def compiler_imported_by(task: RankTask) -> dict[str, bool]:
    return sys.modules["tests.distributed.rank_preload"].COMPILER_IMPORTED_BY


def test_only_runs_that_use_the_compiler_have_it_imported(pool: RankPool) -> None:
    """Its import takes half as long as that of torch, in every pod."""
    (found,) = pool.run(compiler_imported_by, small_run())
    assert found == {"the runtime": False, "checkpoints: None": False, "checkpoints: Full": True}
