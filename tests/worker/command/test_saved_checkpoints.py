"""Checkpoints that a command reports: which count, and which are deleted."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import pytest

from meshwright.api import labels
from meshwright_worker.command import saved_checkpoints
from meshwright_worker.command.saved_checkpoints import LIST_NAME, SavedCheckpoints
from tests.patience import patient

VERIFY = "import os, sys; sys.exit(open(os.environ['MESHWRIGHT_CHECKPOINT_PATH']).read() != os.environ['GOOD'])"


def checkpoints(directory: Path, keep: int | None = None, verify: list[str] | None = None) -> SavedCheckpoints:
    return SavedCheckpoints(directory, verify, keep, {"GOOD": "complete"})


def save(directory: Path, step: int, text: str = "complete") -> str:
    (directory / f"step-{step}").write_text(text)
    return f"step-{step}"


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    deadline = time.monotonic() + patient(10)
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not runs(pid)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step-*"))


async def test_a_checkpoint_counts_if_its_verification_exits_with_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = checkpoints(tmp_path, verify=[sys.executable, "-c", VERIFY])
    assert await saved.accept(1, save(tmp_path, 1))
    assert await saved.accept(1, str(tmp_path / "step-1")), "the path may be absolute"
    with caplog.at_level(logging.WARNING):
        assert not await saved.accept(2, save(tmp_path, 2, "half"))
        assert not await saved.accept(3, "missing")
    assert "the checkpoint of step 2 at" in caplog.text
    assert "is not valid (code 1)" in caplog.text
    assert "FileNotFoundError" in caplog.text, "the log has the output of the verification"
    assert (tmp_path / "step-2").exists(), "what is not valid is left to the user"


async def test_a_verification_that_cannot_run_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = checkpoints(tmp_path, verify=["/no/such/program"])
    assert not await saved.accept(1, save(tmp_path, 1))
    assert "`checkpoint.verify` cannot run, so step 1 does not count" in caplog.text


async def test_a_verification_that_does_not_end_is_killed_with_what_it_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_checkpoints, "VERIFY_SECONDS", 0.5)
    child = tmp_path / "child"
    saved = checkpoints(tmp_path, verify=["sh", "-c", f"trap '' TERM; sleep 600 & echo $! > {child}; wait"])
    assert not await saved.accept(1, save(tmp_path, 1))
    assert "`checkpoint.verify` took over" in caplog.text
    assert ends(int(child.read_text()))


async def test_the_newest_are_retained_also_by_another_pod(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        assert await checkpoints(tmp_path, keep=2).accept(step, save(tmp_path, step))
    directory = tmp_path / "step-40"
    directory.mkdir()
    (directory / "rank0.pt").write_text("")
    assert await checkpoints(tmp_path, keep=2).accept(40, "step-40")
    assert names(tmp_path) == ["step-30", "step-40"]
    # After a return to step 30, the newest is the one that was reported last.
    assert await checkpoints(tmp_path, keep=2).accept(35, save(tmp_path, 35))
    assert names(tmp_path) == ["step-35", "step-40"]
    assert await checkpoints(tmp_path, keep=1).accept(36, save(tmp_path, 36))
    assert names(tmp_path) == ["step-36"]


async def test_what_the_next_start_would_name_stays_until_the_operator_knows_a_newer_one(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    resumed = {labels.ENV_RESUME_PATH: str(tmp_path / "step-10")}
    assert await checkpoints(tmp_path, keep=1).accept(10, "step-10")
    saved = SavedCheckpoints(tmp_path, None, 1, resumed)
    assert await saved.accept(20, "step-20")
    assert names(tmp_path) == ["step-10", "step-20"], "the pod may be lost before it has reported step 20"
    await saved.delivered("step-20")
    assert names(tmp_path) == ["step-20"]
    assert await saved.accept(30, save(tmp_path, 30))
    assert await saved.accept(40, save(tmp_path, 40))
    assert names(tmp_path) == ["step-20", "step-40"], "an operator that is away costs one checkpoint"
    await saved.delivered("step-40")
    assert names(tmp_path) == ["step-40"]
    assert json.loads((tmp_path / LIST_NAME).read_text()) == [[40, str(tmp_path / "step-40")]]


async def test_a_checkpoint_that_is_overwritten_is_not_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (tmp_path / "latest").write_text(str(step))
        assert await checkpoints(tmp_path, keep=1).accept(step, "latest")
    assert (tmp_path / "latest").read_text() == "3"


async def test_only_what_is_below_the_directory_is_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inside, outside = tmp_path / "checkpoints", tmp_path / "other"
    inside.mkdir()
    outside.write_text("kept")
    (inside / "link").symlink_to(tmp_path)
    saved = checkpoints(inside, keep=1)
    for step, path in enumerate((str(outside), "../other", "link/other", ".", str(inside), "gone")):
        assert await saved.accept(step, path)
    assert await saved.accept(9, save(inside, 9))
    assert outside.read_text() == "kept"
    assert inside.is_dir()
    assert "is not deleted" in caplog.text
    assert json.loads((inside / LIST_NAME).read_text()) == [[9, str(inside / "step-9")]]


async def test_a_damaged_list_is_replaced(tmp_path: Path) -> None:
    (tmp_path / LIST_NAME).write_text('{"a": 1}')
    assert await checkpoints(tmp_path, keep=1).accept(1, save(tmp_path, 1))
    assert await checkpoints(tmp_path, keep=1).accept(2, save(tmp_path, 2))
    assert not (tmp_path / "step-1").exists()
