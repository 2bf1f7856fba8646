"""Dynamic loss scaling for fp16 (mixed precision training, arXiv 1710.03740, section 3.2).

Gradients are multiplied by a scale, so that they do not underflow in fp16. A step whose gradients overflow updates
nothing and halves the scale; after a number of steps without an overflow the scale doubles. Every rank computes the
scale from the result of the step's one reduction, so it is equal on all ranks without being sent.
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
"""Minimum scale: if gradients overflow at this scale, a lower one does not help."""


@dataclass(slots=True)
class LossScale:
    """The current scale and its state."""

    value: float
    growth_interval: int
    steady: int = 0
    """Steps without an overflow since the scale last changed."""
    skipped: int = 0
    """Steps of the run that updated nothing."""
    dynamic: bool = True

    @classmethod
    def of(cls, training: TrainingSpec) -> LossScale:
        """Return the scale at the beginning of a run; always 1 except for fp16."""
        spec: LossScaleSpec = training.loss_scale
        if training.precision is not Precision.FP16:
            return cls(1.0, spec.growth_interval, dynamic=False)
        return cls(float(spec.initial), spec.growth_interval)

    @property
    def may_overflow(self) -> bool:
        """Whether a step whose gradients overflow may be skipped.

        It may not if gradients are not scaled, or if halving has not helped for long: then training has diverged.
        """
        return self.dynamic and self.value > _MIN_SCALE

    def record_overflow(self) -> None:
        """Record a step that updates nothing because its gradients overflowed."""
        self.value, self.steady, self.skipped = self.value / 2, 0, self.skipped + 1

    def record_success(self) -> None:
        """Record a step without an overflow."""
        self.steady += 1
        if self.dynamic and self.steady >= self.growth_interval:
            self.value, self.steady = self.value * 2, 0


def scale_loss_gradients(stages: Iterable[DecoderStage], scale: LossScale) -> None:
    """Multiply the gradient of the last stage's loss by the current scale. The loss does not change."""

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
