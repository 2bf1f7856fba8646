"""Tests of kernels on a GPU. Where there is none they are skipped, and `make gpu` reports them.

With `MESHWRIGHT_TEST_DEVICE=cpu`, all but those of copies and of the varlen kernel run on a CPU: whether the tests
themselves work.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from meshwright_worker.distributed.device import device_properties
from meshwright_worker.distributed.device_checks import compiler_problems
from tests.distributed.conftest import pool, text
from tests.distributed.staged_backend import ASKED

__all__ = ["pool", "text"]

HERE = Path(__file__).parent
_ONLY_GPU = ("test_memory.py", "test_varlen_attention_equals_fp64", "test_a_step_waits_for_the_device_once")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory, and skip them without a GPU; those that compile also without a compiler."""
    problems = "; ".join(compiler_problems(device_properties(0), os.environ))
    here = {path for path in {item.path for item in items} if HERE in path.parents}
    for item in items:
        if item.path in here:
            item.add_marker(pytest.mark.cuda)
            if not torch.cuda.is_available() and not ASKED:
                item.add_marker(pytest.mark.skip(reason="no GPU"))
            elif problems and "compiled" in item.name:
                item.add_marker(pytest.mark.skip(reason=problems))
            elif ASKED == "cpu" and any(name in item.nodeid for name in _ONLY_GPU):
                item.add_marker(pytest.mark.skip(reason="what a CPU does not have"))


@pytest.fixture
def device() -> torch.device:
    """The first GPU, or what `MESHWRIGHT_TEST_DEVICE` says."""
    return torch.device(ASKED) if ASKED else torch.device("cuda", 0)
