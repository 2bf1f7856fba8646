"""What a pipeline's schedule does to a rank: micro-batches that it holds, seconds that it waits, copies of its weights.

Forms are those of `meshwright.schedules`, also for an automatic schedule: searching one for each layout would take
longer than all of the plan. The asynchronous ones never drain: nobody waits.
"""

from __future__ import annotations

from meshwright.planner.cost.strategy import Strategy
from meshwright.schedules.schedule import StageTimes


def micro_batches_in_flight(choices: Strategy, rank: int) -> float:
    """Micro-batches whose activations a rank holds at its peak, counted in all of its chunks."""
    return choices.schedule_kind.in_flight(choices.pipeline_shape, rank)


def pending_weight_gradients(choices: Strategy, rank: int) -> float:
    """Of `micro_batches_in_flight`, micro-batches of which nothing is left but what gradients of weights need."""
    return choices.schedule_kind.pending_weight_gradients(choices.pipeline_shape, rank)


def in_flight_bytes(choices: Strategy, rank: int, saved: float, weight_half: float) -> float:
    """Bytes of a rank's micro-batches at their peak, of which each keeps `saved` until its backward pass and
    `weight_half` from
    the first half of that to the second.
    """
    in_flight_count, pending_count = micro_batches_in_flight(choices, rank), pending_weight_gradients(choices, rank)
    kind = choices.schedule_kind
    if choices.pipeline > 1 and kind.takes_activation_limit:
        # Where the search puts the second halves has no closed form.
        return in_flight_count * max(saved, weight_half)
    # Recomputed stages may leave more than they kept: then the peak is behind a first half.
    after_input_half = max(0.0, weight_half - saved) if choices.pipeline > 1 and kind.splits_at_peak else 0.0
    return (in_flight_count - pending_count) * saved + pending_count * weight_half + after_input_half


def pending_losses(choices: Strategy) -> float:
    """Micro-batches between their loss and its backward pass, at most: all of them where forward passes come first."""
    forwards_first = choices.pipeline > 1 and choices.schedule_kind.forwards_first
    return float(choices.micro_batches) if forwards_first else 1.0


def bubble_seconds(choices: Strategy, times: StageTimes) -> float:
    """Seconds of a step in which a rank of an evenly split pipeline waits."""
    return choices.schedule_kind.bubble(choices.pipeline_shape, times)


def extra_weight_versions(choices: Strategy, rank: int) -> float:
    """Versions of its weights that a rank keeps beside those that it updates: one for each micro-batch under way, or
    two (arXiv 2006.09503). The newest equals the weights until the next update.
    """
    return 0.0 if choices.pipeline == 1 else choices.schedule_kind.extra_weight_versions(choices.pipeline, rank)
