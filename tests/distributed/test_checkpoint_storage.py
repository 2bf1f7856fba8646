"""Intervals in time, which rank 0 measures, and storage that fails while ranks train."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.api.checkpoint import StoreSpec
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.store import open_store
from meshwright_worker.rank.task import Outcome
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.storage_cases import train_by_clock, train_on_failing_storage, train_with_store
from tests.tiers import mostly_long

LOCAL = {"method": "DiLoCo", "every_steps": 3, "learning_rate": 0.7, "momentum": 0.9}
PIPE = {"pipeline": 2, "clip": 0.0, "parallelism": {"schedule": "PipeDream2BW"}}


def every(run: NativeRun, interval: str) -> NativeRun:
    assert run.checkpoint is not None
    checkpoint = run.checkpoint.model_copy(update={"every_steps": None, "every": interval})
    return run.model_copy(update={"checkpoint": checkpoint})


@pytest.mark.parametrize(
    ("layout", "first"),
    mostly_long(
        [({"data": 2}, {5}), ({"data": 2, "outer": LOCAL}, {6}), (PIPE, set(range(5, 12)))],
        lambda case: case[0] == {"data": 2},
    ),
    ids=["replicas", "islands", "pipeline without flushes"],
)
def test_all_ranks_save_when_the_clock_of_rank_0_says_so(
    pool: RankPool, tmp_path: Path, text: Path, layout: dict[str, object], first: set[int]
) -> None:
    run = every(small_run(**layout, steps=24, keep=9), "20s")
    zero, one = pool.run(train_by_clock, run, 4.0, checkpoint_dir=tmp_path, data_dir=text)
    saved = zero.checkpoints
    assert saved[0] in first
    # A save that takes longer than a step delays the next one, and nothing makes it come earlier.
    assert all(later - earlier >= 4 for earlier, later in zip(saved, saved[1:-1], strict=False))
    assert len(saved) >= 3
    assert CheckpointDirectory(tmp_path).steps() == saved[::-1]
    assert [report.step for report in one.reports] == list(range(1, 25))


@pytest.mark.parametrize(
    ("steps", "saved"),
    [
        (6, [6]),  # when the volume is due, too
        (7, [7]),
    ],
)
def test_the_last_checkpoint_is_in_the_store_whatever_its_interval(
    pool: RankPool, tmp_path: Path, text: Path, steps: int, saved: list[int]
) -> None:
    run = small_run(steps=steps, every=3, keep=9)
    assert run.checkpoint is not None
    uri = (tmp_path / "store").as_uri()
    checkpoint = run.checkpoint.model_copy(update={"uri": uri, "store": StoreSpec(every_steps=300)})
    run = run.model_copy(update={"checkpoint": checkpoint})
    ((outcome, _),) = pool.run(train_with_store, run, uri, checkpoint_dir=tmp_path / "volume", data_dir=text)
    assert outcome is Outcome.COMPLETE
    assert CheckpointDirectory(tmp_path / "volume").steps() == sorted({3, 6, steps}, reverse=True)
    assert open_store(uri).steps() == saved


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    root = tmp_path / "volume"
    root.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", root], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield root
    finally:
        subprocess.run(["umount", "-l", root], check=True)


def fill(root: Path) -> list[str]:
    """Leave no space; the command that frees it."""
    ballast = root / "ballast"
    subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=4k"], capture_output=True)
    return ["rm", str(ballast)]


def make_read_only(root: Path) -> list[str]:
    """Nothing can be written; the command that undoes it."""
    subprocess.run(["mount", "-o", "remount,ro", root], check=True)
    return ["mount", "-o", "remount,rw", str(root)]


@pytest.mark.parametrize(("breaks", "cause"), [(fill, "No space left"), (make_read_only, "Read-only file system")])
def test_training_goes_on_without_storage_and_saves_again_with_it(
    pool: RankPool, small_volume: Path, text: Path, breaks: object, cause: str
) -> None:
    assert callable(breaks)
    repair = breaks(small_volume)
    run = small_run(data=2, steps=30, every=3, keep=2)
    (outcome, zero), (_, one) = pool.run(
        train_on_failing_storage, run, repair, checkpoint_dir=small_volume, data_dir=text
    )
    assert outcome is Outcome.COMPLETE
    for recorder in (zero, one):
        assert [report.step for report in recorder.reports] == list(range(1, 31))
    errors = [tier.error for tier in zero.tiers if tier.error]
    assert errors
    assert all(cause in error for error in errors)
    assert zero.tiers[-1].error == ""
    assert zero.tiers[-1].failing_since is None
    assert CheckpointDirectory(small_volume).steps()[0] == 30
    assert not list(small_volume.glob(".*")), "what a failed save had written is removed"
