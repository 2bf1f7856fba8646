"""Steps with a loss or gradient norm that is not finite, or a spike: far above those of the steps before.

A spike is a value above the mean of a window of earlier updates by more than a number of standard deviations, as in
OLMo's optimizer that skips steps (6 of them, over 128 steps). A spiking batch is skipped before its update, or training
goes back to an older checkpoint and continues with other samples (PaLM, arXiv 2204.02311, section 5.1: 100 steps back).
Loss and norm are results of the step's one reduction, so every rank comes to the same verdict without communication.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from meshwright.api.training import AnomaliesSpec, AnomalyAction
from meshwright_worker.checkpoint.manifest import AnomalyState

_LEAST_DEVIATION = 0.01
"""Standard deviations count as at least this share of the mean: a flat curve has no spikes of a per mille."""
_LEAST_NORM_RATIO = 5.0
"""A spike of the gradient norm is also at least this many times the mean: norms of healthy runs have a long tail, up to
3 times the mean with small batches."""


class DivergedError(ArithmeticError):
    """Loss or gradients are no longer finite numbers, or too many steps in a row were skipped."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """An anomalous step."""

    action: AnomalyAction
    message: str
    """Which step it is, and why."""


class LossAnomalies:
    """Finds anomalous steps, and counts what was done about them."""

    def __init__(self, spec: AnomaliesSpec | None) -> None:
        self._spec = spec or AnomaliesSpec()
        self._losses: deque[float] = deque(maxlen=self._spec.window)
        self._norms: deque[float] = deque(maxlen=self._spec.window)
        self._skipped_in_a_row = 0
        self.skipped = 0
        """Steps of the run that were skipped here."""
        self.went_back = 0
        """How often the run went back."""

    def check(self, step: int, loss: float, norm: float) -> Anomaly | None:
        """Return what to do instead of the update of this step; None for an ordinary step."""
        if not math.isfinite(loss + norm):
            return self._limited(self._spec.non_finite, f"step {step}: loss {loss}, gradient norm {norm}")
        if self._spec.spike is None:
            return None
        for name, value, window, ratio in (
            ("loss", loss, self._losses, 0.0),
            ("gradient norm", norm, self._norms, _LEAST_NORM_RATIO),
        ):
            sigmas = self._sigmas_above(value, window)
            if sigmas and value >= ratio * fmean(window):
                text = f"step {step}: {name} {value:.4g} is {sigmas:.3g} standard deviations above the mean"
                return self._limited(self._spec.spike, f"{text} of {len(window)} updates, {fmean(window):.4g}")
        return None

    def record_update(self, loss: float, norm: float) -> None:
        """Record a step that was updated."""
        self._skipped_in_a_row = 0
        if self._spec.spike is not None:
            self._losses.append(loss)
            self._norms.append(norm)

    def record_skip(self) -> None:
        """Record a step that was skipped."""
        self._skipped_in_a_row += 1
        self.skipped += 1

    @property
    def state(self) -> AnomalyState | None:
        """What checkpoints contain. None if there is nothing to remember."""
        state = AnomalyState(
            losses=list(self._losses),
            gradient_norms=list(self._norms),
            skipped=self.skipped,
            skipped_in_a_row=self._skipped_in_a_row,
            went_back=self.went_back,
        )
        return None if state == AnomalyState() else state

    def restore(self, state: AnomalyState | None) -> None:
        """Restore what `state` returned, possibly with another window."""
        state = state or AnomalyState()
        self._losses.extend(state.losses)
        self._norms.extend(state.gradient_norms)
        self.skipped, self._skipped_in_a_row, self.went_back = state.skipped, state.skipped_in_a_row, state.went_back

    def _limited(self, action: AnomalyAction, message: str) -> Anomaly:
        if action is AnomalyAction.SKIP and self._skipped_in_a_row >= self._spec.max_skipped:
            return Anomaly(AnomalyAction.FAIL, f"{message}; the {self._skipped_in_a_row} steps before were skipped")
        return Anomaly(action, message)

    def _sigmas_above(self, value: float, window: Iterable[float]) -> float:
        """How many standard deviations `value` is above the window's mean, if enough for a spike; otherwise 0."""
        values = list(window)
        if 2 * len(values) < self._spec.window:
            return 0.0
        mean = fmean(values)
        # `statistics.pstdev` computes with fractions, which takes milliseconds of each step.
        deviation = math.dist(values, [mean] * len(values)) / math.sqrt(len(values))
        sigmas = (value - mean) / max(deviation, _LEAST_DEVIATION * abs(mean), 1e-12)
        return sigmas if sigmas > self._spec.spike_sigmas else 0.0
