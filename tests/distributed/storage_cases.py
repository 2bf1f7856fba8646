"""Training whose checkpoints meet a clock of the test, or a storage that fails."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field, replace
from functools import partial
from unittest.mock import patch

from meshwright_worker.checkpoint import manager
from meshwright_worker.checkpoint.schedule import CheckpointSchedule
from meshwright_worker.rank.task import Outcome, RankTask, StepReport, TierReport
from meshwright_worker.trainer.train import train
from tests.distributed.cases import Recorder


@dataclass
class Repairing(Recorder):
    """Runs a command once a report says that a save failed."""

    repair: list[str] = field(default_factory=list)
    tiers: list[TierReport] = field(default_factory=list)

    def step(self, report: StepReport) -> None:
        super().step(report)
        self.tiers += report.tiers or ()
        if self.repair and self.tiers and self.tiers[-1].error:
            subprocess.run(self.repair, check=True)
            self.repair = []


def train_by_clock(task: RankTask, step_seconds: float) -> Recorder:
    """Each step takes so long on the clock of rank 0. Those of other ranks stand still."""
    recorder = Recorder()
    pace = step_seconds if task.rank == 0 else 0.0
    schedule = partial(CheckpointSchedule, clock=lambda: pace * len(recorder.reports))
    with patch.object(manager, "CheckpointSchedule", schedule):
        train(task, recorder)
    return recorder


def train_with_store(task: RankTask, uri: str) -> tuple[Outcome, Recorder]:
    """`train` with a store beside the volume."""
    recorder = Recorder()
    return train(replace(task, checkpoint_uri=uri), recorder), recorder


def train_on_failing_storage(task: RankTask, repair: list[str]) -> tuple[Outcome, Repairing]:
    """The storage fails until rank 0 has reported it, and then runs a command."""
    recorder = Repairing(repair=repair if task.rank == 0 else [])
    return train(task, recorder), recorder


def train_on_failing_store(task: RankTask, uri: str, repair: list[str]) -> tuple[Outcome, Repairing]:
    """`train_on_failing_storage` with a store beside the volume, whose credentials are in the environment."""
    os.environ.update({"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"})
    return train_on_failing_storage(replace(task, checkpoint_uri=uri), repair)
