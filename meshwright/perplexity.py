"""Perplexity, for the reports of the operator and of the worker."""

from __future__ import annotations

import math


def perplexity(loss: float) -> float:
    """The exponential of a mean loss per token; infinite if it is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
