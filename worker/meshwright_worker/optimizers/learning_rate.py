"""The learning-rate schedule: linear warm-up, an optional phase at the peak, and a decay.

The rate is a function of the step, the number of steps and the spec, and of nothing else. So a checkpoint contains no
state of the schedule, and a resumed run has the rates of an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from meshwright.api.training import OptimizerSpec, RateDecay

_FORMS: Mapping[RateDecay, Callable[[float], float]] = {
    RateDecay.COSINE: lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    RateDecay.LINEAR: lambda progress: 1.0 - progress,
    RateDecay.SQUARE_ROOT: lambda progress: 1.0 - math.sqrt(progress),
}
"""Decay -> what is left of the difference between peak and minimum after a part of the decay, 1 to 0. Cosine: SGDR
(arXiv 1608.03983). Linear and 1 - sqrt, as cooldown: arXiv 2405.18392, section 3."""


def learning_rate(step: int, steps: int, spec: OptimizerSpec) -> float:
    """Return the rate of step `step`, 1 to `steps`.

    The last step of the warm-up has the peak. With a decay that ends, the last step of the run has the minimum. With
    `decay_steps`, all steps between warm-up and decay have the peak (arXiv 2404.06395, section 4).
    """
    peak, floor, decay = spec.learning_rate, spec.min_learning_rate, spec.decay_or_default
    if step < spec.warmup_steps:
        return peak * step / spec.warmup_steps
    if decay is RateDecay.INVERSE_SQUARE_ROOT:
        # Where it starts, it continues the warm-up: the rate of "Attention Is All You Need" (arXiv 1706.03762, 5.3).
        return max(floor, peak * math.sqrt(max(1, spec.warmup_steps) / step))
    start = spec.decay_start(steps)
    if decay is RateDecay.CONSTANT or step < start:
        return peak
    progress = (step - start) / max(1, steps - start)
    return floor + (peak - floor) * _FORMS[decay](min(1.0, progress))
