"""Published weights into any layout and out of its checkpoints again; adapters in checkpoints of any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.models.huggingface.reader import architecture_from_config
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.full_tensors import FullTensorReader, find_checkpoint
from meshwright_worker.checkpoint.provenance import provenance_of
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.models.lora import is_adapter
from meshwright_worker.pretrained.hf_export import export
from meshwright_worker.pretrained.tensor_files import INDEX, TensorFiles
from meshwright_worker.rank.task import Outcome, RankTask
from meshwright_worker.trainer.initial_state import load_state
from meshwright_worker.trainer.trainer import Trainer
from tests.distributed.cases import train_fully, whole_of
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.pretrained.published import (
    DEEPSEEK,
    DEEPSEEK_V3,
    GEMMA3_LINEAR,
    GPT2,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    PHI3,
    QWEN2,
    is_written_as,
    random_weights,
    write_model,
)
from tests.tiers import mostly_long

V03 = {**MISTRAL, "sliding_window": None}
LORA = {"rank": 2, "alpha": 4.0, "targets": ["Query", "Value", "Down"]}


def published_run(config: dict[str, Any], directory: Path, layout: dict[str, Any], **training: Any) -> NativeRun:
    run = small_run(**layout, training={"initial_weights": str(directory), **training})
    model = architecture_from_config(config)
    if model.mixture is not None:
        # What was read stays as it was, the routers' biases too.
        model = model.model_copy(update={"mixture": model.mixture.model_copy(update={"bias_rate": 0.0})})
    return run.model_copy(update={"architecture": model})


def weights_after_loading(task: RankTask) -> dict[str, torch.Tensor]:
    with join_mesh(task) as mesh:
        trainer = Trainer(task.run, mesh, draw=False)
        load_state(trainer, task.run, mesh, None)
        weights = {shard.name: whole_of(shard, shard.local) for shard in (*trainer.shards, *trainer.frozen)}
        return weights | {name: buffer.clone() for name, buffer in trainer.buffers.items()}


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (LLAMA, {"tensor": 2, "pipeline": 2}),
        pytest.param(QWEN2, {"tensor": 2, "data": 2, "zero": 3}, marks=pytest.mark.long),
        (GPT2, {"tensor": 2, "data": 2, "zero": 3}),
        (PHI3, {"tensor": 2, "data": 2, "zero": 3}),
        pytest.param(DEEPSEEK, {"tensor": 2, "pipeline": 2, "sequence": False}, marks=pytest.mark.long),
        pytest.param(MIXTRAL, {"tensor": 2, "data": 2, "expert": 2}, marks=pytest.mark.long),
        (DEEPSEEK_V3, {"pipeline": 2, "data": 2, "expert": 2}),
    ],
    ids=["llama", "qwen2", "gpt2", "phi3", "deepseek", "mixtral", "deepseek-v3"],
)
def test_every_layout_begins_from_the_published_weights(
    pool: RankPool, tmp_path: Path, config: dict[str, Any], layout: dict[str, Any]
) -> None:
    directory = write_model(tmp_path / "model", config, random_weights(config), files=2)
    (alone,) = pool.run(weights_after_loading, published_run(config, directory, {}))
    ranks = pool.run(weights_after_loading, published_run(config, directory, layout))
    assert set().union(*ranks) == set(alone)
    for rank in ranks:
        assert all(torch.equal(tensor, alone[name]) for name, tensor in rank.items())


@pytest.mark.parametrize(
    "config",
    mostly_long(
        [LLAMA, QWEN2, GPT2, PHI3, MISTRAL, V03, GEMMA3_LINEAR, DEEPSEEK, MIXTRAL, DEEPSEEK_V3],
        lambda it: it in (LLAMA, GPT2, PHI3, V03, GEMMA3_LINEAR, DEEPSEEK_V3),
    ),
    ids=lambda config: config["model_type"] + ("" if config is not V03 else " without a window"),
)
def test_what_was_read_is_written_again(pool: RankPool, tmp_path: Path, text: Path, config: dict[str, Any]) -> None:
    weights = random_weights(config)
    directory = write_model(tmp_path / "model", config, weights)
    # A rate of next to nothing: the checkpoint holds what was read, in the boxes of its layout.
    optimizer = {"learning_rate": 1e-30, "weight_decay": 0.0}
    run = published_run(config, directory, {"tensor": 2}, steps=1, optimizer=optimizer)
    pool.run(train_fully, run, checkpoint_dir=tmp_path / "checkpoints", data_dir=text)
    checkpoint, manifest = find_checkpoint(tmp_path / "checkpoints")
    manifest = manifest.model_copy(update={"provenance": provenance_of(run, "team/job", None)})
    files = export(checkpoint, manifest, tmp_path / "out", dtype=torch.float32, file_bytes=40_000)
    assert len(files) > 1
    written = TensorFiles(tmp_path / "out")
    assert set(written.names) == set(weights)
    for name, tensor in weights.items():
        assert is_written_as(written.find(name).map(), tensor, name, config), name
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert architecture_from_config(told) == architecture_from_config(config)
    assert told["model_type"] == config["model_type"]
    lengths = "max_position_embeddings", "n_positions"
    assert any(told.get(name, 0) >= manifest.sequence_length for name in lengths)
    export(checkpoint, manifest, tmp_path / "bf16", dtype=torch.bfloat16, file_bytes=20_000)
    narrow = TensorFiles(tmp_path / "bf16")
    for name, tensor in weights.items():
        # Rounded biases would choose other experts than the trained model.
        wanted = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        assert narrow.find(name).map().dtype == wanted.dtype, name
        assert is_written_as(narrow.find(name).map(), wanted, name, config), name
    index = json.loads((tmp_path / "bf16" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(narrow.find(name).map().nbytes for name in narrow.names)


def test_adapters_train_resume_in_another_layout_and_merge(pool: RankPool, tmp_path: Path, text: Path) -> None:
    directory = write_model(tmp_path / "model", LLAMA, random_weights(LLAMA))
    checkpoints = tmp_path / "checkpoints"
    first = published_run(LLAMA, directory, {"tensor": 2, "pipeline": 2}, lora=LORA)
    ranks = pool.run(train_fully, first, 0, 4, checkpoint_dir=checkpoints, data_dir=text)
    assert {outcome for outcome, _ in ranks} == {Outcome.STOPPED}
    second = published_run(LLAMA, directory, {"data": 2, "zero": 3}, lora=LORA)
    ranks = pool.run(train_fully, second, checkpoint_dir=checkpoints, data_dir=text)
    assert ranks[0][1].began_at == 4
    (alone,) = pool.run(
        train_fully, published_run(LLAMA, directory, {}, lora=LORA), checkpoint_dir=tmp_path / "alone", data_dir=text
    )
    assert [r.loss for r in ranks[0][1].reports] == pytest.approx([r.loss for r in alone[1].reports[4:]], rel=1e-5)

    checkpoint, manifest = find_checkpoint(checkpoints)
    stored = FullTensorReader(checkpoint)
    assert all(is_adapter(name) or is_adapter(name.rpartition(".")[0]) for name in stored.names)
    export(checkpoint, manifest, tmp_path / "out", dtype=torch.float32, file_bytes=1 << 30)
    before, after = TensorFiles(directory), TensorFiles(tmp_path / "out")
    up = stored.read("model.layers.1.feed_forward.down.adapter_up")
    down = stored.read("model.layers.1.feed_forward.down.adapter_down")
    assert float(up.abs().max()) > 0
    name = "layers.1.mlp.down_proj.weight"
    torch.testing.assert_close(after.find(name).map(), before.find(name).map() + 4.0 / 2 * up @ down)
    same = "layers.1.mlp.up_proj.weight"
    assert torch.equal(after.find(same).map(), before.find(same).map())
