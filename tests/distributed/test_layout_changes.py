"""A checkpoint of one layout restored in another: parameters and moments bit for bit, and the same next loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.full_tensors import FullTensorReader
from tests.compatibility import record
from tests.distributed.configs import small_run
from tests.distributed.layout_cases import STEPS, load_and_train, load_recorded, train_and_save
from tests.distributed.rank_pool import RankPool

RELEASES = Path(record.__file__).parent
FOUR_LAYERS: dict[str, Any] = {"layers": 4, "micro_batches": 4}
FOUR_HEADS: dict[str, Any] = {"kv_heads": 4}
EXPERTS: dict[str, Any] = {"mixture": "Mixtral"}
DUALPIPE: dict[str, Any] = {**FOUR_LAYERS, "pipeline": 2, "parallelism": {"schedule": "DualPipe"}}
INTERLEAVED: dict[str, Any] = {**FOUR_LAYERS, "pipeline": 2, "parallelism": {"schedule": "Interleaved1F1B"}}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ZeRO-3 to DDP": ({"data": 2, "zero": 3}, {"data": 2}),
    "DDP to ZeRO-3": ({"data": 2}, {"data": 2, "zero": 3}),
    "ZeRO-1 to ZeRO-3": ({"data": 2, "zero": 1}, {"data": 2, "zero": 3}),
    "ZeRO-2 to one rank": ({"data": 2, "zero": 2}, {}),
    "pipeline to none": ({"pipeline": 2}, {}),
    "three stages to tensor": ({"pipeline": 3}, {"tensor": 2}),
    "tensor 4 to 1": ({**FOUR_HEADS, "tensor": 4}, FOUR_HEADS),
    "tensor 2 to ZeRO-3": ({"tensor": 2}, {"data": 2, "zero": 3}),
    "experts 4 to 2": ({**EXPERTS, "data": 4, "expert": 4}, {**EXPERTS, "data": 2, "expert": 2}),
    "experts 2 to tensor 2": ({**EXPERTS, "data": 2, "expert": 2}, {**EXPERTS, "tensor": 2}),
    "context 2 to 1": ({"context": 2}, {}),
    "context 2 with ZeRO-3 to pipeline": ({"context": 2, "zero": 3}, {"pipeline": 2}),
    "FSDP over 4 to over 2": ({"data": 4, "zero": 3}, {"data": 2, "zero": 3}),
    "hybrid shards of 2 to full shards": (
        {"data": 4, "zero": 3, "replicas": {"shard_size": 2}},
        {"data": 4, "zero": 3},
    ),
    "DualPipe to 1F1B": (DUALPIPE, {**FOUR_LAYERS, "pipeline": 2}),
    "interleaved to DualPipe": (INTERLEAVED, DUALPIPE),
    "1F1B to interleaved": ({**FOUR_LAYERS, "pipeline": 2}, INTERLEAVED),
    "tensor 2 and pipeline 2 to data 2": ({"tensor": 2, "pipeline": 2}, {"data": 2}),
    "tied embeddings, pipeline to tensor": (
        {"pipeline": 2, "tie_embeddings": True},
        {"tensor": 2, "tie_embeddings": True},
    ),
    "offloaded parameters to DDP": (
        {"data": 2, "zero": 3, "training": {"parameter_offload": True}},
        {"data": 2},
    ),
    "one rank to offloaded optimizer": ({}, {"data": 2, "zero": 1, "optimizer": {"offload": "CPU"}}),
}


@pytest.mark.long  # `test_recovery` changes layouts too
@pytest.mark.parametrize("name", PAIRS)
def test_another_layout_goes_on_from_the_same_state(pool: RankPool, tmp_path: Path, name: str) -> None:
    before, after = (small_run(**{"steps": 9, **options}) for options in PAIRS[name])
    saved = pool.run(train_and_save, before, checkpoint_dir=tmp_path)
    loaded = pool.run(load_and_train, after, checkpoint_dir=tmp_path)
    reader = FullTensorReader(CheckpointDirectory(tmp_path).files(STEPS))
    stored = {tensor: reader.read(tensor) for tensor in reader.names}
    assert any(tensor.startswith("optimizer.") and stored[tensor].any() for tensor in stored), "moments are not zero"
    for ranks in (saved, loaded):
        assert set().union(*(rank.tensors for rank in ranks)) == set(stored)
        for rank in ranks:
            assert all(torch.equal(tensor, stored[name]) for name, tensor in rank.tensors.items())
    assert [rank.loss for rank in loaded] == [pytest.approx(saved[0].loss, rel=1e-6)] * len(loaded)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_files_of_released_versions_load_into_any_shards(pool: RankPool, placement: Placement) -> None:
    for release in sorted(path for path in RELEASES.iterdir() if path.name[0].isdigit()):
        root = release / "checkpoints"
        hashes = json.loads((root / "tensors.json").read_text())
        wanted = record.checkpoint_tensors()
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in wanted.items()}
        for step in CheckpointDirectory(root).steps():
            path = str(CheckpointDirectory(root).path(step))
            for tensors in pool.run(load_recorded, small_run(data=2), path, shapes, placement):
                assert {name: record.tensor_hash(tensor) for name, tensor in tensors.items()} == hashes
