"""One rank of a job of 16,384, without the others."""

from __future__ import annotations

import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.distributed.rank_pool import RankPool
from tests.patience import patient


def print_to(connection: Connection, arguments: list[str]) -> None:
    """Send what the program prints."""
    sys.argv = ["one_rank", *arguments]
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_module("benchmarks.one_rank", run_name="__main__")
    connection.send(printed.getvalue())


def one_rank(pool: RankPool, *arguments: str) -> dict[str, Any]:
    """Its numbers, of a process of its own that has torch already."""
    ours, theirs = pool.context.Pipe()
    process = pool.context.Process(target=print_to, args=(theirs, list(arguments)), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(patient(300)), "it prints nothing"
        found: dict[str, Any] = json.loads(ours.recv())
    finally:
        process.kill()
        process.join()
        ours.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "rank"), [("3", "0"), pytest.param("1", "16383", marks=pytest.mark.long)])
def test_a_rank_of_16384_builds_and_draws_only_its_part(pool: RankPool, zero: str, rank: str) -> None:
    found = one_rank(pool, "--zero", zero, "--rank", rank)  # 405B on TP 8, PP 16, DP 128
    assert found["ranks"] == 16384
    assert found["elements"] == pytest.approx(405.85e9 / 16384, rel=0.15)
    assert found["drawn"] <= 1.2 * found["elements"]
    assert found["host_gigabytes"] <= 2
    # CPU time: a busy machine does not change it much.
    assert found["groups_seconds"] + found["build_seconds"] + found["draw_seconds"] <= 20
