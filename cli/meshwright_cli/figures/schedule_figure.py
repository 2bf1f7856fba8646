"""A pipeline schedule as a timeline: one row for each rank, one box for each pass, gaps where the rank waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.schedules.actions import Action, ActionKind, Schedule
from meshwright.schedules.simulator import Simulation, TimedSlot
from meshwright_cli.figures.svg import Element, drawing, element, group, legend, text

CLASSES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "input",
    ActionKind.WEIGHT: "weight",
}
NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "backward, gradients of inputs",
    ActionKind.WEIGHT: "backward, gradients of weights",
}
MAX_SLOTS = 6000
"""Largest number of slots that are drawn. Of a longer step, the beginning and the end are drawn."""
ROW, GAP, LEFT, TOP, BREAK = 22.0, 4.0, 58.0, 6.0, 44.0
MIN_LABEL = 15.0
"""Narrowest box with the number of its micro-batch, in pixels."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the step that is drawn."""

    start: float
    end: float
    left: float
    """Where it begins, in pixels."""
    scale: float
    """Pixels per second."""

    def x(self, at: float) -> float:
        """The position of a time."""
        return self.left + (at - self.start) * self.scale


def schedule_figure(
    schedule: Schedule, simulation: Simulation, title: str, width: float = 1080.0, *, with_legend: bool = False
) -> Element:
    """Draw a simulated schedule.

    Args:
        schedule: the order of one step.
        simulation: its timeline.
        title: the description for people who do not see the figure.
        width: width in pixels.
        with_legend: whether the figure contains its legend.
    """
    windows = _windows(simulation, width)
    ranks = len(simulation.timeline)
    height = TOP + ranks * (ROW + GAP) + 8
    children: list[Element] = []
    for rank, timed_slots in enumerate(simulation.timeline):
        top = TOP + rank * (ROW + GAP)
        children.append(text(f"stage {rank}", 0, top + ROW * 0.68, class_="muted"))
        for window in windows:
            box = element(
                "rect",
                x=window.left,
                y=top,
                width=(window.end - window.start) * window.scale,
                height=ROW,
                class_="idle",
            )
            children += [box, *_row(schedule, timed_slots, window, top)]
    if len(windows) > 1:
        middle = (windows[0].x(windows[0].end) + windows[1].left) / 2
        children.append(text("···", middle, TOP + ranks * (ROW + GAP) / 2, text_anchor="middle", class_="bold"))
    if with_legend:
        children += legend(legend_of(schedule), height + 2)
    return drawing(width, height + 22 * with_legend, title, children)


def legend_of(schedule: Schedule) -> list[tuple[str, str]]:
    """Return (CSS class, name) of each kind of pass in a schedule, and of waiting."""
    kinds = {action.kind for slots in schedule.ranks for slot in slots for action in slot}
    return [(CLASSES[kind], NAMES[kind]) for kind in ActionKind if kind in kinds] + [("idle", "waiting")]


def _windows(simulation: Simulation, width: float) -> list[Window]:
    """The parts of the step to draw: all of it, or its beginning and its end."""
    total = sum(len(timed_slots) for timed_slots in simulation.timeline)
    makespan, inner = simulation.makespan, width - LEFT - 2
    if total <= MAX_SLOTS:
        return [Window(0.0, makespan, LEFT, inner / makespan)]
    part = makespan * MAX_SLOTS / total / 2
    half = (inner - BREAK) / 2
    scale = half / part
    return [Window(0.0, part, LEFT, scale), Window(makespan - part, makespan, LEFT + half + BREAK, scale)]


def _row(schedule: Schedule, timed_slots: tuple[TimedSlot, ...], window: Window, top: float) -> Iterator[Element]:
    """The boxes of one rank: separate ones with numbers if they are wide, else one path for each color."""
    boxes = list(_boxes(schedule, timed_slots, window, top))
    if boxes and min(box[1][2] for box in boxes) >= MIN_LABEL:
        for name, (x, y, width, height), action in boxes:
            label = text(
                str(action.micro_batch), x + width / 2, y + height * 0.5 + 3.5, text_anchor="middle", class_="small"
            )
            yield group(
                [element("rect", x=x, y=y, width=max(0.5, width - 1), height=height, class_=name), label],
            )
        return
    paths: defaultdict[str, list[str]] = defaultdict(list)
    for name, (x, y, width, height), _ in boxes:
        gap = 0.5 if width > 3 else 0.0
        paths[name].append(f"M{x:.1f} {y:.1f}h{width - gap:.1f}v{height:.1f}h-{width - gap:.1f}z")
    for name, parts in paths.items():
        yield element("path", d="".join(parts), class_=name)


def _boxes(
    schedule: Schedule, timed_slots: tuple[TimedSlot, ...], window: Window, top: float
) -> Iterator[tuple[str, tuple[float, float, float, float], Action]]:
    """(class, (x, y, width, height), action) of each pass in a window. Two that overlap share the row's height."""
    ranks = max(1, len(schedule.ranks))
    for timed in timed_slots:
        start, end = max(timed.start, window.start), min(timed.end, window.end)
        if end <= start:
            continue
        height = ROW / len(timed.slot)
        for position, action in enumerate(timed.slot):
            second = "2" if (action.stage // ranks) % 2 else ""
            place = (window.x(start), top + position * height, (end - start) * window.scale, height)
            yield CLASSES[action.kind] + second, place, action
