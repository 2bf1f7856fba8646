"""A pipeline schedule as text of at most 80 columns: one line for each rank."""

from __future__ import annotations

from meshwright.schedules.actions import ActionKind, Schedule
from meshwright.schedules.simulator import Simulation, TimedSlot

WIDTH = 80
IDLE = "·"
MAX_UNIT = 4
"""Most columns of one unit of time."""
LETTERS = {
    ActionKind.FORWARD: "F",
    ActionKind.BACKWARD: "B",
    ActionKind.INPUT: "I",
    ActionKind.WEIGHT: "W",
}
MEANINGS = {
    ActionKind.FORWARD: "F forward",
    ActionKind.BACKWARD: "B backward",
    ActionKind.INPUT: "I gradients of inputs",
    ActionKind.WEIGHT: "W of weights",
}


def schedule_lines(schedule: Schedule, simulation: Simulation, width: int = WIDTH) -> list[str]:
    """Draw a simulated schedule, with a line that explains the letters.

    A pass is its letter and the number of its micro-batch, if both fit its time. A step that does not fit is cut.
    """
    ranks = len(simulation.timeline)
    prefix = len(str(ranks - 1)) + 2
    columns = width - prefix
    shortest = min(timed.end - timed.start for timed_slots in simulation.timeline for timed in timed_slots)
    unit = max(1, min(MAX_UNIT, int(columns * shortest / simulation.makespan)))
    scale = unit / shortest
    total = round(simulation.makespan * scale)
    lines = []
    for rank, timed_slots in enumerate(simulation.timeline):
        row = _row(timed_slots, scale, total)
        lines.append(f"{rank:>{prefix - 2}}  {row if total <= columns else row[: columns - 1] + '…'}")
    kinds = {action.kind for slots in schedule.ranks for slot in slots for action in slot}
    legend = [meaning for kind, meaning in MEANINGS.items() if kind in kinds]
    lines.append(" " * prefix + ", ".join([*legend, f"{IDLE} waiting"]))
    return lines


def _row(timed_slots: tuple[TimedSlot, ...], scale: float, total: int) -> str:
    row = [IDLE] * total
    for timed in timed_slots:
        first, last = round(timed.start * scale), round(timed.end * scale)
        row[first:last] = _label(timed, last - first)
    return "".join(row)


def _label(timed: TimedSlot, width: int) -> str:
    """The passes of a slot in this many columns: with numbers if they fit, else only letters."""
    full = "+".join(f"{LETTERS[action.kind]}{action.micro_batch}" for action in timed.slot)
    if len(full) <= width:
        return full.ljust(width, "-")
    letters = "".join(LETTERS[action.kind] for action in timed.slot)
    return letters[:width].ljust(width, "-")
