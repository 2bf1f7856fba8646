"""Each parameter gets its values once: drawn in every layout alike, or from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright_worker.checkpoint.manifest import MANIFEST, encode_manifest, read_manifest
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.models import init_weights
from meshwright_worker.models.init_weights import initial_parameter
from meshwright_worker.models.lora import is_adapter
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer import initial_state
from meshwright_worker.trainer.initial_state import load_state
from meshwright_worker.trainer.train import build_trainer
from tests.distributed.cases import train_fully, whole_of
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool


def weights_of_a_start(task: RankTask) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch, join_mesh(task) as mesh:
        patch.setattr(init_weights, "_UNTILED_ELEMENTS", 64)  # small matrices have several tiles too
        patch.setattr(init_weights, "_TILE_COLUMNS", 16)
        trainer = build_trainer(task.run, mesh, draw=False)
        for shard in trainer.shards:
            shard.local.fill_(torch.nan)
        load_state(trainer, task.run, mesh, None)
        trainer.on_parameters_loaded(0)
        weights = {shard.name: whole_of(shard, shard.local) for shard in trainer.shards}
        for name, weight in weights.items():
            assert torch.equal(weight, initial_parameter(name, weight.shape, task.run.architecture, 0)), name
        # What the passes use is what the optimizer updates.
        for stage in trainer.stages:
            for name, parameter in stage.module.named_parameters():
                assert torch.isfinite(getattr(parameter, "to_local", lambda p=parameter: p)()).all(), name
        return weights


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 4, "zero": 1},
        pytest.param({"tensor": 2, "data": 2, "zero": 1, "replicas": {"strategy": "ZeRO"}}, marks=pytest.mark.long),
        {"tensor": 2, "data": 2, "zero": 3},
        {"pipeline": 2, "data": 2, "micro_batches": 4, "zero": 1, "parallelism": {"schedule": "DualPipe"}},
        {"tensor": 2, "pipeline": 2, "micro_batches": 4},
        {"pipeline": 4, "micro_batches": 1, "parallelism": {"schedule": "PipeDream"}},
    ],
    ids=str,
)
def test_every_layout_starts_with_the_same_weights(pool: RankPool, layout: dict[str, Any]) -> None:
    for weights in pool.run(weights_of_a_start, small_run(**layout, layers=4)):
        assert weights


def drawn_in_a_run(task: RankTask) -> list[str]:
    names: list[str] = []
    drawn = initial_state.draw_into

    def noted(local: torch.Tensor, name: str, *arguments: Any, **options: Any) -> None:
        names.append(name)
        drawn(local, name, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_state, "draw_into", noted)
        patch.setattr(init_weights, "init_weights", None)
        train_fully(task)
    return names


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0, "targets": ["Query"]}])
def test_a_resumed_run_draws_only_what_its_checkpoint_lacks(
    pool: RankPool, tmp_path: Path, text: Path, lora: Any
) -> None:
    training = {"lora": lora} if lora else {}
    first = small_run(data=2, steps=2, every=2, training=training)
    resumed = small_run(data=2, steps=4, every=2, training=training)
    for names in pool.run(drawn_in_a_run, first, checkpoint_dir=str(tmp_path / "checkpoints"), data_dir=str(text)):
        assert "embedding.weight" in names
    for names in pool.run(drawn_in_a_run, resumed, checkpoint_dir=str(tmp_path / "checkpoints"), data_dir=str(text)):
        assert ("embedding.weight" in names) == bool(lora)
        assert not any(is_adapter(name) for name in names)


def frozen_weights(task: RankTask, least: int) -> dict[str, torch.Tensor]:
    """Trains to the end, and returns the frozen weights. Matrices of more than `least` elements are drawn in tiles."""
    found: dict[str, torch.Tensor] = {}
    drawn = initial_state.draw_into

    def noted(local: torch.Tensor, name: str, *arguments: Any, **options: Any) -> None:
        drawn(local, name, *arguments, **options)
        if not is_adapter(name):
            found[name] = local.clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_state, "draw_into", noted)
        patch.setattr(init_weights, "_UNTILED_ELEMENTS", least)
        train_fully(task)
    return found


@pytest.mark.parametrize("released", [True, False], ids=["0.1.0", "this version"])
def test_adapters_keep_the_random_weights_that_they_were_trained_on(
    pool: RankPool, tmp_path: Path, text: Path, released: bool
) -> None:
    """Version 0.1.0 drew matrices of any size as a whole, and its manifests do not say so."""
    lora = {"lora": {"rank": 2, "alpha": 4.0, "targets": ["Query"]}}
    least = 1 << 22 if released else 64
    (began,) = pool.run(
        frozen_weights, small_run(steps=2, every=2, training=lora), least, checkpoint_dir=tmp_path, data_dir=text
    )
    checkpoint = tmp_path / "step-00000002"
    manifest = read_manifest(checkpoint)
    assert manifest.weights_in_tiles
    if released:
        old = manifest.model_copy(update={"weights_in_tiles": False})
        (checkpoint / MANIFEST).write_bytes(encode_manifest(old))
    for steps in (4, 6):
        (resumed,) = pool.run(
            frozen_weights, small_run(steps=steps, every=2, training=lora), 64, checkpoint_dir=tmp_path, data_dir=text
        )
        assert began.keys() == resumed.keys()
        assert all(torch.equal(began[name], resumed[name]) for name in began)
