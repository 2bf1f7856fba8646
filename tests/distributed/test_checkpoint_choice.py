"""Which checkpoint two ranks go on from, when files are damaged, unreadable, of another version or not shared."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from meshwright.api.checkpoint import Retention
from meshwright.manifest_checksum import with_checksum
from meshwright.models.presets import PRESETS
from meshwright_worker.checkpoint.async_save import AsyncCheckpointer
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.checkpoint.loader import find_checkpoint_on_mesh, newest_intact
from meshwright_worker.checkpoint.manifest import MANIFEST, FileRecord, LayoutRecord, Manifest, TrainingState
from meshwright_worker.checkpoint.safetensors_format import file_checksum
from meshwright_worker.checkpoint.store import Tier
from meshwright_worker.checkpoint_errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointVolumeError,
    ForeignCheckpointError,
)
from meshwright_worker.rank.failures import classify, describe
from meshwright_worker.rank.task import RankTask
from tests.distributed.configs import small_run
from tests.distributed.mesh_cache import kept_mesh, uses_kept_mesh
from tests.distributed.rank_pool import RankPool

OF_RANK = {0: "a", 1: "b"}
"""The file of a checkpoint that each rank verifies."""


def manifest_of(step: int, files: dict[str, FileRecord]) -> Manifest:
    return Manifest(
        state=TrainingState(step=step),
        architecture=PRESETS["tiny"],
        seed=0,
        sequence_length=8,
        stream="s",
        layout=LayoutRecord(tensor=1, pipeline=1, data=2, zero_stage=0),
        files=files,
    )


def save(directory: CheckpointDirectory, step: int) -> None:
    hidden, files = directory.prepare(step), {}
    for name in OF_RANK.values():
        (hidden / name).write_bytes(b"%d" % step)
        size, checksum = file_checksum(hidden / name)
        files[name] = FileRecord(size=size, crc32=checksum)
    directory.commit(manifest_of(step, files))


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        save(directory, step)
    return directory


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@uses_kept_mesh
def choose(task: RankTask, roots: list[str]) -> tuple[int | str, list[str]]:
    """The step from which this rank would continue, or the error, and the warnings.

    Each rank has its own directory, `DIR`.
    """
    warnings = _Warnings()
    logging.getLogger("meshwright_worker").addHandler(warnings)
    try:
        with kept_mesh(task) as mesh:
            found = newest_intact(CheckpointDirectory(Path(roots[task.rank])), mesh, Manifest)
            return found.state.step if found else 0, warnings.texts
    except (CheckpointMismatchError, CheckpointVolumeError, ForeignCheckpointError) as error:
        text = f"{classify(error)}: {describe(error)}"
        for root in roots:
            text = text.replace(root, "DIR")
        return text, warnings.texts
    finally:
        logging.getLogger("meshwright_worker").removeHandler(warnings)


@uses_kept_mesh
def find(task: RankTask, path: str) -> str:
    """The checkpoint that ranks of a split model write text from, or the error."""
    with kept_mesh(task) as mesh:
        try:
            found, manifest = find_checkpoint_on_mesh(Path(path), mesh)
        except (OSError, ValueError) as error:
            return describe(error)
        assert manifest.files
        return found.name


@uses_kept_mesh
def save_together(task: RankTask, root: str, step: int) -> str:
    """Why ranks could not save a step; the empty text if they could."""
    with kept_mesh(task) as mesh:
        saver = AsyncCheckpointer([Tier(CheckpointDirectory(Path(root)), Retention(2))], mesh)
        saver.begin({"weight": torch.ones(2)}, manifest_of(step, {}))
        try:
            saver.take_finished(wait=True)
        except CheckpointError as error:
            return str(error)
        return ""


def chosen(pool: RankPool, *roots: Path) -> tuple[int | str, list[str]]:
    """What both ranks choose alike, and what rank 0 warns of."""
    (first, warnings), (second, _) = pool.run(choose, small_run(data=2), [str(root) for root in roots])
    assert first == second
    return first, warnings


def names(directory: CheckpointDirectory) -> list[str]:
    return sorted(path.name for path in directory.root.iterdir())


@pytest.mark.parametrize("rank", OF_RANK)
def test_a_file_that_cannot_be_read_fails_the_start_and_damages_nothing(
    pool: RankPool, directory: CheckpointDirectory, rank: int
) -> None:
    broken = directory.path(30) / OF_RANK[rank]
    content = broken.read_bytes()
    broken.unlink()
    broken.symlink_to(broken.name)  # Opening it is an error that is not "no such file".
    error, _ = chosen(pool, directory.root, directory.root)
    assert str(error).startswith(f"Error: rank {rank} cannot use the checkpoints' volume: ")
    assert f"DIR/step-00000030/{OF_RANK[rank]}" in str(error)
    assert directory.steps() == [30, 20, 10]
    broken.unlink()
    broken.write_bytes(content)
    assert chosen(pool, directory.root, directory.root) == (30, [])


def test_a_checkpoint_of_another_version_is_rejected_and_stays(pool: RankPool, directory: CheckpointDirectory) -> None:
    path = directory.path(30) / MANIFEST
    path.write_text(json.dumps(with_checksum({**json.loads(path.read_text()), "format": 3})))
    error, _ = chosen(pool, directory.root, directory.root)
    assert "DIR/step-00000030 was written by another version of Meshwright" in str(error)
    assert directory.steps() == [30, 20, 10]


def test_a_rank_with_another_volume_is_named(pool: RankPool, directory: CheckpointDirectory, tmp_path: Path) -> None:
    error, _ = chosen(pool, directory.root, tmp_path / "empty")
    assert "DIR/step-00000030 is seen by rank 0 but not by rank 1: do all pods mount the same volume" in str(error)
    error, _ = chosen(pool, tmp_path / "empty", directory.root)
    assert "the checkpoints in DIR are seen by rank 1 but not by rank 0: do all pods mount the same volume" in str(
        error
    )
    assert directory.steps() == [30, 20, 10]


def test_a_damaged_checkpoint_is_renamed_and_retained(pool: RankPool, directory: CheckpointDirectory) -> None:
    (directory.path(30) / "b").write_bytes(b"31")
    step, (warning,) = chosen(pool, directory.root, directory.root)
    assert step == 20
    assert "step-00000030/b is damaged: its checksum differs from the manifest" in warning
    chosen(pool, directory.root, directory.root)
    assert names(directory) == [".damaged-step-00000030", "step-00000010", "step-00000020"]


@pytest.mark.parametrize(("rank", "file"), [(0, "a"), (1, "b"), (1, MANIFEST)])
def test_a_node_that_alone_reads_other_bytes_fails_the_start_and_damages_nothing(
    pool: RankPool, directory: CheckpointDirectory, tmp_path: Path, rank: int, file: str
) -> None:
    """Broken memory on one node would otherwise cost every checkpoint, one after the other."""
    broken = CheckpointDirectory(tmp_path / "broken")
    shutil.copytree(directory.root, broken.root)
    for step in broken.steps():
        content = (broken.path(step) / file).read_bytes()
        (broken.path(step) / file).write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    roots = [directory.root, broken.root] if rank else [broken.root, directory.root]
    error, _ = chosen(pool, *roots)
    assert f"only rank {rank} finds that DIR/step-00000030/{file} is damaged" in str(error)
    assert f"for rank {1 - rank} it is intact: check memory, disk and mounts of the node" in str(error)
    assert directory.steps() == broken.steps() == [30, 20, 10]


def test_a_run_that_lost_every_checkpoint_warns(pool: RankPool, directory: CheckpointDirectory) -> None:
    for step in directory.steps():
        (directory.path(step) / "a").unlink()
    step, warnings = chosen(pool, directory.root, directory.root)
    assert step == 0
    assert "every checkpoint" in warnings[-1]
    assert "(steps 30, 20, 10): starting at step 0" in warnings[-1]
    assert all(name.startswith(".damaged-") for name in names(directory))


def test_every_rank_refuses_to_save_a_step_before_those_that_are_there(
    pool: RankPool, directory: CheckpointDirectory
) -> None:
    first, second = pool.run(save_together, small_run(data=2), str(directory.root), 3)
    assert first == second
    assert f"{directory.root} has checkpoints of later steps than 3, up to 30" in first
    assert names(directory) == ["step-00000010", "step-00000020", "step-00000030"]
    assert pool.run(save_together, small_run(data=2), str(directory.root), 40) == ["", ""]
    assert directory.steps() == [40, 30]


def found(pool: RankPool, path: Path) -> str:
    """What one process finds, which is what both ranks of two find."""
    try:
        alone = find_checkpoint(path)[0].name
    except (OSError, ValueError) as error:
        alone = describe(error)
    assert pool.run(find, small_run(data=2), str(path)) == [alone, alone]
    return alone


@pytest.mark.parametrize("file", [*OF_RANK.values(), MANIFEST])
def test_text_is_not_written_from_a_damaged_checkpoint(
    pool: RankPool, directory: CheckpointDirectory, file: str
) -> None:
    assert found(pool, directory.root) == "step-00000030"
    (directory.path(30) / file).write_bytes(b"31")
    assert found(pool, directory.root) == "step-00000020"
    assert f"{directory.path(30) / file} is damaged: " in found(pool, directory.path(30))
    assert directory.steps() == [30, 20, 10]
    for step in (20, 10):
        (directory.path(step) / "b").unlink()
    error = found(pool, directory.root)
    assert all(directory.path(step).name in error for step in directory.steps())


def test_text_is_not_written_from_an_older_checkpoint_because_the_newest_is_another_versions(
    pool: RankPool, directory: CheckpointDirectory
) -> None:
    path = directory.path(30) / MANIFEST
    path.write_text(json.dumps(with_checksum({**json.loads(path.read_text()), "format": 3})))
    assert "step-00000030 was written by another version" in found(pool, directory.root)


def test_each_rank_of_a_split_model_verifies_its_share(pool: RankPool, directory: CheckpointDirectory) -> None:
    broken = directory.path(30) / "b"
    broken.unlink()
    broken.symlink_to(broken.name)
    first, second = pool.run(find, small_run(data=2), str(directory.root))
    assert first == second
    assert "rank 1 cannot" in first
    assert "rank 0" not in first


def test_a_renamed_checkpoint_fails_the_start_and_is_named(pool: RankPool, directory: CheckpointDirectory) -> None:
    directory.path(30).rename(directory.path(50))
    error, _ = chosen(pool, directory.root, directory.root)
    assert str(error).startswith(
        "CheckpointIncompatible: DIR/step-00000050 contains the checkpoint of step 30, as its meshwright.json says"
    )
    assert str(error).endswith("Rename it to step-00000030, or move it away")
    assert directory.steps() == [50, 20, 10]
    directory.path(50).rename(directory.path(30))
    assert chosen(pool, directory.root, directory.root) == (30, [])


def test_a_directory_in_place_of_a_file_does_not_count_as_storage_that_is_away(
    pool: RankPool, directory: CheckpointDirectory
) -> None:
    (directory.path(30) / MANIFEST).unlink()
    (directory.path(30) / MANIFEST).mkdir()
    (directory.path(20) / "b").unlink()
    (directory.path(20) / "b").mkdir()
    step, warnings = chosen(pool, directory.root, directory.root)
    assert step == 10
    assert f"{directory.path(30)} has no file {MANIFEST}, and does not count as a checkpoint" in warnings[0]
    assert f"{directory.path(20) / 'b'} is damaged: it is a directory" in warnings[1]
