"""Requests to profile steps: what a rank writes, and that no request stops it."""

from __future__ import annotations

import base64
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.labels import MAX_PROFILED_STEPS, PROFILE_DIRECTORY, PROFILE_REQUEST
from meshwright_cli.client import profiling
from meshwright_worker.trainer.step_profiler import StepProfiler


def ask(directory: Path, **fields: Any) -> None:
    request = {"name": "a1", "ranks": [0], "first": 3, "last": 4, **fields}
    (directory / "part").write_text(json.dumps(request))
    os.replace(directory / "part", directory / PROFILE_REQUEST)


def steps(profiler: StepProfiler, numbers: range) -> None:
    for number in numbers:
        profiler.before(number)
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.after(number)


def answer(directory: Path, name: str = "a1") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress((directory / f"{name}-rank-0.json.gz").read_bytes()))
    return found


def test_the_steps_that_were_asked_for_are_traced(tmp_path: Path) -> None:
    profiler = StepProfiler(0, directory=tmp_path)
    steps(profiler, range(1, 3))
    ask(tmp_path)
    steps(profiler, range(2, 4))
    assert list(tmp_path.iterdir()) == [tmp_path / PROFILE_REQUEST], "nothing is written before the last step"
    steps(profiler, range(4, 6))
    profiler.close()
    trace = answer(tmp_path)
    assert trace["meshwright"]["synchronous"] is True
    assert [step for step, _ in trace["meshwright"]["ends"]] == [3, 4]
    products = [event for event in trace["traceEvents"] if event.get("name") == "aten::mm"]
    marks = [event for event in trace["traceEvents"] if str(event.get("name")).startswith("step ")]
    assert [mark["name"] for mark in marks] == ["step 3", "step 4"]
    assert len(products) == 2
    for mark, product in zip(marks, products, strict=True):
        assert mark["ts"] <= product["ts"] <= mark["ts"] + mark["dur"]
    assert trace["baseTimeNanoseconds"] > 0
    assert not list(tmp_path.glob("*part*"))


def test_requests_to_other_ranks_are_ignored(tmp_path: Path) -> None:
    other = StepProfiler(1, directory=tmp_path)
    ask(tmp_path, first=8, last=8)
    steps(other, range(6, 10))
    assert list(tmp_path.iterdir()) == [tmp_path / PROFILE_REQUEST]


def test_a_request_that_is_deleted_before_its_steps_is_forgotten(tmp_path: Path) -> None:
    profiler = StepProfiler(0, directory=tmp_path)
    ask(tmp_path, first=5, last=6)
    steps(profiler, range(1, 2))
    (tmp_path / PROFILE_REQUEST).unlink()
    steps(profiler, range(2, 9))
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_a_request_is_served_by_a_rank_that_starts_later(tmp_path: Path) -> None:
    """It was written while the job started, or restarted."""
    ask(tmp_path)
    late = StepProfiler(0, directory=tmp_path)
    steps(late, range(1, 6))
    late.close()
    assert [step for step, _ in answer(tmp_path)["meshwright"]["ends"]] == [3, 4]
    over = StepProfiler(0, directory=tmp_path)
    steps(over, range(7, 8))
    assert answer(tmp_path)["meshwright"]["error"] == "step 3 is over: the next one is 7"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"first": 2}, "step 2 is over: the next one is 7"),
        ({"first": 9, "last": 9 + MAX_PROFILED_STEPS}, "1 to 50 steps can be profiled at once, got 51"),
        ({"first": 9, "last": 8}, "1 to 50 steps can be profiled at once, got 0"),
    ],
)
def test_a_request_that_cannot_be_served_is_answered(tmp_path: Path, fields: dict[str, int], error: str) -> None:
    profiler = StepProfiler(0, directory=tmp_path)
    ask(tmp_path, **fields)
    steps(profiler, range(7, 12))
    assert answer(tmp_path)["meshwright"]["error"] == error


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "../../x", "first": 1, "last": 1, "ranks": [0]}'])
def test_a_request_that_is_damaged_stops_nothing(tmp_path: Path, text: str) -> None:
    profiler = StepProfiler(0, directory=tmp_path)
    (tmp_path / PROFILE_REQUEST).write_text(text)
    steps(profiler, range(1, 3))
    assert list(tmp_path.iterdir()) == [tmp_path / PROFILE_REQUEST]
    ask(tmp_path)
    steps(profiler, range(3, 5))
    profiler.close()
    assert answer(tmp_path)["meshwright"]["ends"]


def test_a_request_replaces_one_that_still_waits_and_none_that_is_served(tmp_path: Path) -> None:
    profiler = StepProfiler(0, directory=tmp_path)
    ask(tmp_path, first=50, last=50)
    steps(profiler, range(1, 2))
    ask(tmp_path, name="b2", first=3, last=5)
    steps(profiler, range(2, 4))
    assert answer(tmp_path)["meshwright"]["error"] == "another request came before these steps"
    ask(tmp_path, name="c3", first=8, last=8)
    steps(profiler, range(4, 6))
    assert answer(tmp_path, "c3")["meshwright"]["error"].startswith("another profile is being taken")
    profiler.close()
    assert [step for step, _ in answer(tmp_path, "b2")["meshwright"]["ends"]] == [3, 4, 5]


@pytest.mark.parametrize("done", [range(1, 2), range(1, 3), range(1, 4)])
def test_a_profile_that_training_does_not_complete_is_answered(tmp_path: Path, done: range) -> None:
    profiler = StepProfiler(0, directory=tmp_path)
    ask(tmp_path)
    steps(profiler, done)
    profiler.close()
    assert answer(tmp_path)["meshwright"]["error"] == "training stopped before the last of these steps"
    again = StepProfiler(0, directory=tmp_path)
    ask(tmp_path, name="b2", first=5, last=5)
    steps(again, range(4, 6))
    again.close()
    assert answer(tmp_path, "b2")["meshwright"]["ends"], "the profiler can start again"
    assert not (tmp_path / "a1-rank-0.json.gz").exists(), "traces that nobody fetched are deleted"


def test_the_programs_of_the_client_reach_the_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(program: str, argument: str) -> bytes:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.run(
            [sys.executable, "-c", program, argument], env=environment, capture_output=True, check=True
        ).stdout

    profiler = StepProfiler(0)
    run(profiling._REQUEST, json.dumps({"name": "a1", "ranks": [0], "first": 3, "last": 3}))
    steps(profiler, range(3, 5))
    profiler.close()
    trace = json.loads(gzip.decompress(base64.b64decode(run(profiling._FETCH, "a1-rank-0.json.gz"))))
    assert trace["meshwright"]["ends"]
    run(profiling._REMOVE, "a1")
    assert list((tmp_path / PROFILE_DIRECTORY).iterdir()) == []
