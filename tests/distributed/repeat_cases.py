"""Cases on ranks for `training.anomalies.repeatEverySteps`: a rank computes wrongly from some step on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from meshwright.protocol.messages import FailureKind
from meshwright_worker.data.batch import Batch
from meshwright_worker.rank.failures import classify, describe
from meshwright_worker.rank.task import Outcome, RankTask
from meshwright_worker.trainer.train import train
from meshwright_worker.trainer.trainer import Trainer
from tests.distributed.cases import Recorder


def train_with_a_wrong_rank(
    task: RankTask[Any], rank: int | None, passes: int
) -> tuple[Outcome | FailureKind, str, Recorder]:
    """Trains as an agent runs it. After so many repeated passes, the first layer of a rank flips the lowest bit of one
    number.
    """
    recorder, unchanged, counted = Recorder(), Trainer.gradient_digests, [0]

    def flip(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        changed = output.clone()
        changed.view(torch.int32).view(-1)[0] ^= 1
        return output + (changed - output).detach()

    def gradient_digests(self: Trainer, batch: Batch) -> torch.Tensor:
        counted[0] += 1
        if task.rank != rank or counted[0] <= passes:
            return unchanged(self, batch)
        layer = next(iter(self.stages[0].module.layers.values()))
        handle = layer.register_forward_hook(flip)
        try:
            return unchanged(self, batch)
        finally:
            handle.remove()

    with patch.object(Trainer, "gradient_digests", gradient_digests):
        try:
            return train(task, recorder), "", recorder
        except (ArithmeticError, RuntimeError, ConnectionError) as error:
            return classify(error, training=True), describe(error), recorder


def train_with_every_detection(task: RankTask[Any]) -> tuple[Outcome | FailureKind, str, Recorder]:
    """Trains as an agent runs it, on a node of its own that is checked before."""
    recorder = Recorder()
    try:
        return train(replace(task, node_check=True, local_world_size=1), recorder), "", recorder
    except (ArithmeticError, RuntimeError, ConnectionError) as error:
        return classify(error, training=True), describe(error), recorder
