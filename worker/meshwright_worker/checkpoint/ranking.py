"""Which checkpoints have the lowest evaluation loss. Pure.

A step without a loss, or whose loss is not a finite number, is not ranked. Of steps with the same loss, the earlier one
is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

NONE_IS_BEST = (
    "no complete checkpoint in {place} has an evaluation loss, which is recorded with `checkpoint.keepBest`: leave out "
    "--best to use the newest"
)


def ranked(losses: Mapping[int, float | None]) -> list[int]:
    """The steps with a loss, the best first.

    Args:
        losses: Step -> its evaluation loss; None if there is none.
    """
    found = [(loss, step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return [step for _, step in sorted(found)]


def is_among_best(step: int, loss: float, losses: Mapping[int, float | None], count: int) -> bool:
    """Whether a new checkpoint of `step` with this loss would be one of the `count` best, next to those in `losses`."""
    return step in ranked({**losses, step: loss})[:count]
