"""`checkpoint.keepBest`: the checkpoints with the lowest evaluation loss stay, whatever comes after them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.checkpoint import StoreSpec
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.checkpoint.manifest import MANIFEST, read_manifest
from meshwright_worker.checkpoint.store import open_store
from tests.distributed.best_cases import (
    Evaluated,
    evaluate_checkpoint,
    overfitted_text,
    train_and_evaluate,
    train_and_remove_best,
    train_with_slow_saves,
)
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool

STEPS, EVERY, RESTART = 24, 2, 17
LOCAL = {"method": "DiLoCo", "every_steps": 2, "learning_rate": 0.7, "momentum": 0.9}
ASYNCHRONOUS = {"method": "AsyncSGD", "every_steps": 2}
LORA = {"tensor": 2, "training": {"lora": {"rank": 4}, "precision": "bf16"}}
PIPE = {"pipeline": 2, "clip": 0.0, "parallelism": {"schedule": "PipeDream2BW"}}


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return overfitted_text(tmp_path_factory.mktemp("overfitted") / "text")


def run_of(best: int | None = 1, store: dict[str, Any] | None = None, **layout: Any) -> NativeRun:
    """A run that saves by steps only at its end, unless `layout` says otherwise."""
    training = {"evaluation": {"every_steps": EVERY, "samples": 10}, **layout.pop("training", {})}
    options: dict[str, Any] = {"steps": STEPS, "every": 900, "keep": 1, "optimizer": {"learning_rate": 0.01}}
    run = small_run(**{**options, **layout}, training=training)
    assert run.checkpoint is not None
    checkpoint = run.checkpoint.model_copy(
        update={"keep_best": best, "store": StoreSpec(**store) if store is not None else None}
    )
    return run.model_copy(
        update={"data": run.data.model_copy(update={"held_out": 0.1}), "checkpoint": checkpoint},
    )


def trained(
    pool: RankPool,
    run: NativeRun,
    root: Path,
    text: Path,
    *,
    uri: str | None = None,
    stop_after: int | None = None,
    die_after: int | None = None,
) -> Evaluated:
    first, *others = pool.run(train_and_evaluate, run, uri, stop_after, die_after, checkpoint_dir=root, data_dir=text)
    assert all(other.losses == first.losses for other in others)
    assert isinstance(first, Evaluated)
    return first


def lowest(losses: dict[int, float], count: int = 1) -> list[int]:
    return sorted(losses, key=lambda step: (losses[step], step))[:count]


def only(root: Path, step: int) -> Path:
    """A directory with only the checkpoint of this step."""
    where, name = root / "only", f"step-{step:08d}"
    shutil.copytree(root / name, where / name)
    return where


@pytest.fixture(scope="module")
def alone(pool: RankPool, tmp_path_factory: pytest.TempPathFactory, overfitted: Path) -> tuple[Path, Evaluated]:
    """One rank's run, and where its checkpoints are."""
    root = tmp_path_factory.mktemp("alone")
    return root, trained(pool, run_of(), root, overfitted)


def test_a_loss_that_falls_and_rises_leaves_its_minimum_and_the_last(alone: tuple[Path, Evaluated]) -> None:
    root, recorder = alone
    (best,) = lowest(recorder.losses)
    assert EVERY < best < STEPS - EVERY, recorder.losses
    assert CheckpointDirectory(root).steps() == [STEPS, best]
    losses = recorder.losses
    so_far = [step for step in losses if lowest({n: losses[n] for n in losses if n <= step}) == [step]]
    assert recorder.checkpoints == [*so_far, STEPS], recorder.losses
    for step in (best, STEPS):
        assert read_manifest(root / f"step-{step:08d}").state.evaluation_loss == recorder.losses[step]
    assert find_checkpoint(root, best=True)[1].state.step == best
    (tier,) = recorder.tiers[-1]
    assert (tier.best_step, tier.best_loss) == (best, recorder.losses[best])


def test_the_recorded_loss_is_that_of_the_parameters_which_are_saved(
    pool: RankPool, alone: tuple[Path, Evaluated], overfitted: Path
) -> None:
    root, recorder = alone
    (best,) = lowest(recorder.losses)
    where = only(root, best)
    ((step, loss),) = pool.run(evaluate_checkpoint, run_of(), checkpoint_dir=where, data_dir=overfitted)
    assert (step, loss) == (best, recorder.losses[best])


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2, "data": 2, "zero": 3}, {"data": 2, "outer": LOCAL}, {"data": 2, "outer": ASYNCHRONOUS}, PIPE, LORA],
    ids=["tensor and ZeRO", "islands", "a parameter server", "pipeline without flushes", "adapters"],
)
def test_in_every_layout_too(pool: RankPool, overfitted: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    run = run_of(best=2, **layout)
    recorder = trained(pool, run, tmp_path, overfitted)
    best = lowest(recorder.losses, 2)
    assert sorted(CheckpointDirectory(tmp_path).steps()) == sorted({*best, STEPS})
    where = only(tmp_path, best[0])
    evaluated = pool.run(evaluate_checkpoint, run, checkpoint_dir=where, data_dir=overfitted)
    assert {*evaluated} == {(best[0], recorder.losses[best[0]])}


@pytest.mark.parametrize("ended", ["stop_after", pytest.param("die_after", marks=pytest.mark.long)])
def test_a_restart_forgets_no_best_checkpoint(pool: RankPool, overfitted: Path, tmp_path: Path, ended: str) -> None:
    """The second start is after the minimum, and none of its evaluations is as good."""
    run = run_of(data=2)
    first = trained(pool, run, tmp_path, overfitted, **{ended: RESTART})
    (best,) = lowest(first.losses)
    if ended == "stop_after":
        assert CheckpointDirectory(tmp_path).steps() == [RESTART, best]
    second = trained(pool, run.model_copy(update={"data_parallel": 1}), tmp_path, overfitted)
    later = {step: loss for step, loss in second.losses.items() if step > RESTART}
    assert min(later.values()) > first.losses[best]
    assert not {*later} & {*second.checkpoints} - {STEPS}, "none of them was among the best"
    assert CheckpointDirectory(tmp_path).steps() == [STEPS, best]


def test_a_damaged_manifest_does_not_count(pool: RankPool, overfitted: Path, tmp_path: Path) -> None:
    first = trained(pool, run_of(), tmp_path, overfitted, stop_after=RESTART)
    (best,) = lowest(first.losses)
    manifest = tmp_path / f"step-{best:08d}" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1'))
    second = trained(pool, run_of(), tmp_path, overfitted)
    assert sorted(CheckpointDirectory(tmp_path).steps()) == sorted({*lowest(second.losses), STEPS})


def test_a_best_checkpoint_that_is_removed_by_hand_competes_with_no_later_one(
    pool: RankPool, overfitted: Path, tmp_path: Path
) -> None:
    """The loss rises from then on, so that none would be saved if the removed one still counted."""
    first, *_ = pool.run(train_and_remove_best, run_of(data=2), RESTART, checkpoint_dir=tmp_path, data_dir=overfitted)
    later = {step: loss for step, loss in first.losses.items() if step > RESTART}
    assert first.losses[first.removed] < min(later.values())
    (best,) = lowest(later)
    assert sorted(CheckpointDirectory(tmp_path).steps()) == sorted({best, STEPS})
    (tier,) = first.tiers[-1]
    assert (tier.best_step, tier.best_loss) == (best, later[best])


def test_each_tier_has_its_own_best(pool: RankPool, overfitted: Path, tmp_path: Path) -> None:
    """The store gets what is best there although its interval is longer, and the volume none for that."""
    volume, uri = tmp_path / "volume", f"file://{tmp_path}/store"
    run = run_of(best=None, store={"keep_best": 2, "keep": 1}, every=5)
    recorder = trained(pool, run, volume, overfitted, uri=uri)
    assert CheckpointDirectory(volume).steps() == [STEPS]
    assert sorted(open_store(uri).steps()) == sorted({*lowest(recorder.losses, 2), STEPS})


def test_the_last_step_is_on_every_tier_if_it_is_the_best(pool: RankPool, overfitted: Path, tmp_path: Path) -> None:
    """Also if only the volume is due after it: the save at the end adds no tier to one that has begun."""
    volume, uri = tmp_path / "volume", f"file://{tmp_path}/store"
    run = run_of(best=None, store={"keep_best": 1, "keep": 1, "every_steps": 900}, every=3, steps=6)
    recorder = trained(pool, run, volume, overfitted, uri=uri)
    assert lowest(recorder.losses) == [6], recorder.losses
    assert (CheckpointDirectory(volume).steps(), open_store(uri).steps()) == ([6], [6])


def test_without_the_field_no_manifest_has_a_loss(pool: RankPool, overfitted: Path, tmp_path: Path) -> None:
    recorder = trained(pool, run_of(best=None, steps=4), tmp_path, overfitted)
    assert [*recorder.losses] == [2, 4]
    assert recorder.checkpoints == [4]
    assert "evaluationLoss" not in (tmp_path / "step-00000004" / MANIFEST).read_text()


@pytest.mark.parametrize("stop_after", [None, pytest.param(STEPS - 1, marks=pytest.mark.long)])
def test_the_last_report_has_the_best_checkpoint_also_if_its_save_has_just_ended(
    pool: RankPool, overfitted: Path, tmp_path: Path, stop_after: int | None
) -> None:
    """Later reports do not have the tiers, and status would show another one for good."""
    first, _ = pool.run(
        train_with_slow_saves, run_of(data=2), stop_after, checkpoint_dir=tmp_path / "run", data_dir=overfitted
    )
    (best,) = lowest(first.losses)
    assert best < STEPS - 2, "it is not the final one"
    (tier,) = first.tiers[-1]
    assert (tier.best_step, tier.best_loss) == (best, first.losses[best])
