"""What a pipeline's schedule does to a rank: micro-batches that it holds, seconds that it waits, copies of its weights.

Forms are those of `meshwright.schedules`, also for an automatic schedule: searching one for each layout would take
longer than all of the plan. The asynchronous ones never drain: nobody waits.
"""

from __future__ import annotations

from meshwright.planner.cost.choices import STALE, Choices, Schedule
from meshwright.schedules.closed_forms import StageTimes, automatic_bubble, bubble, in_flight
from meshwright.schedules.closed_forms import halfway as halfway_of

HALVES = frozenset({Schedule.ZB_H1, Schedule.ZB_H2, Schedule.ZB_V, Schedule.DUAL_PIPE, Schedule.DUAL_PIPE_V})
"""Schedules whose backward pass comes in two halves, at least for some micro-batches."""
APART = frozenset({Schedule.ZB_H1, Schedule.ZB_H2, Schedule.ZB_V})
"""Of those, the ones whose backward passes come in halves at the peak of what ranks hold."""
HALVED = APART - {Schedule.ZB_V}
"""Of those, the ones whose ranks hold some micro-batches between the halves then."""


def held(choices: Choices, rank: int) -> float:
    """Micro-batches whose activations a rank holds at its peak, counted in all of its chunks."""
    ranks, count = choices.pipeline, choices.micro_batches
    if choices.schedule is Schedule.AUTOMATIC:
        return float(min(count, choices.settings.activation_limit or ranks)) if ranks > 1 else 1.0
    if choices.schedule in STALE:
        return float(ranks - rank)
    return in_flight(choices.schedule.value, ranks, count, choices.virtual_stages, rank)


def halfway(choices: Choices, rank: int) -> float:
    """Of `held`, micro-batches of which nothing is left but what gradients of weights need."""
    return halfway_of(choices.schedule.value, choices.pipeline, choices.micro_batches, rank)


def held_bytes(choices: Choices, rank: int, kept: float, left: float) -> float:
    """Bytes of a rank's micro-batches at their peak, of which each keeps `kept` until its backward pass and `left` from
    the first half of that to the second.
    """
    flight, half = held(choices, rank), halfway(choices, rank)
    if choices.pipeline > 1 and choices.schedule is Schedule.AUTOMATIC:
        # Where the search puts the second halves has no closed form.
        return flight * max(kept, left)
    # Recomputed stages may leave more than they kept: then the peak is behind a first half.
    behind = max(0.0, left - kept) if choices.pipeline > 1 and choices.schedule in APART else 0.0
    return (flight - half) * kept + half * left + behind


def losses(choices: Choices) -> float:
    """Micro-batches between their loss and its backward pass, at most: all of them where forward passes come first."""
    first = choices.pipeline > 1 and choices.schedule in (Schedule.GPIPE, Schedule.LOOPED_BFS)
    return float(choices.micro_batches) if first else 1.0


def waiting(choices: Choices, times: StageTimes) -> float:
    """Seconds of a step in which a rank of an evenly split pipeline waits."""
    ranks, schedule = choices.pipeline, choices.schedule
    if ranks == 1 or schedule in STALE:
        return 0.0
    if schedule is Schedule.AUTOMATIC:
        return automatic_bubble(ranks, choices.micro_batches, choices.settings.activation_limit or ranks, times)
    return bubble(schedule.value, ranks, choices.micro_batches, choices.virtual_stages, times)


def versions(choices: Choices, rank: int) -> float:
    """Versions of its weights that a rank keeps beside those that it updates: one for each micro-batch under way, or
    two (arXiv 2006.09503). The newest equals the weights until the next update.
    """
    if choices.pipeline == 1 or choices.schedule not in STALE:
        return 0.0
    return 2.0 if choices.schedule is Schedule.PIPEDREAM_2BW else float(choices.pipeline - rank)


def splits_backward(schedule: Schedule, ranks: int) -> bool:
    """Whether hooks on gradients miss a part of the backward pass, so that nothing is reduced before its end."""
    return ranks > 1 and (schedule in HALVES or schedule is Schedule.AUTOMATIC)
