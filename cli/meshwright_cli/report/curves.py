"""Loss and throughput as curves over the steps, with marks where the job restarted or changed its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from meshwright_cli.figures.svg import Element, element
from meshwright_cli.report.history import History, Mark, Point

WIDTH, HEIGHT = 1000.0, 240.0
MAX_POINTS = 500
MAX_MARKS = 60


@dataclass(frozen=True, slots=True)
class Tick:
    """A label of an axis."""

    text: str
    percent: float
    """Position from the left or from the top."""


@dataclass(frozen=True, slots=True)
class MarkView:
    """A restart or resize on the axis of steps."""

    step: int
    name: str
    note: str
    percent: float
    rescale: bool


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve with its axes. The drawing is stretched to its box; labels are text of the page."""

    title: str
    description: str
    svg: Element
    y_ticks: Sequence[Tick]
    x_ticks: Sequence[Tick]
    marks: Sequence[MarkView]
    last: str


def curves(history: History) -> list[Curve]:
    """Return the curves of a history: loss with evaluations, and throughput. Empty without two steps of either."""
    found = []
    loss = _curve(history, "Loss", lambda point: point.loss, _loss_text, others=lambda point: point.evaluation_loss)
    rate = _curve(
        history, "Throughput", lambda point: point.tokens_per_second, lambda value: f"{value:,.0f}", from_zero=True
    )
    found += [one for one in (loss, rate) if one is not None]
    return found


def measured_bubble(history: History) -> float | None:
    """Return the median of the measured bubbles, or None."""
    bubbles = [point.bubble for point in history.points if point.bubble is not None]
    return median(bubbles) if bubbles else None


def measured_step_seconds(history: History) -> float | None:
    """Return the median of the measured step times, or None."""
    seconds = [point.step_seconds for point in history.points if point.step_seconds is not None]
    return median(seconds) if seconds else None


@dataclass(frozen=True, slots=True)
class _Axes:
    """The steps and values at the edges of a plot."""

    first: int
    last: int
    low: float
    high: float

    def x(self, step: int) -> float:
        """Distance from the left edge."""
        return WIDTH * (step - self.first) / max(1, self.last - self.first)

    def y(self, value: float) -> float:
        """Distance from the upper edge."""
        return HEIGHT * (self.high - value) / (self.high - self.low)

    def line(self, samples: Sequence[tuple[int, float]], css_class: str) -> Element:
        """A line through the samples."""
        points = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in _thinned(samples))
        return element("polyline", points=points, class_=css_class, vector_effect="non-scaling-stroke")


def _curve(
    history: History,
    title: str,
    value_of: Callable[[Point], float | None],
    as_text: Callable[[float], str],
    others: Callable[[Point], float | None] | None = None,
    *,
    from_zero: bool = False,
) -> Curve | None:
    samples = [(point.step, value) for point in history.points if (value := value_of(point)) is not None]
    if len(samples) < 2:
        return None
    more = [(point.step, value) for point in history.points if others and (value := others(point)) is not None]
    first, last = samples[0][0], samples[-1][0]
    values = [value for _, value in (*samples, *more)]
    low, high = _padded(0.0 if from_zero else min(values), max(values), from_zero)
    axes = _Axes(first, last, low, high)
    marks = [_mark(mark, first, last) for mark in history.marks if first <= mark.step <= last][:MAX_MARKS]
    children = [*map(_mark_line, marks), axes.line(samples, "curve")]
    if more:
        children.append(axes.line(more, "curve second"))
    svg = element(
        "svg",
        *children,
        viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
        preserveAspectRatio="none",
        aria_hidden="true",
        class_="plot",
    )
    description = (
        f"{title}: {as_text(samples[0][1])} after step {first:,}, {as_text(samples[-1][1])} after step {last:,}; "
        f"{len(marks)} restarts or rescales"
    )
    return Curve(
        title=title,
        description=description,
        svg=svg,
        y_ticks=[Tick(as_text(value), 100 * axes.y(value) / HEIGHT) for value in _ticks(low, high)],
        x_ticks=[Tick(f"{step:,}", 100 * axes.x(step) / WIDTH) for step in _step_ticks(first, last)],
        marks=marks,
        last=as_text(samples[-1][1]),
    )


def _padded(low: float, high: float, from_zero: bool) -> tuple[float, float]:
    span = high - low or abs(high) or 1.0
    return (low if from_zero else low - 0.05 * span), high + 0.05 * span


def _thinned(samples: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """The samples, or means of equal runs of them if there are many. The first and the last stay."""
    if len(samples) <= MAX_POINTS:
        return samples
    size = -(-len(samples) // MAX_POINTS)
    inner = samples[1:-1]
    runs = [inner[start : start + size] for start in range(0, len(inner), size)]
    means = [(run[len(run) // 2][0], fmean(value for _, value in run)) for run in runs]
    return [samples[0], *means, samples[-1]]


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers between two values."""
    span = high - low
    unit = 10.0 ** math.floor(math.log10(span))
    step = next(unit * factor for factor in (0.1, 0.2, 0.5, 1.0, 2.0) if span / (unit * factor) <= 6)
    start = math.ceil(low / step)
    return [number * step for number in range(start, math.floor(high / step) + 1)]


def _step_ticks(first: int, last: int) -> list[int]:
    inner = [round(tick) for tick in _ticks(float(first), float(last))] if last - first > 5 else []
    span = last - first
    return [first, *(step for step in inner if step - first > span / 8 and last - step > span / 8), last]


def _mark(mark: Mark, first: int, last: int) -> MarkView:
    percent = 100 * (mark.step - first) / max(1, last - first)
    return MarkView(mark.step, mark.name, mark.note, percent, "scale" in mark.name.lower())


def _mark_line(mark: MarkView) -> Element:
    at = WIDTH * mark.percent / 100
    kind = "mark rescale" if mark.rescale else "mark"
    return element("line", x1=at, x2=at, y1=0, y2=HEIGHT, class_=kind, vector_effect="non-scaling-stroke")


def _loss_text(value: float) -> str:
    return f"{value:.4g}"
