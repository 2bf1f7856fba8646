"""Whether a schedule can run: every action exactly once, in an order that no dependency contradicts."""

from __future__ import annotations

from collections import Counter

from meshwright.schedules.actions import Action, Kind, Schedule


def problems(schedule: Schedule) -> list[str]:
    """What is wrong with a schedule, in sentences; empty when it runs."""
    found = _missing_or_repeated(schedule) + _misplaced(schedule)
    return found or _stuck(schedule)


def before(action: Action, stages: int) -> list[tuple[tuple[Kind, ...], int, int]]:
    """What must have finished before `action`: (any of these kinds, stage, micro-batch)."""
    kind, stage, micro_batch = action
    if kind is Kind.FORWARD:
        return [((Kind.FORWARD,), stage - 1, micro_batch)] if stage else []
    if kind is Kind.WEIGHT:
        return [((Kind.INPUT,), stage, micro_batch)]
    needed: list[tuple[tuple[Kind, ...], int, int]] = [((Kind.FORWARD,), stage, micro_batch)]
    if stage < stages - 1:
        needed.append(((Kind.BACKWARD, Kind.INPUT), stage + 1, micro_batch))
    return needed


def _missing_or_repeated(schedule: Schedule) -> list[str]:
    counts = Counter(action for rank in range(len(schedule.ranks)) for action in schedule.actions(rank))
    found = [f"{action} stands {times} times" for action, times in counts.items() if times > 1]
    for stage in range(schedule.stages):
        for m in range(schedule.micro_batches):
            if not counts[Action(Kind.FORWARD, stage, m)]:
                found.append(f"{Action(Kind.FORWARD, stage, m)} is missing")
            whole = counts[Action(Kind.BACKWARD, stage, m)]
            halves = (counts[Action(Kind.INPUT, stage, m)], counts[Action(Kind.WEIGHT, stage, m)])
            if (whole, *halves) not in ((1, 0, 0), (0, 1, 1)):
                found.append(f"backward of stage {stage}, micro-batch {m} is neither whole nor in its two halves")
    return found


def _misplaced(schedule: Schedule) -> list[str]:
    """A micro-batch's actions in one stage must lie on one rank: its activations do."""
    home: dict[tuple[int, int], int] = {}
    found = []
    for rank in range(len(schedule.ranks)):
        for action in schedule.actions(rank):
            first = home.setdefault((action.stage, action.micro_batch), rank)
            if first != rank:
                found.append(f"{action} is on rank {rank}, its forward pass on rank {first}")
    return found


def _stuck(schedule: Schedule) -> list[str]:
    """Ranks that wait for each other for ever."""
    done: set[Action] = set()
    places = [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, slots in enumerate(schedule.ranks):
            while places[rank] < len(slots) and all(_ready(a, done, schedule.stages) for a in slots[places[rank]]):
                done.update(slots[places[rank]])
                places[rank] += 1
                moved = True
    return [
        f"rank {rank} waits for ever at {'+'.join(str(a) for a in slots[place])}"
        for rank, (slots, place) in enumerate(zip(schedule.ranks, places, strict=True))
        if place < len(slots)
    ]


def _ready(action: Action, done: set[Action], stages: int) -> bool:
    return all(any(Action(kind, s, m) in done for kind in kinds) for kinds, s, m in before(action, stages))
