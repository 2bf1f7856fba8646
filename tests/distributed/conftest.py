from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.conftest import bpe_file, sentencepiece_file
from tests.distributed.rank_pool import RankPool

__all__ = ["bpe_file", "sentencepiece_file"]


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of some files to train on, enough for several epochs' difference."""
    root = tmp_path_factory.mktemp("text")
    for number in range(7):
        lines = (f"def function_{number}_{line}(x):\n    return x * {line * number}\n" for line in range(20 + number))
        (root / f"part{number}.py").write_text("".join(lines))
    return root
