"""Ranks, and a text for the runs whose checkpoints are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.conftest import pool
from tests.golden.checkpoint.cases import write_corpus

__all__ = ["pool"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))
