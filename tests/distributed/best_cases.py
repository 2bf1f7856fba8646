"""Runs that retain their best checkpoints, and what an evaluation of a checkpoint gives."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.async_save import AsyncCheckpointer, FailedSave, SavedCheckpoint
from meshwright_worker.checkpoint.manager import CheckpointManager, manifest_template
from meshwright_worker.data.sample_assignment import combined_identity
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.rank.task import RankTask, StepReport, TierReport
from meshwright_worker.trainer.initial_state import load_state
from meshwright_worker.trainer.train import build_trainer, open_inputs, train
from tests.distributed.cases import InterruptedTrainingError, Recorder


@dataclass
class Evaluated(Recorder):
    """The evaluations of one rank, and what it says about its tiers."""

    losses: dict[int, float] = field(default_factory=dict)
    tiers: list[tuple[TierReport, ...]] = field(default_factory=list)

    def step(self, report: StepReport) -> None:
        if report.evaluation_loss is not None:
            self.losses[report.step] = report.evaluation_loss
        if report.tiers is not None:
            self.tiers.append(report.tiers)
        super().step(report)


def train_and_evaluate(
    task: RankTask[NativeRun], uri: str | None, stop_after: int | None, die_after: int | None
) -> Evaluated:
    """`train`, also with a store. Every rank is asked to stop after a step, or dies after one, if they are given."""
    recorder = Evaluated(stop_after, die_after)
    with suppress(InterruptedTrainingError):
        train(replace(task, checkpoint_uri=uri), recorder)
    return recorder


@dataclass
class Remover(Evaluated):
    """Removes the best checkpoint by hand, once, after `remove_after` steps."""

    root: Path = Path()
    remove_after: int = 0
    removed: int | None = None

    def step(self, report: StepReport) -> None:
        super().step(report)
        if report.step == self.remove_after and self.tiers:
            (tier,) = self.tiers[-1]
            assert tier.best_step is not None
            shutil.rmtree(self.root / f"step-{tier.best_step:08d}")
            self.removed = tier.best_step


def train_and_remove_best(task: RankTask[NativeRun], after: int) -> Remover:
    """`train`. The first rank removes the best checkpoint after a step."""
    assert task.checkpoint_dir is not None
    recorder = Remover(root=Path(task.checkpoint_dir), remove_after=after)
    train(task, recorder)
    return recorder


def train_with_slow_saves(task: RankTask[NativeRun], stop_after: int | None) -> Evaluated:
    """`train` with saves that are complete only when the rank waits for them."""
    take = AsyncCheckpointer.take_outcomes

    def taken(
        saver: AsyncCheckpointer, *, wait: bool = False
    ) -> tuple[Sequence[SavedCheckpoint], Sequence[FailedSave]]:
        return take(saver, wait=wait) if wait else ((), ())

    recorder = Evaluated(stop_after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncCheckpointer, "take_outcomes", taken)
        train(task, recorder)
    return recorder


def evaluate_checkpoint(task: RankTask[NativeRun]) -> tuple[int, float]:
    """Step of the newest checkpoint, and the evaluation of what is loaded from it."""
    inputs, run = open_inputs(task), task.run
    assert inputs.evaluation is not None
    assert run.checkpoint is not None
    with join_mesh(task) as mesh:
        identity = combined_identity(run.training, inputs.stream.identity, mesh)
        assert identity is not None
        trainer = build_trainer(run, mesh, draw=False)
        template = manifest_template(run, identity, mesh)
        manager = CheckpointManager(task, run.checkpoint, mesh, Recorder(), template)
        state = load_state(trainer, run, mesh, manager)
        trainer.on_parameters_loaded(state.step)
        trainer.restore_state(state)
        return state.step, inputs.evaluation.loss(trainer, mesh)


def overfitted_text(root: Path) -> Path:
    """Text on which a model first learns which letters there are, and then an order that held-out documents do not
    have: their loss falls, and then rises.
    """
    root.mkdir()
    for number in range(6):
        (root / f"a{number}.py").write_text("ab" * 300)
    (root / "z.py").write_text("aabbbaab" * 50)
    return root
