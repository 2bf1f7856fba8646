"""What every way of running a step's micro-batches offers to the training loop."""

from __future__ import annotations

from typing import Protocol

import torch


class Executor(Protocol):
    """Runs forward and backward of one replica's batch and leaves gradients in the parameters."""

    def run(self, samples: torch.Tensor) -> torch.Tensor:
        """Add the gradient of the replica's mean loss per token.

        Args:
            samples: tokens, int64 [replica's batch, sequence_length + 1], on the rank's device.

        Returns:
            That mean, fp32 []; 0 on ranks that do not compute the loss.
        """
