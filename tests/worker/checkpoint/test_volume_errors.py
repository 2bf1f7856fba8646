"""Errors of a volume at every call of a save, a start and a removal: they cost no complete checkpoint."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.checkpoint import Retention
from meshwright_worker.checkpoint.async_save import commit_checkpoint, write_file
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.full_tensors import FullTensorReader
from meshwright_worker.checkpoint.manifest import check_files, read_manifest
from meshwright_worker.checkpoint.save_plan import encode_plan, file_of_rank, global_plan, local_plan, tensors_to_write
from meshwright_worker.checkpoint.store import Tier
from meshwright_worker.checkpoint_errors import describe_failed_save, is_storage_failure
from tests.worker.checkpoint.test_checkpoint_files import manifest_at

CALLS = ((os, "fsync"), (Path, "open"), (Path, "mkdir"), (Path, "rename"), (Path, "unlink"), (os, "open"))
"""What a save calls of a volume. What it reads fails in other tests."""
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.EACCES)


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(100.0) + step}


def save(directory: CheckpointDirectory, step: int) -> None:
    """As the ranks save, and what rank 0 does if that fails."""
    tier = Tier(directory, Retention(2))
    try:
        directory.prepare(step)
        items = local_plan(tensors_of(step), is_coordinator=True)
        planned = global_plan([encode_plan(items)])
        name = file_of_rank(0)
        record = write_file(directory, step, name, tensors_to_write(items, tensors_of(step)))
        commit_checkpoint(manifest_at(step), tier, {name: record}, planned.index_name, planned.index)
    except OSError:
        directory.discard(step)
        raise


def intact(directory: CheckpointDirectory) -> list[int]:
    """The complete checkpoints, all of which have every byte."""
    for step in directory.steps():
        check_files(directory.path(step), read_manifest(directory.path(step)))
        found = FullTensorReader(directory.path(step))
        assert torch.equal(found.read("weight"), tensors_of(step)["weight"])
    return directory.steps()


@contextmanager
def failing(number: int, at: int, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The call with this number fails. Yields the names of the calls so far."""
    called: list[str] = []

    def wrap(owner: Any, name: str) -> Callable[..., Any]:
        inner = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            if len(called) == at:
                raise OSError(number, os.strerror(number), str(args[0]))
            return inner(*args, **kwargs)

        return call

    with patch.context() as inner:
        for owner, name in CALLS:
            inner.setattr(owner, name, wrap(owner, name))
        yield called


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("step", [30, 20], ids=["next", "again"])
def test_an_error_of_any_call_of_a_save_leaves_the_ones_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, step: int
) -> None:
    directory = CheckpointDirectory(tmp_path)
    for one in (10, 20):
        save(directory, one)
    with failing(number, 0, monkeypatch) as called:
        save(CheckpointDirectory(tmp_path / "other"), 10)
    assert len(called) > 10
    for at in range(1, len(called) + 3):
        failures = []
        with failing(number, at, monkeypatch):
            try:
                save(directory, step)
            except OSError as error:
                failures.append(error)
        assert all(is_storage_failure(error) for error in failures)
        assert all(os.strerror(number) in describe_failed_save(error) for error in failures)
        kept = intact(directory)
        assert 20 in kept, (at, called)
        directory.clean()
        assert intact(directory) == kept
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
        directory.remove_newer(20)
        if 10 not in kept:
            shutil.rmtree(directory.path(20))
            save(directory, 10)
            save(directory, 20)
    save(directory, 30)
    assert intact(directory) == [30, 20]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["stat", "iterdir"])
def test_a_volume_that_cannot_be_listed_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    """A start that took it for empty would begin at step 0, and remove what it had not seen."""
    directory = CheckpointDirectory(tmp_path)
    save(directory, 10)
    directory.path(10).rename(tmp_path / ".replaced-step-00000010")  # a crash while it was replaced

    def fails(path: Path, *args: object, **kwargs: object) -> object:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, fails)
        for action in (directory.clean, directory.steps if call == "iterdir" else directory.clean):
            with pytest.raises(OSError, match=os.strerror(number)):
                action()
    directory.clean()
    assert intact(directory) == [10]
    with monkeypatch.context() as patch:
        patch.setattr(Path, call, fails)
        with pytest.raises(OSError, match=os.strerror(number)):
            directory.steps()


def test_a_directory_that_is_not_there_is_empty(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "none")
    directory.clean()
    assert (directory.steps(), directory.unfinished()) == ([], {})


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO], ids=errno.errorcode.get)
def test_a_file_system_that_cannot_flush_directories_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    directory = CheckpointDirectory(tmp_path)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            save(directory, 10)
    else:
        save(directory, 10)
        assert intact(directory) == [10]


def test_what_cannot_be_removed_is_named_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (10, 20):
        save(directory, step)
    monkeypatch.setattr("meshwright_worker.checkpoint.directory.log", logging.getLogger("heard"))

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors and path.exists():
            raise OSError(errno.EBUSY, "Device or resource busy", str(path / ".nfs0001"))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "heard"):
        patch.setattr(shutil, "rmtree", busy)
        save(directory, 30)
    assert ".retired-step-00000010 cannot be removed, and takes space: " in caplog.text
    assert intact(directory) == [30, 20]
    directory.clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]
