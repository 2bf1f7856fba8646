"""Runs micro-batches one after the other, for a model that is not split into stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.fsdp import FSDPModule

from meshwright_worker.data.batch import Batch
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.parallel.data.fsdp import reshard


class GradientAccumulation:
    """Sums gradients over micro-batches; FSDP reduces them only with the last one.

    Args:
        stage: the entire model.
        tokens: the divisor of the summed loss, `tokens_of_step`.
    """

    bubble: float | None = None

    def __init__(self, stage: DecoderStage, tokens: int) -> None:
        self._stage = stage
        self._tokens = tokens

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """See `Executor.evaluate`."""
        total = torch.zeros((), device=micro_batches[0].tokens.device)
        for part in micro_batches:
            total = total + self._stage(part.tokens, targets=part.targets, token_metadata=part.token_metadata)
        reshard(self._stage)
        return total

    def run(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """See `Executor.run`."""
        total = torch.zeros((), device=micro_batches[0].tokens.device)
        for number, part in enumerate(micro_batches, start=1):
            if isinstance(self._stage, FSDPModule):
                last = number == len(micro_batches)
                self._stage.set_requires_gradient_sync(last)
                self._stage.set_is_last_backward(last)
            loss = self._stage(part.tokens, targets=part.targets, token_metadata=part.token_metadata) / self._tokens
            loss.backward()
            total = total + loss.detach()
        return total
