"""Dynamic loss scaling for fp16 (mixed precision training, arXiv 1710.03740, section 3.2).

Gradients are multiplied by a scale, so that they do not vanish in fp16. A step whose gradients overflowed changes
nothing and halves the scale; after a number of steps without one it doubles. The scale is a plain number that every
rank derives from what the step's one reduction says, so it agrees over every dimension without being sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.api.precision import LossScaleSpec, Precision
from meshwright.api.training import TrainingSpec
from meshwright_worker.models.decoder import DecoderStage

_MIN_SCALE = 2.0**-14
"""A scale that falls below it would not help any more: what overflows is no gradient of a small loss."""


@dataclass(slots=True)
class LossScale:
    """The scale now, and how it came about."""

    value: float
    growth_interval: int
    steady: int = 0
    """Steps without an overflow since the scale last changed."""
    skipped: int = 0
    """Steps of the run that changed nothing."""
    dynamic: bool = True

    @classmethod
    def of(cls, training: TrainingSpec) -> LossScale:
        """The scale at the beginning of a run; always 1 but for fp16."""
        spec: LossScaleSpec = training.loss_scale
        if training.precision is not Precision.FP16:
            return cls(1.0, spec.growth_interval, dynamic=False)
        return cls(float(spec.initial), spec.growth_interval)

    def record_overflow(self) -> bool:
        """Take note of an overflow; whether the step may be skipped for it.

        It may not where nothing is scaled, nor when halving has not helped for long: then training has diverged.
        """
        if not self.dynamic or self.value <= _MIN_SCALE:
            return False
        self.value, self.steady, self.skipped = self.value / 2, 0, self.skipped + 1
        return True

    def record_success(self) -> None:
        """Take note of a step without an overflow."""
        self.steady += 1
        if self.dynamic and self.steady >= self.growth_interval:
            self.value, self.steady = self.value * 2, 0


def scale_loss_gradients(stages: Iterable[DecoderStage], scale: LossScale) -> None:
    """Multiply what flows back from the loss of the last stage by the scale of the time. The loss stays as it is."""

    def hook(_: torch.nn.Module, inputs: object, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = _ScaledGradient.apply(loss, scale)  # type: ignore[no-untyped-call]
        return scaled

    for stage in stages:
        if scale.dynamic and stage.is_last:
            (stage.chunked_loss or stage.loss).register_forward_hook(hook)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: LossScale) -> torch.Tensor:
        ctx.scale = scale.value
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.scale, None
