"""Whether a schedule can run: every action exactly once, in an order that no dependency contradicts."""

from __future__ import annotations

from collections import Counter

from meshwright.schedules.actions import Action, ActionKind, Schedule


def schedule_problems(schedule: Schedule) -> list[str]:
    """What is wrong with a schedule, in sentences; empty when it runs."""
    problems_found = _missing_or_repeated(schedule) + _misplaced(schedule)
    return problems_found or _deadlocks(schedule)


def dependencies(action: Action, stages: int) -> list[tuple[tuple[ActionKind, ...], int, int]]:
    """What must have finished before `action`: (any of these kinds, stage, micro-batch)."""
    kind, stage, micro_batch = action
    if kind is ActionKind.FORWARD:
        return [((ActionKind.FORWARD,), stage - 1, micro_batch)] if stage else []
    if kind is ActionKind.WEIGHT:
        return [((ActionKind.INPUT,), stage, micro_batch)]
    needed: list[tuple[tuple[ActionKind, ...], int, int]] = [((ActionKind.FORWARD,), stage, micro_batch)]
    if stage < stages - 1:
        needed.append(((ActionKind.BACKWARD, ActionKind.INPUT), stage + 1, micro_batch))
    return needed


def _missing_or_repeated(schedule: Schedule) -> list[str]:
    counts = Counter(action for rank in range(len(schedule.ranks)) for action in schedule.actions(rank))
    problems_found = [f"{action} occurs {times} times" for action, times in counts.items() if times > 1]
    for stage in range(schedule.stages):
        for m in range(schedule.micro_batches):
            if not counts[Action(ActionKind.FORWARD, stage, m)]:
                problems_found.append(f"{Action(ActionKind.FORWARD, stage, m)} is missing")
            whole_count = counts[Action(ActionKind.BACKWARD, stage, m)]
            split_counts = (counts[Action(ActionKind.INPUT, stage, m)], counts[Action(ActionKind.WEIGHT, stage, m)])
            if (whole_count, *split_counts) not in ((1, 0, 0), (0, 1, 1)):
                problems_found.append(
                    f"backward of stage {stage}, micro-batch {m} is neither whole nor in its two halves"
                )
    return problems_found


def _misplaced(schedule: Schedule) -> list[str]:
    """A micro-batch's actions in one stage must lie on one rank: its activations do."""
    rank_of: dict[tuple[int, int], int] = {}
    problems_found = []
    for rank in range(len(schedule.ranks)):
        for action in schedule.actions(rank):
            forward_rank = rank_of.setdefault((action.stage, action.micro_batch), rank)
            if forward_rank != rank:
                problems_found.append(f"{action} is on rank {rank}, its forward pass on rank {forward_rank}")
    return problems_found


def _deadlocks(schedule: Schedule) -> list[str]:
    """Ranks that wait for each other for ever."""
    done: set[Action] = set()
    positions = [0] * len(schedule.ranks)
    progressed = True
    while progressed:
        progressed = False
        for rank, slots in enumerate(schedule.ranks):
            while positions[rank] < len(slots) and all(
                _ready(a, done, schedule.stages) for a in slots[positions[rank]]
            ):
                done.update(slots[positions[rank]])
                positions[rank] += 1
                progressed = True
    return [
        f"rank {rank} waits for ever at {'+'.join(str(a) for a in slots[position])}"
        for rank, (slots, position) in enumerate(zip(schedule.ranks, positions, strict=True))
        if position < len(slots)
    ]


def _ready(action: Action, done: set[Action], stages: int) -> bool:
    return all(any(Action(kind, s, m) in done for kind in kinds) for kinds, s, m in dependencies(action, stages))
