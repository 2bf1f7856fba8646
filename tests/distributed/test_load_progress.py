"""What ranks report while they load: how many bytes of those that they must read."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.full_tensors import FullTensorReader
from meshwright_worker.checkpoint.manifest import read_manifest
from meshwright_worker.pretrained import load
from meshwright_worker.rank import task as rank_task
from meshwright_worker.rank.task import AT_WORK_SECONDS, RankTask, Work, WorkProgress
from meshwright_worker.trainer.train import train
from tests.distributed.cases import Recorder, train_fully
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_pretrained import LORA, published_run
from tests.pretrained.peft_files import ALPHA, RANK, random_adapter, write_adapter
from tests.pretrained.published import DEEPSEEK_V3, LLAMA, random_weights, write_model


def works_of_a_start(task: RankTask) -> list[Work]:
    """What is reported before the first step if each small part takes long."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_task, "AT_WORK_SECONDS", 0.0)
        patch.setattr(load, "_PART_BYTES", 1024)
        train(task, recorder)
    return recorder.work


def by_name(works: list[Work]) -> dict[str, list[Work]]:
    """The reports of each work, in the order of works; checks that each grows to its end."""
    found: dict[str, list[Work]] = {}
    for work in works:
        found.setdefault(work.name, []).append(work)
    for name, reports in found.items():
        assert {work.total for work in reports} == {reports[-1].done}, name
        assert all(before.done < after.done for before, after in pairwise(reports)), name
        assert all(work.seconds > 0 for work in reports), name
    return found


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def test_a_resumed_run_counts_its_files_and_then_its_tensors(pool: RankPool, tmp_path: Path, text: Path) -> None:
    first, resumed = small_run(data=2, steps=2), small_run(pipeline=2, steps=4)
    for works in pool.run(works_of_a_start, first, checkpoint_dir=tmp_path, data_dir=text):
        assert list(by_name(works)) == ["draw"]
    checkpoint = CheckpointDirectory(tmp_path).path(2)
    files, stored = read_manifest(checkpoint).files.values(), FullTensorReader(checkpoint)
    size = bytes_of({name: stored.read(name) for name in stored.names})
    ranks = [by_name(works) for works in pool.run(works_of_a_start, resumed, checkpoint_dir=tmp_path, data_dir=text)]
    assert [list(rank) for rank in ranks] == [["verify", "checkpoint"]] * 2
    assert sum(rank["verify"][-1].done for rank in ranks) == sum(file.size for file in files)
    loaded = [rank["checkpoint"][-1].done for rank in ranks]
    assert sum(loaded) == size, "each stage reads its own tensors"
    assert min(loaded) > 0.2 * sum(loaded)


@pytest.mark.parametrize("config", [LLAMA, pytest.param(DEEPSEEK_V3, marks=pytest.mark.long)], ids=["llama", "mixture"])
def test_published_weights_are_counted_as_they_are_in_the_files(
    pool: RankPool, tmp_path: Path, text: Path, config: dict[str, Any]
) -> None:
    weights = random_weights(config, dtype=torch.bfloat16)
    model = write_model(tmp_path / "model", config, weights, files=2)
    (works,) = pool.run(works_of_a_start, published_run(config, model, {}, steps=2), data_dir=text)
    (reports,) = by_name(works).values()
    biases = {name: tensor for name, tensor in weights.items() if name.endswith("e_score_correction_bias")}
    assert (reports[-1].name, reports[-1].done) == ("weights", bytes_of(weights) - bytes_of(biases))
    assert len(reports) > len(weights), "parts of large matrices are counted too"
    halves = [by_name(works) for works in pool.run(
        works_of_a_start, published_run(config, model, {"pipeline": 2}, steps=2), data_dir=text
    )]  # fmt: skip
    assert sum(half["weights"][-1].done for half in halves) == reports[-1].done


def test_adapters_are_counted_apart_from_their_model(pool: RankPool, tmp_path: Path, text: Path) -> None:
    model = write_model(tmp_path / "model", LLAMA, random_weights(LLAMA))
    (works,) = pool.run(works_of_a_start, published_run(LLAMA, model, {}, lora=LORA, steps=2), data_dir=text)
    assert list(by_name(works)) == ["draw", "weights"]
    tensors = random_adapter(LLAMA, ["q_proj"])
    lora = {"rank": RANK, "alpha": ALPHA, "targets": ["Query"]}
    lora["initial_adapter"] = str(write_adapter(tmp_path / "adapter", tensors))
    (works,) = pool.run(works_of_a_start, published_run(LLAMA, model, {}, lora=lora, steps=2), data_dir=text)
    found = by_name(works)
    assert list(found) == ["adapter", "weights"]
    assert found["adapter"][-1].done == bytes_of(tensors)


def test_short_loads_report_nothing(pool: RankPool, text: Path) -> None:
    for _, recorder in pool.run(train_fully, small_run(steps=2), data_dir=text):
        assert recorder.work == []


def test_the_end_of_a_work_is_told_at_once_if_the_work_was() -> None:
    """Otherwise a rank that waits for others would look like one that stopped at its last report."""
    recorder, now = Recorder(), [0.0]
    progress = WorkProgress(recorder, lambda: now[0])
    counted = progress.begin("verify", 3)
    now[0] = AT_WORK_SECONDS
    for seconds in (0.0, 1.0, 1.0):
        now[0] += seconds
        counted(1)
    assert [(work.done, work.seconds) for work in recorder.work] == [(1, 20.0), (3, 22.0)]
    counted = progress.begin("checkpoint", 2)
    for _ in range(2):
        now[0] += 1.0
        counted(1)
    assert len(recorder.work) == 2, "it took no twenty seconds"
    # The same work begins anew, with the checkpoint before a damaged one.
    now[0] += 2 * AT_WORK_SECONDS
    progress.begin("checkpoint", 9)(4)
    assert recorder.work[-1] == Work("checkpoint", 4, 9, 1, 1, 0.1)
