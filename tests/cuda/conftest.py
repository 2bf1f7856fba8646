"""Tests of kernels on a GPU. Where there is none they are skipped, and `make gpu` reports them.

With `MESHWRIGHT_TEST_DEVICE=cpu`, those of training (`test_resume.py`) and of optimizers run on a CPU: whether the
tests themselves work.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.conftest import pool, text
from tests.distributed.staged_backend import ASKED

__all__ = ["pool", "text"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory, and skip them without a GPU."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)
            if not torch.cuda.is_available() and not ASKED:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture
def device() -> torch.device:
    """The first GPU, or what `MESHWRIGHT_TEST_DEVICE` says."""
    return torch.device(ASKED) if ASKED else torch.device("cuda", 0)
