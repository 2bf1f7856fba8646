"""Perplexity, which operator and worker tell alike."""

from __future__ import annotations

import math


def perplexity(loss: float) -> float:
    """The exponential of a mean loss per token; infinite where that is more than a number holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
