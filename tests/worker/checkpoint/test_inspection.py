"""Lists, verifies and copies checkpoints in directories and object stores."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright_worker import checkpoints
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.files import files_of
from meshwright_worker.checkpoint.inspection import copied, listed, verified
from meshwright_worker.checkpoint.manifest import MANIFEST, FileRecord, check_files, read_manifest
from meshwright_worker.checkpoint.store import CheckpointStore, open_store
from meshwright_worker.checkpoint_errors import CheckpointError, DamagedCheckpointError
from tests.worker.checkpoint.saving import save_alone
from tests.worker.checkpoint.test_checkpoint_files import manifest_at

TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.tensor(7)}
FILE = "rank-00000.safetensors"


def save_steps(place: str, *steps: int, losses: Mapping[int, float] | None = None) -> CheckpointStore:
    store = open_store(place)
    for step in steps:
        store.prepare(step)

        def commit(files: dict[str, FileRecord], step: int = step) -> None:
            manifest = manifest_at(step)
            state = manifest.state.model_copy(update={"evaluation_loss": (losses or {}).get(step)})
            store.commit(manifest.model_copy(update={"files": files, "state": state}))

        save_alone(TENSORS, store.sink(step), commit)
    return store


@pytest.fixture(params=["directory", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "directory" else f"memory://{uuid.uuid4().hex}/run"


def test_all_checkpoints_of_a_place_are_listed_with_their_state(place: str) -> None:
    store = save_steps(place, 10, 20, 30)
    store.quarantine(20)
    store.make_place(40)
    store.sink(40).write(FILE, b"half")
    found = listed(place)
    assert [(one.step, one.state) for one in found] == [
        (40, "incomplete"),
        (30, "complete"),
        (20, "damaged"),
        (10, "complete"),
    ]
    newest = found[1]
    assert newest.size == sum(record.size for record in read_manifest(store.files(30)).files.values())
    assert newest.saved_at is not None
    assert newest.layout
    assert found[0].size is None


def test_a_checkpoint_is_a_place_too(tmp_path: Path) -> None:
    store = save_steps(str(tmp_path), 10, 20)
    (one,) = listed(store.location(10))
    assert (one.step, one.state) == (10, "complete")
    assert [entry.step for entry in verified(store.location(10), None)] == [10]
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        listed(str(tmp_path / "none"))


def test_verify_reads_every_file_and_names_the_damaged_ones(tmp_path: Path) -> None:
    save_steps(str(tmp_path), 10, 20, 30)
    directory = CheckpointDirectory(tmp_path)
    damaged = directory.path(20) / FILE
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    (directory.path(10) / FILE).unlink()
    found = {one.step: one for one in verified(str(tmp_path), None)}
    assert found[30].problems == []
    assert found[30].files == 2
    (problem,) = found[20].problems
    assert f"{damaged} is damaged: its checksum differs" in problem
    (problem,) = found[10].problems
    assert "the file is missing" in problem
    manifest = directory.path(30) / MANIFEST
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1'))
    (found_now,) = verified(str(tmp_path), 30)
    assert str(manifest) in found_now.problems[0]
    with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 31"):
        list(verified(str(tmp_path), 31))


def test_a_checkpoint_that_was_renamed_is_named_and_not_copied(tmp_path: Path) -> None:
    save_steps(str(tmp_path), 10, 20)
    CheckpointDirectory(tmp_path).path(20).rename(tmp_path / "step-00000030")
    found = {one.step: one.problems for one in verified(str(tmp_path), None)}
    manifest = tmp_path / "step-00000030" / MANIFEST
    assert found == {10: [], 30: [f"{manifest} is of step 20: give the checkpoint its name again"]}
    with pytest.raises(DamagedCheckpointError, match="is of step 20: give the checkpoint its name again"):
        copied([str(tmp_path)], 30, str(tmp_path / "copy"))
    assert copied([str(tmp_path)], None, str(tmp_path / "copy")).step == 10, "the newest that has its own name"


@pytest.mark.parametrize("target", ["directory", "object store"])
def test_a_copy_is_the_same_checkpoint(place: str, tmp_path: Path, target: str) -> None:
    source = save_steps(place, 10, 20)
    where = str(tmp_path / "a" / "copy") if target == "directory" else f"memory://{uuid.uuid4().hex}/copy"
    done = copied([place], None, where)
    assert (done.step, done.files) == (20, 2)
    store = open_store(where)
    assert store.steps() == [20]
    assert store.files(20).read(MANIFEST) == files_of(source.files(20)).read(MANIFEST)
    check_files(store.files(20), read_manifest(store.files(20)))
    copied([place], 10, where)  # an older one beside a newer one
    assert store.steps() == [20, 10]
    with pytest.raises(CheckpointError, match="has a checkpoint of step 10 already"):
        copied([place], 10, where)


def test_the_newest_intact_one_over_all_tiers_is_copied_and_nothing_of_a_damaged_one(tmp_path: Path) -> None:
    volume, store = tmp_path / "volume", f"memory://{uuid.uuid4().hex}/run"
    save_steps(str(volume), 10, 30)
    save_steps(store, 20)
    (CheckpointDirectory(volume).path(30) / FILE).write_bytes(b"short")
    target = tmp_path / "copy"
    assert copied([str(volume), store], None, str(target)).step == 20
    with pytest.raises(DamagedCheckpointError, match=FILE):
        copied([str(volume)], 30, str(target))
    assert [entry.name for entry in target.iterdir()] == ["step-00000020"], "complete or nothing"


def test_the_best_intact_one_over_all_tiers_is_copied(tmp_path: Path) -> None:
    volume, store = str(tmp_path / "volume"), f"memory://{uuid.uuid4().hex}/run"
    save_steps(volume, 10, 30, 40, losses={10: 3.0, 30: 1.0, 40: 2.0})
    save_steps(store, 20, 30, 50, losses={20: 1.5, 30: 1.0})
    (CheckpointDirectory(Path(volume)).path(30) / FILE).write_bytes(b"short")
    done = copied([volume, store], None, str(tmp_path / "copy"), best=True)
    assert (done.step, done.source.startswith(store)) == (30, True), "the store has the same one, and it is intact"
    store_files = open_store(store)
    store_files.sink(30).write(FILE, b"short")
    assert copied([volume, store], None, str(tmp_path / "next"), best=True).step == 20
    save_steps(str(tmp_path / "other"), 10)
    with pytest.raises(FileNotFoundError, match=r"checkpoint\.keepBest"):
        copied([str(tmp_path / "other")], None, str(tmp_path / "none"), best=True)


def run_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> list[Any]:
    """What the program prints about each checkpoint."""
    monkeypatch.setattr(sys, "argv", ["checkpoints", *words])
    checkpoints.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_program_shows_losses_and_selects_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    volume, store = str(tmp_path / "volume"), f"file://{tmp_path}/store"
    save_steps(volume, 10, 20, 30, losses={10: 2.0, 20: 1.0, 30: 1.0})
    save_steps(store, 10, 20, 40, losses={10: 2.0, 20: 1.0})
    places = [f"--at={volume}", f"--at={store}"]
    shown = run_program(monkeypatch, capsys, "list", *places)
    assert [(one["step"], one["evaluation_loss"], one["best"]) for one in shown] == [
        *((30, 1.0, False), (20, 1.0, True), (10, 2.0, False)),
        *((40, None, False), (20, 1.0, True), (10, 2.0, False)),
    ]
    for action in ("list", "verify", "lineage"):
        found = run_program(monkeypatch, capsys, action, "--best", *places)
        assert {one["step"] for one in found} == {20}
        assert len(found) == (1 if action == "lineage" else 2)
    (only,) = run_program(monkeypatch, capsys, "verify", "--best", f"--at={store}", f"--at={volume}/step-00000030")
    assert only["step"] == 20
    for words, message in (
        (["list", "--best", "--step=10", *places], "--best is not supported with --step"),
        (["verify", "--best", f"--at={store}/step-00000040-g0"], "no complete checkpoint in"),
    ):
        with pytest.raises(SystemExit):
            run_program(monkeypatch, capsys, *words)
        assert message in capsys.readouterr().err


def test_a_manifest_of_a_later_or_an_earlier_version_is_listed_verified_and_copied(tmp_path: Path) -> None:
    recorded = Path(__file__).parents[2] / "compatibility" / "0.1.0"
    places = sorted({path.parent.parent for path in recorded.rglob(MANIFEST)})
    assert places
    for place in places:
        assert all(one.state == "complete" for one in listed(str(place)))
        assert all(not one.problems for one in verified(str(place), None))
        copied([str(place)], None, str(tmp_path / place.name))
    save_steps(str(tmp_path / "later"), 10)
    assert listed(str(tmp_path / "later"))[0].state == "complete"


def test_the_program_prints_json_and_names_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(str(tmp_path / "run"), 10)
    command = [sys.executable, "-m", "meshwright_worker.checkpoints"]
    done = subprocess.run([*command, "list", "--at", f"{tmp_path}/run"], capture_output=True, text=True, check=True)
    (entry,) = map(json.loads, done.stdout.splitlines())
    assert (entry["step"], entry["state"], entry["place"]) == (10, "complete", f"{tmp_path}/run")
    monkeypatch.setattr(sys, "argv", [*command[2:], "list", "--at", f"{tmp_path}/none"])
    with pytest.raises(SystemExit) as failed:
        checkpoints.main()
    assert failed.value.code == 2
    assert f": error: `{tmp_path}/none` is not a directory" in capsys.readouterr().err
