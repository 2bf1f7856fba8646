"""Cases on ranks for `training.anomalies`: the loss of some ranks is changed in some steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from unittest.mock import patch

from meshwright.protocol.messages import FailureKind
from meshwright_worker.data.batch import Batch
from meshwright_worker.rank.failures import classify, describe
from meshwright_worker.rank.task import Outcome, RankTask
from meshwright_worker.trainer.train import train
from meshwright_worker.trainer.trainer import StepResult, Trainer
from tests.distributed.cases import InterruptedTrainingError, Recorder


def train_with_changed_losses(
    task: RankTask[Any], factors: Mapping[int, float], ranks: Collection[int], die_after: int | None = None
) -> tuple[Outcome | FailureKind | None, str, Recorder]:
    """Trains as an agent runs it. In these steps, these ranks find a loss that is this many times what it is."""
    unchanged, recorder = Trainer.step, Recorder(die_after=die_after)

    def step(self: Trainer, number: int, batch: Batch, **flags: bool) -> StepResult:
        if number not in factors or task.rank not in ranks:
            return unchanged(self, number, batch, **flags)
        run = self._executor.run
        with patch.object(self._executor, "run", lambda batches: run(batches) * factors[number]):
            return unchanged(self, number, batch, **flags)

    with patch.object(Trainer, "step", step):
        try:
            return train(task, recorder), "", recorder
        except InterruptedTrainingError:
            return None, "", recorder
        except ArithmeticError as error:
            return classify(error, training=True), describe(error), recorder
