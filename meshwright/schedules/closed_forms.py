"""Idle seconds of a pipeline of equal stages, by schedule. The simulator is the reference that the tests hold it to.

Sources: GPipe and 1F1B (p-1)(F+B) (PipeDream-Flush, arXiv 2006.09503); interleaved /v (arXiv 2104.04473, section 2.2);
looped breadth-first (arXiv 2211.05953); ZB-H1 and ZB-H2 (arXiv 2401.10241, section 2.3); ZB-V (arXiv 2405.15362);
DualPipe (arXiv 2412.19437, table 2), whose overlapped pair costs F+B here, and its folded form. Exact for all but ZB-V
and the two DualPipes, where they are exact for F = B = W and otherwise close. ZB-H2's and ZB-V's hold where ranks need
not meet at a step's end (arXiv 2401.10241, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch on one pipeline rank, all its chunks together."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward_input + self.backward_weight


def bubble(schedule: str, stages: int, micro_batches: int, chunks: int, times: StageTimes) -> float:
    """Seconds in which a rank of an evenly split pipeline waits, sends costing nothing.

    Args:
        schedule: a schedule's name, as in `meshwright.schedules.registry`.
        stages: pipeline ranks.
        micro_batches: of one step.
        chunks: model chunks of one rank.
        times: of all chunks of a rank together.

    Raises:
        ValueError: the schedule is not known.
    """
    if stages == 1:
        return 0.0
    forward, backward, weight = times.forward, times.backward_input, times.backward_weight
    stages_before = stages - 1
    if schedule == "naive":
        return stages_before * micro_batches * times.total
    if schedule in ("gpipe", "1f1b"):
        return stages_before * times.total
    if schedule in ("interleaved", "looped-bfs"):
        return stages_before * times.total / chunks
    if schedule == "zb-h1":
        return stages_before * max(forward + backward - weight, 0.0)
    if schedule == "zb-h2":
        return stages_before * max(forward + backward - 2 * weight, 0.0)
    if schedule == "zb-v":
        return stages_before * (max(forward, backward, weight) - weight)
    if schedule == "dualpipe":
        return max(stages / 2 - 1, 0.0) * max(forward + 2 * backward - weight, 0.0)
    if schedule == "dualpipe-v":
        return stages_before * max(forward + 2 * backward - weight, 0.0) / 2
    raise ValueError(f"no schedule is called `{schedule}`")


def automatic_bubble(stages: int, micro_batches: int, limit: int, times: StageTimes) -> float:
    """The same of the order that is searched under a limit (`schedules.automatic`), ranks meeting at a step's end.

    With room for as many micro-batches as there are stages it is ZB-H1's, and each further one puts one more gradient
    of weights into the wait; with less room a rank's micro-batches go to the last stage and back before others may
    start. The last stage always waits for the first forward passes. Within 5 % of a step of what the search finds from
    `stages` on, within 15 % below, where the search itself is no more than good.

    Args:
        stages: pipeline ranks, of equal work.
        micro_batches: of one step.
        limit: micro-batches whose activations a rank may hold.
        times: of a rank.
    """
    if stages == 1:
        return 0.0
    activation_room = min(limit, micro_batches)
    round_trip = times.forward + times.backward_input
    minimum = (stages - 1) * times.forward
    if activation_room >= stages:
        zb_h1_bubble = bubble("zb-h1", stages, micro_batches, 1, times)
        return max(minimum, zb_h1_bubble - (activation_room - stages) * times.backward_weight)
    fill_time = (activation_room - 1) * max(round_trip - times.backward_weight, 0.0)
    return max(minimum, micro_batches * (stages / activation_room - 1) * round_trip + fill_time)


def in_flight(schedule: str, stages: int, micro_batches: int, chunks: int, rank: int) -> float:
    """Micro-batches whose activations `rank` holds at its peak, counted in all of a rank's chunks.

    Raises:
        ValueError: the schedule is not known.
    """
    if schedule == "naive":
        return 1.0
    if schedule in ("gpipe", "looped-bfs"):
        return float(micro_batches)
    if schedule == "1f1b" or (schedule in ("interleaved", "zb-h1", "zb-h2") and stages == 1):
        return float(min(micro_batches, stages - rank))
    if schedule == "interleaved":
        warmup = 2 * (stages - rank - 1) + (chunks - 1) * stages + 1
        return min(float(micro_batches), warmup / chunks)
    if schedule == "zb-h1":
        return float(min(micro_batches, stages))
    if schedule == "zb-h2":
        return float(min(micro_batches, 2 * stages - 1))
    if schedule == "zb-v":
        return float(min(micro_batches, stages))
    if schedule == "dualpipe":
        return float(min(micro_batches, stages + 1))
    if schedule == "dualpipe-v":
        return min(float(micro_batches), stages + 0.5)
    raise ValueError(f"no schedule is called `{schedule}`")


def pending_weight_gradients(schedule: str, stages: int, micro_batches: int, rank: int) -> float:
    """Of `in_flight`, micro-batches whose backward pass has come halfway (arXiv 2401.10241, section 2.3): all that is
    left of them is what the gradients of weights need. Schedules whose peak has none of them are not asked about it.
    """
    extra = {"zb-h1": 1, "zb-h2": 2}.get(schedule, 0)
    if extra == 0 or stages == 1:
        return 0.0
    started = min(micro_batches, extra * (stages - rank - 1) + 1)
    return float(min(extra * rank, micro_batches - started))
