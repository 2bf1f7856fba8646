"""Steps of every technique of one rank on CUDA tensors without a GPU: devices agree, and the host waits once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiers import mostly_long
from tests.worker.fake_gpu.library import library
from tests.worker.fake_gpu.steps import RUNS

ROOT = Path(__file__).parents[3]
RUN = """
import ctypes, runpy
ctypes.CDLL(sys.argv.pop(1))  # before torch, which looks for devices once
runpy.run_module("tests.worker.fake_gpu.steps", run_name="__main__")
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has a CUDA device of its own"),
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of the runs that are asked for."""
    chosen = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    paths = [str(ROOT), *(str(ROOT / part) for part in ("cli", "local", "operator", "worker"))]
    code = f"import sys; sys.path[:0] = {paths!r}\n{RUN}"
    done = subprocess.run(
        [sys.executable, "-c", code, str(library()), *chosen.intersection(RUNS)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


OFTEN = {"mixture", "packed documents in one kernel", "early updates"}
"""Runs with the most code of their own; what `dense` does is a part of each."""


@pytest.mark.parametrize("name", mostly_long(RUNS, OFTEN.__contains__))
def test_the_host_waits_once_in_a_step(results: dict[str, Any], name: str) -> None:
    """Where the sums of its results are read. Tensors on two devices would have raised."""
    (site,) = results[name]
    assert site.startswith(("trainer/trainer.py:", "trainer/early_update.py:"))


@pytest.mark.parametrize(
    ("operation", "outcome"),
    [
        ("reads_a_number", "waits"),
        ("copies_from_pageable_memory", "waits"),
        ("copies_and_waits", "waits"),
        ("fills_from_the_host", "waits"),
        ("copies_from_pinned_memory", ""),
    ],
)
def test_waits_are_seen(results: dict[str, Any], operation: str, outcome: str) -> None:
    assert results[operation] == outcome


def test_tensors_of_two_devices_are_an_error(results: dict[str, Any]) -> None:
    message = results["adds_tensors_of_two_devices"]
    assert all(word in message for word in ("devices", "cuda:0", "cpu")), message
