"""What a pipeline's schedule does to a rank: micro-batches that it holds, seconds that it waits, copies of its weights.

Forms are those of `meshwright.schedules`, also for an automatic schedule: searching one for each layout would take
longer than all of the plan. The asynchronous ones never drain: nobody waits.
"""

from __future__ import annotations

from meshwright.planner.cost.strategy import ASYNCHRONOUS, Schedule, Strategy
from meshwright.schedules.closed_forms import StageTimes, automatic_bubble, bubble, in_flight
from meshwright.schedules.closed_forms import pending_weight_gradients as closed_form_pending_weight_gradients

SPLIT_BACKWARD = frozenset({Schedule.ZB_H1, Schedule.ZB_H2, Schedule.ZB_V, Schedule.DUAL_PIPE, Schedule.DUAL_PIPE_V})
"""Schedules whose backward pass comes in two halves, at least for some micro-batches."""
SPLIT_AT_PEAK = frozenset({Schedule.ZB_H1, Schedule.ZB_H2, Schedule.ZB_V})
"""Of those, the ones whose backward passes come in halves at the peak of what ranks hold."""
PENDING_AT_PEAK = SPLIT_AT_PEAK - {Schedule.ZB_V}
"""Of those, the ones whose ranks hold some micro-batches between the halves then."""


def micro_batches_in_flight(choices: Strategy, rank: int) -> float:
    """Micro-batches whose activations a rank holds at its peak, counted in all of its chunks."""
    ranks, count = choices.pipeline, choices.micro_batches
    if choices.schedule is Schedule.AUTOMATIC:
        return float(min(count, choices.settings.activation_limit or ranks)) if ranks > 1 else 1.0
    if choices.schedule in ASYNCHRONOUS:
        return float(ranks - rank)
    return in_flight(choices.schedule.value, ranks, count, choices.virtual_stages, rank)


def pending_weight_gradients(choices: Strategy, rank: int) -> float:
    """Of `micro_batches_in_flight`, micro-batches of which nothing is left but what gradients of weights need."""
    return closed_form_pending_weight_gradients(choices.schedule.value, choices.pipeline, choices.micro_batches, rank)


def in_flight_bytes(choices: Strategy, rank: int, saved: float, weight_half: float) -> float:
    """Bytes of a rank's micro-batches at their peak, of which each keeps `saved` until its backward pass and
    `weight_half` from
    the first half of that to the second.
    """
    in_flight_count, pending_count = micro_batches_in_flight(choices, rank), pending_weight_gradients(choices, rank)
    if choices.pipeline > 1 and choices.schedule is Schedule.AUTOMATIC:
        # Where the search puts the second halves has no closed form.
        return in_flight_count * max(saved, weight_half)
    # Recomputed stages may leave more than they kept: then the peak is behind a first half.
    after_input_half = (
        max(0.0, weight_half - saved) if choices.pipeline > 1 and choices.schedule in SPLIT_AT_PEAK else 0.0
    )
    return (in_flight_count - pending_count) * saved + pending_count * weight_half + after_input_half


def pending_losses(choices: Strategy) -> float:
    """Micro-batches between their loss and its backward pass, at most: all of them where forward passes come first."""
    forward_first = choices.pipeline > 1 and choices.schedule in (Schedule.GPIPE, Schedule.LOOPED_BFS)
    return float(choices.micro_batches) if forward_first else 1.0


def bubble_seconds(choices: Strategy, times: StageTimes) -> float:
    """Seconds of a step in which a rank of an evenly split pipeline waits."""
    ranks, schedule = choices.pipeline, choices.schedule
    if ranks == 1 or schedule in ASYNCHRONOUS:
        return 0.0
    if schedule is Schedule.AUTOMATIC:
        return automatic_bubble(ranks, choices.micro_batches, choices.settings.activation_limit or ranks, times)
    return bubble(schedule.value, ranks, choices.micro_batches, choices.virtual_stages, times)


def extra_weight_versions(choices: Strategy, rank: int) -> float:
    """Versions of its weights that a rank keeps beside those that it updates: one for each micro-batch under way, or
    two (arXiv 2006.09503). The newest equals the weights until the next update.
    """
    if choices.pipeline == 1 or choices.schedule not in ASYNCHRONOUS:
        return 0.0
    return 2.0 if choices.schedule is Schedule.PIPEDREAM_2BW else float(choices.pipeline - rank)


def splits_backward(schedule: Schedule, ranks: int) -> bool:
    """Whether hooks on gradients miss a part of the backward pass, so that nothing is reduced before its end."""
    return ranks > 1 and (schedule in SPLIT_BACKWARD or schedule is Schedule.AUTOMATIC)
