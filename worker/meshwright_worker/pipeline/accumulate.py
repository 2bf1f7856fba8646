"""Micro-batches one after the other, for a model that is not split into stages."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule

from meshwright_worker.models.llama import DecoderStage


class Accumulation:
    """Adds up gradients over micro-batches; those of FSDP are reduced with the last one alone."""

    def __init__(self, stage: DecoderStage, micro_batches: int) -> None:
        self._stage = stage
        self._micro_batches = micro_batches

    def run(self, samples: torch.Tensor) -> torch.Tensor:
        """See `Executor.run`."""
        inputs, targets = samples[:, :-1], samples[:, 1:]
        total = torch.zeros((), device=samples.device)
        parts = zip(inputs.chunk(self._micro_batches), targets.chunk(self._micro_batches), strict=True)
        for number, (tokens, wanted) in enumerate(parts, start=1):
            if isinstance(self._stage, FSDPModule):
                last = number == self._micro_batches
                self._stage.set_requires_gradient_sync(last)
                self._stage.set_is_last_backward(last)
            loss = self._stage(tokens, targets=wanted) / targets.numel()
            loss.backward()
            total += loss.detach()
        return total
