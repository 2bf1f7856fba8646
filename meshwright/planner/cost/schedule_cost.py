"""Effects of a pipeline schedule on a rank: micro-batches in flight, seconds of waiting, versions of its weights.

The formulas are those of `meshwright.schedules`, also for an automatic schedule: to generate one for each layout would
take longer than the rest of the plan. Asynchronous schedules never drain, so no rank waits.
"""

from __future__ import annotations

from meshwright.planner.cost.strategy import Strategy
from meshwright.schedules.schedule import StageTimes


def micro_batches_in_flight(strategy: Strategy, rank: int) -> float:
    """Number of micro-batches whose activations a rank stores at its peak, over all of its chunks."""
    return strategy.schedule_kind.in_flight(strategy.pipeline_shape, rank)


def pending_weight_gradients(strategy: Strategy, rank: int) -> float:
    """The part of `micro_batches_in_flight` for which only the inputs of weight gradients are still stored."""
    return strategy.schedule_kind.pending_weight_gradients(strategy.pipeline_shape, rank)


def in_flight_bytes(strategy: Strategy, rank: int, saved: float, weight_half: float) -> float:
    """Bytes of a rank's micro-batches at their peak.

    Each micro-batch stores `saved` bytes until its backward pass, and `weight_half` bytes from the first half of that
    pass to the second.
    """
    in_flight_count, pending_count = micro_batches_in_flight(strategy, rank), pending_weight_gradients(strategy, rank)
    kind = strategy.schedule_kind
    if strategy.pipeline > 1 and kind.takes_activation_limit:
        # The search's positions of the second halves have no closed form.
        return in_flight_count * max(saved, weight_half)
    # Recomputed stages may store more after the first half than before it. The peak is then after a first half.
    after_input_half = max(0.0, weight_half - saved) if strategy.pipeline > 1 and kind.splits_at_peak else 0.0
    return (in_flight_count - pending_count) * saved + pending_count * weight_half + after_input_half


def pending_losses(strategy: Strategy) -> float:
    """Largest number of micro-batches between their loss and its backward pass: all if forward passes come first."""
    forwards_first = strategy.pipeline > 1 and strategy.schedule_kind.forwards_first
    return float(strategy.micro_batches) if forwards_first else 1.0


def bubble_seconds(strategy: Strategy, times: StageTimes) -> float:
    """Seconds of a step in which a rank of an evenly split pipeline waits."""
    return strategy.schedule_kind.bubble(strategy.pipeline_shape, times)


def paired_passes(strategy: Strategy) -> float:
    """Fraction of the forward passes that overlap a backward pass."""
    return 0.0 if strategy.pipeline == 1 else strategy.schedule_kind.paired(strategy.pipeline_shape)


def extra_weight_versions(strategy: Strategy, rank: int) -> float:
    """Number of versions of its weights that a rank stores in addition to those that it updates.

    One for each micro-batch in flight, or two (arXiv 2006.09503). The newest equals the weights until the next update.
    """
    return 0.0 if strategy.pipeline == 1 else strategy.schedule_kind.extra_weight_versions(strategy.pipeline, rank)
