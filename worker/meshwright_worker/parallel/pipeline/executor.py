"""The interface of executors, which run a step's micro-batches for the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from meshwright.api.training import TrainingSpec
from meshwright_worker.data.batch import Batch


class Executor(Protocol):
    """Runs forward and backward of one replica's micro-batches and leaves gradients in the parameters."""

    bubble: float | None
    """Share of a step in which ranks are idle, simulated with measured times; None without measurements."""

    def run(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Add the gradient of the replica's summed loss over `tokens_of_step`.

        Args:
            micro_batches: the replica's micro-batches on the rank's device, as many as the schedule has. They may
                differ in rows and length, but must be the same on all ranks of a replica.

        Returns:
            That quotient, fp32 []; 0 on ranks that do not compute the loss.
        """

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Return the replica's loss, summed over its targets and not divided, fp32 []; computes no gradients.

        0 on ranks that do not compute the loss, as in `run`.
        """


def tokens_of_step(training: TrainingSpec) -> int:
    """Return the maximum number of targets in a step: every loss is divided by it before its backward pass.

    The actual number of targets is known only after a reduction over the mesh. Until then this number keeps gradients
    in a range that any format can represent, and the step corrects it (`Trainer.step`).
    """
    return training.global_batch_size * training.sequence_length
