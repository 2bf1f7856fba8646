"""The timeline of a step as the ranks of a pipeline measured it, in the form of a simulated one.

Each rank measures its slots on its own clock, relative to the end of the step's last collective, which all ranks reach
together. A slot begins when what it needs has arrived, so the gaps are the rank's waits for other stages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.schedules.actions import Action, ActionKind, Schedule, Slot
from meshwright.schedules.simulator import Simulation, TimedSlot

MAX_SLOTS = 2048
"""Most slots of a rank that are reported. A longer step is not."""
MICROSECOND = 1e-6
STORED_DIRECTORY = "timeline"
"""Where a job's last timeline stays, below the directory of its checkpoints: a file for each rank of the pipeline."""
_PASS = re.compile(rf"([{''.join(kind.value for kind in ActionKind)}])(\d{{1,6}})\.(\d{{1,6}})")

SlotTime = tuple[str, int, int]
"""The passes of a slot as text, when it began, and how long it took, in microseconds. The end of the step is 0."""


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """One rank's slots of a step. Small: it is sent with a step's report."""

    step: int
    stage: int
    """Index of the rank in the pipeline."""
    stages: int
    """Number of ranks of the pipeline."""
    slots: list[SlotTime]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of all ranks of a pipeline."""

    step: int
    schedule: Schedule
    timeline: Simulation


def slot_text(slot: Slot) -> str:
    """A slot as text, overlapped passes joined by `+`."""
    return "+".join(str(action) for action in slot)


def measured_step(ranks: Iterable[RankTimeline]) -> MeasuredStep | None:
    """Return the latest step of which every rank's slots are there. None if there is none."""
    steps: dict[int, dict[int, RankTimeline]] = {}
    for rank in ranks:
        steps.setdefault(rank.step, {})[rank.stage] = rank
    for step in sorted(steps, reverse=True):
        found = steps[step]
        count = next(iter(found.values())).stages
        if set(found) == set(range(count)) and all(rank.slots for rank in found.values()):
            return _of_ranks(step, [found[stage] for stage in range(count)])
    return None


def read_timelines(document: Any) -> list[RankTimeline]:
    """Read what a worker pod serves. Pods belong to users: what is not valid is left out."""
    ranks = document.get("ranks") if isinstance(document, Mapping) else None
    found = [_read(value) for value in ranks.values()] if isinstance(ranks, Mapping) else []
    return [one for one in found if one is not None]


def stored_name(stage: int) -> str:
    """The name of the file of a rank of the pipeline, in `STORED_DIRECTORY`."""
    return f"stage-{stage:05d}.json"


def stored_text(timeline: RankTimeline) -> str:
    """The content of this file: one line."""
    return json.dumps(asdict(timeline), separators=(",", ":")) + "\n"


def read_stored(text: str) -> list[RankTimeline]:
    """Read such files, one after the other. What is not valid is left out."""
    found = []
    for line in text.splitlines():
        try:
            found.append(_read(json.loads(line)))
        except (ValueError, RecursionError):
            continue
    return [one for one in found if one is not None]


def _read(value: Any) -> RankTimeline | None:
    try:
        slots = [(str(passes), int(start), int(length)) for passes, start, length in value["slots"]]
        one = RankTimeline(int(value["step"]), int(value["stage"]), int(value["stages"]), slots)
        [_slot(passes) for passes, _, _ in slots]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    fits = len(slots) <= MAX_SLOTS and 0 <= one.stage < one.stages <= MAX_SLOTS
    return one if fits and all(abs(start) < 1e12 and 0 <= length < 1e12 for _, start, length in slots) else None


def _of_ranks(step: int, ranks: list[RankTimeline]) -> MeasuredStep:
    origin = min(start for rank in ranks for _, start, _ in rank.slots)
    timeline = tuple(
        tuple(
            TimedSlot(_slot(passes), (start - origin) * MICROSECOND, (start - origin + length) * MICROSECOND)
            for passes, start, length in rank.slots
        )
        for rank in ranks
    )
    slots = tuple(tuple(timed.slot for timed in rank) for rank in timeline)
    actions = [action for rank in slots for slot in rank for action in slot]
    stages = 1 + max(action.stage for action in actions)
    micro_batches = 1 + max(action.micro_batch for action in actions)
    return MeasuredStep(step, Schedule("measured", stages, micro_batches, slots), Simulation(timeline, ()))


def _slot(text: str) -> Slot:
    """Read `slot_text`. Raises ValueError if it is something else."""
    actions = []
    for part in text.split("+"):
        found = _PASS.fullmatch(part)
        if found is None:
            raise ValueError(f"`{part}` is not a pass")
        actions.append(Action(ActionKind(found[1]), int(found[2]), int(found[3])))
    return tuple(actions)
