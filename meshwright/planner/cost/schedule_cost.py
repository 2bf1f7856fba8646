"""Effects of a pipeline schedule on a rank: micro-batches in flight, seconds of waiting, versions of its weights.

The formulas are those of `meshwright.schedules`, also for an automatic schedule: to generate one for each layout would
take longer than the rest of the plan. Asynchronous schedules never drain, so no rank waits.
"""

from __future__ import annotations

from meshwright.planner.cost.strategy import Strategy
from meshwright.schedules.schedule import StageTimes


def micro_batches_in_flight(choices: Strategy, rank: int) -> float:
    """Number of micro-batches whose activations a rank stores at its peak, over all of its chunks."""
    return choices.schedule_kind.in_flight(choices.pipeline_shape, rank)


def pending_weight_gradients(choices: Strategy, rank: int) -> float:
    """The part of `micro_batches_in_flight` for which only the inputs of weight gradients are still stored."""
    return choices.schedule_kind.pending_weight_gradients(choices.pipeline_shape, rank)


def in_flight_bytes(choices: Strategy, rank: int, saved: float, weight_half: float) -> float:
    """Bytes of a rank's micro-batches at their peak.

    Each micro-batch stores `saved` bytes until its backward pass, and `weight_half` bytes from the first half of that
    pass to the second.
    """
    in_flight_count, pending_count = micro_batches_in_flight(choices, rank), pending_weight_gradients(choices, rank)
    kind = choices.schedule_kind
    if choices.pipeline > 1 and kind.takes_activation_limit:
        # The search's positions of the second halves have no closed form.
        return in_flight_count * max(saved, weight_half)
    # Recomputed stages may store more after the first half than before it. The peak is then after a first half.
    after_input_half = max(0.0, weight_half - saved) if choices.pipeline > 1 and kind.splits_at_peak else 0.0
    return (in_flight_count - pending_count) * saved + pending_count * weight_half + after_input_half


def pending_losses(choices: Strategy) -> float:
    """Largest number of micro-batches between their loss and its backward pass: all if forward passes come first."""
    forwards_first = choices.pipeline > 1 and choices.schedule_kind.forwards_first
    return float(choices.micro_batches) if forwards_first else 1.0


def bubble_seconds(choices: Strategy, times: StageTimes) -> float:
    """Seconds of a step in which a rank of an evenly split pipeline waits."""
    return choices.schedule_kind.bubble(choices.pipeline_shape, times)


def extra_weight_versions(choices: Strategy, rank: int) -> float:
    """Number of versions of its weights that a rank stores in addition to those that it updates.

    One for each micro-batch in flight, or two (arXiv 2006.09503). The newest equals the weights until the next update.
    """
    return 0.0 if choices.pipeline == 1 else choices.schedule_kind.extra_weight_versions(choices.pipeline, rank)
