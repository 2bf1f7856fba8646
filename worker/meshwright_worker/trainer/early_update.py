"""The update of a step, launched before the host has read the results of the step.

Otherwise the device does nothing from the end of the backward pass until the host has read loss and gradient norm, and
launched the first kernel of the update; and if the host takes longer to launch a kernel than the device takes for it,
the device waits again and again. Here the device decides itself whether to update: not if loss or gradient norm is not
finite. The host reads the results from a copy that is made before the update, and so launches the next step's kernels
while the device still updates.
"""

from __future__ import annotations

import torch

from meshwright.api.training import TrainingSpec
from meshwright_worker.distributed.step_clock import UPDATE, phase
from meshwright_worker.optimizers.master_adamw import MasterAdamW


class EarlyUpdates:
    """The updates of one rank, whose optimizer is `optimizer`. A step has `tokens` tokens."""

    def __init__(self, optimizer: MasterAdamW, training: TrainingSpec, tokens: int) -> None:
        self._optimizer = optimizer
        self._clip = training.optimizer.gradient_clip
        self._tokens = tokens
        self._copy: torch.Tensor | None = None

    def launch(self, gradients: list[torch.Tensor], sums: torch.Tensor, rate: float) -> list[float]:
        """Launch the update, wait for `sums`, fp64 [numbers], and return them. They begin with loss, square of the
        gradient norm and number of targets, as `Trainer` sums them.
        """
        with phase(UPDATE):
            factor = factor_of(sums, self._tokens, self._clip)
            if not sums.is_cuda:
                self._optimizer.step_if_finite(gradients, rate, factor)
                return sums.tolist()
            if self._copy is None or self._copy.shape != sums.shape:
                self._copy = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            self._copy.copy_(sums, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._optimizer.step_if_finite(gradients, rate, factor)
        copied.synchronize()
        return self._copy.tolist()

    def withdraw(self) -> None:
        """Do not count the last update, which the device has dropped: loss or gradient norm is not finite."""
        self._optimizer.withdraw()


def factor_of(sums: torch.Tensor, tokens: int, clip: float) -> torch.Tensor:
    """Return by what a step's gradients are multiplied, fp64 [] on the device: not a number if loss or gradient norm is
    not finite.

    The same operations as `Trainer.update` and `clipped_factor` do on the host, so the same number in the fp32 of the
    update; but on a CPU torch's square root may differ in the last bit of fp64.
    """
    loss, squares, targets = sums[:3].unbind()
    # torch divides a plain number by a tensor as a product with the reciprocal, which has other bits.
    correction = torch.full_like(targets, tokens) / targets.clamp(min=1.0)
    norm = squares.sqrt() * correction
    factor = correction
    if clip:
        factor = torch.where(norm > clip, correction * (torch.full_like(norm, clip) / norm), correction)
    return torch.where((loss * correction + norm).isfinite(), factor, torch.nan)
