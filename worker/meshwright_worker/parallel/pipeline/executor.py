"""What every way of running a step's micro-batches offers to the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from meshwright.api.training import TrainingSpec
from meshwright_worker.data.batch import Batch


class Executor(Protocol):
    """Runs forward and backward of one replica's micro-batches and leaves gradients in the parameters."""

    bubble: float | None
    """Part of a step's passes in which ranks wait, simulated with measured times; None where none were measured."""

    def run(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Add the gradient of the replica's summed loss over `tokens_of_step`.

        Args:
            micro_batches: the replica's micro-batches on the rank's device, as many as the schedule has. They may
                differ in
                rows and length, but must not between the ranks of a replica.

        Returns:
            That quotient, fp32 []; 0 on ranks that do not compute the loss.
        """

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """The replica's loss, summed over its targets and divided by nothing, fp32 []; computes no gradients.

        0 on ranks that do not compute the loss, as in `run`.
        """


def tokens_of_step(training: TrainingSpec) -> int:
    """Tokens of a step when each is predicted: what every loss is divided by before its backward pass.

    How many of a step's tokens really are predicted is known only after a reduction over the mesh; until then this
    number keeps gradients in a range that any format holds, and the step corrects it (`Trainer.step`).
    """
    return training.global_batch_size * training.sequence_length
