"""Checkpoints as files: the format, the commit, what is kept."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from meshwright.api.checkpoint import Retention
from meshwright.manifest_checksum import with_checksum
from meshwright.models.architecture import Architecture
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.files import LocalFiles
from meshwright_worker.checkpoint.manifest import (
    MANIFEST,
    BaseManifest,
    FileRecord,
    LayoutRecord,
    Manifest,
    ModuleManifest,
    TrainingState,
    check_file,
    encode_manifest,
    read_manifest,
    read_manifest_as,
)
from meshwright_worker.checkpoint.safetensors_format import dtype_name, file_checksum, map_tensor, write_tensors
from meshwright_worker.checkpoint.tensor_index import decode, index_of
from meshwright_worker.checkpoint_errors import CheckpointError, DamagedCheckpointError, ForeignCheckpointError

ARCHITECTURE = Architecture(layers=1, hidden_size=8, intermediate_size=8, heads=2, kv_heads=2, vocab_size=257)


def manifest_at(step: int) -> Manifest:
    return Manifest(
        state=TrainingState(step=step, samples=step * 8, digest=(1 << 63) - 1, loss=(1.1).hex()),
        architecture=ARCHITECTURE,
        seed=0,
        sequence_length=8,
        stream="s",
        layout=LayoutRecord(tensor=1, pipeline=1, data=1, zero_stage=0),
    )


def save(directory: CheckpointDirectory, step: int) -> Path:
    hidden = directory.prepare(step)
    (hidden / "data").write_bytes(b"x")
    return directory.commit(manifest_at(step))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_tensors_come_back_as_they_were(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "odd": torch.arange(3).to(dtype),
        "matrix": torch.arange(20).reshape(4, 5).t().to(dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "scalar": torch.ones((), dtype=dtype),
    }
    path = tmp_path / "file.safetensors"
    starts, size, checksum = write_tensors(path, tensors)
    assert (size, checksum) == file_checksum(path) == (path.stat().st_size, checksum)
    for name, tensor in tensors.items():
        assert torch.equal(map_tensor(path, starts[name], dtype, tensor.shape), tensor)


def test_large_tensors_are_written_in_blocks(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    tensors = {"small": torch.arange(3), "large": torch.arange(2_500_000), "end": torch.arange(200_000)}
    starts, size, checksum = write_tensors(path, tensors)
    assert size > 20 << 20
    assert (size, checksum) == file_checksum(path)
    for name, tensor in tensors.items():
        assert torch.equal(map_tensor(path, starts[name], tensor.dtype, tensor.shape), tensor)


def test_the_file_is_what_the_safetensors_format_says(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_tensors(path, {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3]], dtype=torch.int64)})
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    assert json.loads(content[8 : 8 + length]) == {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "I64", "shape": [1, 1], "data_offsets": [8, 16]},
    }
    assert struct.unpack("<ffq", content[8 + length :]) == (1.0, 2.0, 3)


def test_what_has_no_name_in_the_format_is_rejected() -> None:
    with pytest.raises(ValueError, match="complex64"):
        dtype_name(torch.complex64)
    with pytest.raises(ValueError, match="contains only tensors"):
        index_of(Metadata({"x": BytesStorageMetadata()}), {})


@pytest.mark.parametrize(
    "content",
    [
        *(b"[]", b"{", b'{"a": {}}', b'{"a": 3}', b"\x80\x04."),
        b'{"a": {"dtype": "F32", "shape": [1], "boxes": [[[0], [1], "../file", 0]]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "boxes": [[[0], [-1], "file", 0]]}}',
    ],
)
def test_what_is_not_an_index_is_rejected(content: bytes) -> None:
    with pytest.raises(ValueError, match="not an index of tensors"):
        decode(content)


@pytest.mark.parametrize("change", ["flip", "cut", "grow", "remove"])
def test_damage_is_seen(tmp_path: Path, change: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    size, checksum = file_checksum(path)
    record = FileRecord(size=size, crc32=checksum)
    check_file(LocalFiles(tmp_path), "file", record)
    if change == "remove":
        path.unlink()
    else:
        path.write_bytes({"flip": b"0123456780", "cut": b"012345678", "grow": b"0123456789 "}[change])
    with pytest.raises(DamagedCheckpointError, match="/file is damaged: "):
        check_file(LocalFiles(tmp_path), "file", record)


def test_what_cannot_be_read_is_not_damaged(tmp_path: Path) -> None:
    for name in (MANIFEST, "file"):
        (tmp_path / name).symlink_to(name)  # Opening it is an error that is not "no such file".
    with pytest.raises(OSError, match="symbolic links"):
        read_manifest(tmp_path)
    with pytest.raises(OSError, match="symbolic links"):
        check_file(LocalFiles(tmp_path), "file", FileRecord(size=1, crc32=1))


def test_a_checkpoint_is_invisible_until_it_is_committed(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "new")
    assert directory.steps() == []
    directory.prepare(5)
    assert directory.steps() == []
    directory.commit(manifest_at(5))
    assert directory.steps() == [5]
    assert read_manifest(directory.path(5)) == manifest_at(5)


def test_a_directory_without_a_manifest_is_not_a_checkpoint(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    directory.path(7).mkdir()
    (tmp_path / "step-x").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert directory.steps() == []


def test_a_directory_without_a_manifest_is_named_when_ranks_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a word, the run began with an older checkpoint, or at step 0."""
    directory = CheckpointDirectory(tmp_path)
    for step in (3, 6):
        save(directory, step)
    directory.clean()
    assert not caplog.text
    (directory.path(6) / MANIFEST).unlink()
    directory.clean()
    assert f"{directory.path(6)} has no file {MANIFEST}, and does not count as a checkpoint" in caplog.text
    assert directory.path(6).exists()


@pytest.mark.parametrize("content", [b"", b"null", b'{"format": 1', b"\0" * 40, b'{"format": "\xff"}', b"[" * 100_000])
def test_a_manifest_that_no_version_wrote_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=f"{MANIFEST} is damaged"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"format": 3}, "its format is 3, this version reads 1 to 2"),
        (
            {
                "architecture": {
                    **json.loads(manifest_at(1).model_dump_json(by_alias=True))["architecture"],
                    "newGate": "Sigmoid",
                }
            },
            "`architecture.newGate`: Extra inputs",
        ),
        ({"layout": {"tensor": "some"}}, "`layout.tensor`: "),
    ],
)
def test_a_manifest_of_another_version_is_not_a_damaged_one(
    tmp_path: Path, changed: dict[str, object], reason: str
) -> None:
    fields = json.loads(manifest_at(1).model_dump_json(by_alias=True))
    (tmp_path / MANIFEST).write_text(json.dumps(with_checksum({**fields, **changed})))
    with pytest.raises(ForeignCheckpointError, match=f"another version of Meshwright .*{reason}"):
        read_manifest(tmp_path)


def test_what_a_later_version_adds_to_a_manifest_is_ignored(tmp_path: Path) -> None:
    fields = json.loads(manifest_at(1).model_dump_json(by_alias=True))
    fields["newField"] = fields["state"]["newField"] = fields["layout"]["newField"] = [1]
    fields["architecture"]["newGate"] = None
    (tmp_path / MANIFEST).write_text(json.dumps(with_checksum(fields)))
    assert read_manifest(tmp_path) == manifest_at(1)


@pytest.mark.parametrize("change", [lambda text: text.replace('"step": 1', '"step": 3'), lambda text: text + " ] "])
def test_a_flipped_bit_in_a_manifest_is_damage(tmp_path: Path, change: Callable[[str], str]) -> None:
    text = encode_manifest(manifest_at(1)).decode()
    (tmp_path / MANIFEST).write_text(change(text))
    assert change(text) != text
    with pytest.raises(DamagedCheckpointError, match=f"{MANIFEST} is damaged"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a//b", ""])
def test_a_manifest_that_names_a_file_outside_of_the_checkpoint_is_rejected(tmp_path: Path, name: str) -> None:
    fields = json.loads(manifest_at(1).model_dump_json(by_alias=True))
    fields["files"] = {name: {"size": 1, "crc32": 1}}
    (tmp_path / MANIFEST).write_text(json.dumps(with_checksum(fields)))
    with pytest.raises(ForeignCheckpointError, match="is not the name of a file in a checkpoint"):
        read_manifest(tmp_path)


def test_a_manifest_without_a_checksum_is_damaged(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(manifest_at(1).model_dump_json(by_alias=True))
    with pytest.raises(DamagedCheckpointError, match="it has no checksum"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("kind", [Manifest, ModuleManifest])
def test_a_checkpoint_of_something_else_is_not_taken_for_a_damaged_one(
    tmp_path: Path, kind: type[BaseManifest]
) -> None:
    layout = LayoutRecord(tensor=1, pipeline=1, data=1, zero_stage=0)
    other = (
        manifest_at(1) if kind is ModuleManifest else ModuleManifest(state=TrainingState(), module="M", layout=layout)
    )
    (tmp_path / MANIFEST).write_bytes(encode_manifest(other))
    with pytest.raises(ForeignCheckpointError, match="use another directory"):
        read_manifest_as(tmp_path, kind)
    assert read_manifest_as(tmp_path, type(other)) == other


def test_the_newest_are_retained(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (3, 20, 100, 100_000_000):
        save(directory, step)
    directory.retain(Retention(2))
    assert directory.steps() == [100_000_000, 100]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_step_before_the_existing_ones_is_rejected(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (100, 200):
        save(directory, step)
    with pytest.raises(CheckpointError, match="later steps than 10, up to 200: load the newest before training, or"):
        save(directory, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000100", "step-00000200"]
    save(directory, 200)


def test_the_same_step_again_replaces_the_old(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    save(directory, 4)
    (directory.path(4) / "old").write_text("")
    save(directory, 4)
    directory.retain(Retention(2))
    assert sorted(path.name for path in directory.path(4).iterdir()) == ["data", MANIFEST]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_a_crash_before_the_replacement_has_its_name_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, rename = CheckpointDirectory(tmp_path), Path.rename
    old = save(directory, 4) / "old"
    old.touch()

    def killed_before_the_second(path: Path, target: Path) -> Path:
        if path == directory.temporary(4):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed_before_the_second)
    with pytest.raises(KeyboardInterrupt):
        save(directory, 4)
    assert directory.steps() == []
    directory.clean()
    assert old.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_what_was_to_be_removed_does_not_come_back(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (1, 2):
        save(directory, step)
    with patch.object(shutil, "rmtree"):  # Killed before anything is removed.
        directory.retain(Retention(1))
    assert len(list(tmp_path.iterdir())) == 2
    directory.clean()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_cleaning_removes_what_is_hidden_and_nothing_else(tmp_path: Path) -> None:
    directory, older = CheckpointDirectory(tmp_path, generation=2), CheckpointDirectory(tmp_path, generation=1)
    for step in (1, 2):
        save(directory, step)
    older.prepare(3)
    (tmp_path / ".other").mkdir()
    directory.clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other", "step-00000001", "step-00000002"]


def test_a_damaged_checkpoint_stays_until_a_newer_one_is_complete(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (1, 2):
        save(directory, step)
    directory.quarantine(2)
    assert directory.steps() == [1]
    directory.clean()
    assert (tmp_path / ".damaged-step-00000002" / "data").exists()
    save(directory, 2)
    directory.retain(Retention(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
