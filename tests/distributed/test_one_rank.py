"""One rank of a job of 16,384, without the others."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.patience import patient


def one_rank(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.one_rank", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(300), check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "rank"), [("3", "0"), pytest.param("1", "16383", marks=pytest.mark.long)])
def test_a_rank_of_16384_builds_and_draws_only_its_part(zero: str, rank: str) -> None:
    found = one_rank("--zero", zero, "--rank", rank)  # 405B on TP 8, PP 16, DP 128
    assert found["ranks"] == 16384
    assert found["elements"] == pytest.approx(405.85e9 / 16384, rel=0.15)
    assert found["drawn"] <= 1.2 * found["elements"]
    assert found["host_gigabytes"] <= 2
    # CPU time: a busy machine does not change it much.
    assert found["groups_seconds"] + found["build_seconds"] + found["draw_seconds"] <= 20
