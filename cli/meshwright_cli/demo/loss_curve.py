"""The observed loss of a run, and a sparkline of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class LossCurve:
    """Loss by step. A step that is repeated after a fault replaces the previous value."""

    by_step: dict[int, float] = field(default_factory=dict)

    def add(self, step: int, loss: float) -> None:
        """Record one observation."""
        self.by_step[step] = loss

    @property
    def first(self) -> tuple[int, float] | None:
        """The first observed step, with its loss."""
        return min(self.by_step.items(), default=None)

    @property
    def last(self) -> tuple[int, float] | None:
        """The last observed step, with its loss."""
        return max(self.by_step.items(), default=None)

    def values(self) -> list[float]:
        """Losses in the order of steps."""
        return [self.by_step[step] for step in sorted(self.by_step)]


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a line of block characters, at most `width` wide: the mean of each bin, scaled to the range."""
    if not values or width < 1:
        return ""
    bins = min(width, len(values))
    means = []
    for index in range(bins):
        part = values[index * len(values) // bins : (index + 1) * len(values) // bins]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)
