"""A checkpoint that is asked for while ranks train: all save it after the same step, and train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright_worker.checkpoint.directory import CheckpointDirectory
from tests.distributed.cases import train_and_ask
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool

LOCAL = {"method": "DiLoCo", "every_steps": 3, "learning_rate": 0.7, "momentum": 0.9}
PIPE = {"pipeline": 2, "clip": 0.0, "parallelism": {"schedule": "PipeDream2BW"}}


@pytest.mark.parametrize(
    ("layout", "saved"),
    [
        ({"tensor": 2, "data": 2}, {4}),
        # Islands can only save when their round ends.
        ({"data": 2, "outer": LOCAL}, {6}),
        # Results arrive steps later.
        pytest.param(PIPE, set(range(5, 16)), marks=pytest.mark.long),
    ],
    ids=["tensor and data", "islands", "pipeline without flushes"],
)
def test_all_ranks_save_after_the_same_step(
    pool: RankPool, tmp_path: Path, text: Path, layout: dict[str, object], saved: set[int]
) -> None:
    run = small_run(**layout, steps=18, every=900, keep=9)
    first, *others = pool.run(train_and_ask, run, 3, checkpoint_dir=tmp_path, data_dir=text)
    (step,) = first.asked
    assert step in saved
    assert first.checkpoints == [step, 18]
    assert CheckpointDirectory(tmp_path).steps() == [18, step]
    assert all(one.reports[-1].step == 18 for one in (first, *others))
    assert not any(one.asked for one in others)


def test_a_request_in_the_last_step_is_answered_by_the_last_checkpoint(
    pool: RankPool, tmp_path: Path, text: Path
) -> None:
    (first,) = pool.run(train_and_ask, small_run(steps=4, every=4), 3, checkpoint_dir=tmp_path, data_dir=text)
    assert (first.asked, first.checkpoints) == ([4], [4])
