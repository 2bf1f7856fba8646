"""Bars as text of at most 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

WIDTH = 80


def bar_lines(
    rows: Sequence[tuple[str, Sequence[float], str]], symbols: str, longest: float, limit: float | None = None
) -> list[str]:
    """Draw stacked bars.

    Args:
        rows: (label, values of the parts, text after the bar).
        symbols: one character for each part.
        longest: the value of a bar over the full width.
        limit: a value that `|` marks.
    """
    left = max(len(label) for label, _, _ in rows) + 1
    right = max(len(text) for _, _, text in rows) + 1
    columns = WIDTH - left - right - 1
    lines = []
    for label, values, text in rows:
        ends = [round(end * columns / longest) for end in accumulate(values)]
        bar = "".join(
            symbol * (end - start) for symbol, start, end in zip(symbols, [0, *ends], ends, strict=False)
        ).ljust(columns + 1)
        if limit is not None:
            mark = round(limit * columns / longest)
            bar = bar[:mark] + "|" + bar[mark + 1 :]
        lines.append(f"{label:<{left}}{bar}{text:>{right}}".rstrip())
    return lines
