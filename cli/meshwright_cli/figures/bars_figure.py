"""Stacked bars in groups, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright_cli.figures.svg import Element, drawing, element, legend, text

WIDTH, LEFT, RIGHT = 760.0, 100.0, 84.0
BAR, STEP, HEADING = 22.0, 30.0, 32.0
COLORS = ("forward", "input", "backward", "weight", "other")


@dataclass(frozen=True, slots=True)
class Row:
    """One bar."""

    label: str
    values: Sequence[float]
    text: str


def bars_figure(
    groups: Sequence[tuple[str, Sequence[Row]]], parts: Sequence[str], title: str, limit: float, limit_text: str
) -> Element:
    """Draw bars.

    Args:
        groups: (heading, bars).
        parts: names of the parts, at most five.
        title: the description for people who do not see the figure.
        limit: a value that a line marks.
        limit_text: what the line is.
    """
    longest = max(limit, *(sum(row.values) for _, rows in groups for row in rows))
    inner = WIDTH - LEFT - RIGHT
    children: list[Element] = []
    top = 22.0
    for heading, rows in groups:
        children.append(text(heading, 0, top + 14, class_="bold"))
        top += HEADING - 6
        for row in rows:
            children += _bar(row, top, inner / longest)
            top += STEP
        top += 8
    at = LEFT + limit * inner / longest
    children.append(element("rect", x=at - 1, y=20, width=2, height=top - 28, class_="warn"))
    children.append(text(limit_text, at, 14, text_anchor="end", class_="warn"))
    children += legend(list(zip(COLORS, parts, strict=False)), top + 4)
    return drawing(WIDTH, top + 24, title, children)


def _bar(row: Row, top: float, scale: float) -> list[Element]:
    left, made = LEFT, [text(row.label, 0, top + BAR * 0.68)]
    for value, color in zip(row.values, COLORS, strict=False):
        width = value * scale
        if width >= 0.5:
            made.append(element("rect", x=left, y=top, width=max(0.5, width - 1), height=BAR, class_=color))
        left += width
    made.append(text(row.text, WIDTH, top + BAR * 0.68, text_anchor="end", class_="muted"))
    return made
