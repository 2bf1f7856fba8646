"""Parameters in files: the same bits as in main memory, and no shard anywhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.rank.task import RankTask
from tests.distributed.cases import Trained, Training, train_on_random_tokens
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankFailedError, RankPool


def run_of(path: Path | None, **layout: object) -> NativeRun:
    told = {"parameter_offload": True, "parameter_offload_path": None if path is None else str(path)}
    return small_run(**layout, training=told, tie_embeddings=True)


def mapped(task: RankTask, directory: str) -> list[tuple[str, bool]]:
    """Of each shard of this rank after two steps, whether its memory is a file of `directory` that has no name."""
    with join_mesh(task) as mesh:
        training = Training(task.run, mesh)
        for number in (1, 2):
            training.step(number)
        ranges = [
            (int(start, 16), int(end, 16))
            for start, end, name in re.findall(
                r"^(\w+)-(\w+) rw-s \S+ \S+ \d+ +(.*)$", Path("/proc/self/maps").read_text(), re.M
            )
            if name.startswith(f"{directory}/parameters-") and name.endswith("(deleted)")
        ]
        places = {shard.name: shard.local.data_ptr() for shard in training.trainer.shards if shard.local.numel()}
        training.trainer.close()
        return [(name, any(start <= at < end for start, end in ranges)) for name, at in places.items()]


@pytest.mark.long  # the parity matrix has parameters in files always
@pytest.mark.parametrize(
    "layout",
    [{"data": 3, "zero": 3, "batch": 6}, {"pipeline": 2, "data": 2, "zero": 2, "sequence": False}],
    ids=str,
)
def test_files_change_no_bit(pool: RankPool, tmp_path: Path, layout: dict[str, object]) -> None:
    want: list[Trained] = pool.run(train_on_random_tokens, run_of(None, **layout), 3)
    got: list[Trained] = pool.run(train_on_random_tokens, run_of(tmp_path / "scratch", **layout), 3)
    for ours, theirs in zip(got, want, strict=True):
        assert [result.loss for result in ours.results] == [result.loss for result in theirs.results]
        assert ours.parameters.keys() == theirs.parameters.keys()
        assert all(torch.equal(ours.parameters[name], theirs.parameters[name]) for name in theirs.parameters)


def test_every_shard_is_in_a_file_without_a_name(pool: RankPool, tmp_path: Path) -> None:
    for found in pool.run(mapped, run_of(tmp_path, data=3, zero=3, batch=6), str(tmp_path)):
        assert len(found) > 10
        assert all(is_in_file for _, is_in_file in found), found
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_holds_nothing_is_named(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RankFailedError, match=r"`training.parameterOffloadPath: .*/file/scratch`: cannot create"):
        pool.run(train_on_random_tokens, run_of(tmp_path / "file" / "scratch", data=2, zero=3), 1)
