"""Schedules with whole backward passes: naive, GPipe, 1F1B, interleaved 1F1B, looped breadth-first.

Bubbles of GPipe and 1F1B are (p-1)(F+B) (PipeDream-Flush, arXiv 2006.09503), interleaved over v chunks a v-th of it
(arXiv 2104.04473, section 2.2), and so is looped breadth-first's (arXiv 2211.05953).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.api.parallelism import PipelineSchedule
from meshwright.schedules.actions import ActionKind, Schedule, Slot, check_counts, one
from meshwright.schedules.schedule import PipelineScheduleKind, PipelineShape, StageTimes
from meshwright.schedules.simulator import UNIT_COSTS, ActionCosts


def naive(ranks: int, micro_batches: int) -> Schedule:
    """One micro-batch at a time, forward and back: model parallelism without a pipeline, one rank working at a time."""
    check_counts(ranks, micro_batches)
    rank_slots = tuple(
        tuple(one(kind, rank, m) for m in range(micro_batches) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))
        for rank in range(ranks)
    )
    return Schedule("naive", ranks, micro_batches, rank_slots)


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes (arXiv 1811.06965)."""
    check_counts(ranks, micro_batches)
    rank_slots = tuple(
        tuple(one(kind, rank, m) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for m in range(micro_batches))
        for rank in range(ranks)
    )
    return Schedule("gpipe", ranks, micro_batches, rank_slots)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """As few forward passes as reach the last stage, then one backward for one forward (arXiv 2006.09503)."""
    check_counts(ranks, micro_batches)
    rank_slots = []
    for rank in range(ranks):
        warmup = min(ranks - rank - 1, micro_batches)
        slots = [one(ActionKind.FORWARD, rank, m) for m in range(warmup)]
        for m in range(micro_batches - warmup):
            slots += [one(ActionKind.FORWARD, rank, warmup + m), one(ActionKind.BACKWARD, rank, m)]
        slots += [one(ActionKind.BACKWARD, rank, m) for m in range(micro_batches - warmup, micro_batches)]
        rank_slots.append(tuple(slots))
    return Schedule("1f1b", ranks, micro_batches, tuple(rank_slots))


def interleaved(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B over `chunks` stages a rank, `ranks` micro-batches at a time (arXiv 2104.04473, section 2.2).

    Raises:
        ValueError: `micro_batches` is no multiple of `ranks`.
    """
    check_counts(ranks, micro_batches)
    if micro_batches % ranks:
        raise ValueError(
            f"the interleaved schedule needs a multiple of {ranks} micro-batches, one round of its ranks, "
            f"not {micro_batches}"
        )
    total = micro_batches * chunks
    rank_slots = []
    for rank in range(ranks):
        warmup = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
        slots: list[Slot] = [_forward(rank, ranks, chunks, k) for k in range(warmup)]
        for k in range(total - warmup):
            slots += [_forward(rank, ranks, chunks, warmup + k), _backward(rank, ranks, chunks, k)]
        slots += [_backward(rank, ranks, chunks, k) for k in range(total - warmup, total)]
        rank_slots.append(tuple(slots))
    return Schedule("interleaved", ranks * chunks, micro_batches, tuple(rank_slots))


def _forward(rank: int, ranks: int, chunks: int, k: int) -> Slot:
    """The k-th forward pass: `ranks` micro-batches through one chunk, then through the next."""
    round_, within = divmod(k, ranks * chunks)
    chunk, offset = divmod(within, ranks)
    return one(ActionKind.FORWARD, chunk * ranks + rank, round_ * ranks + offset)


def _backward(rank: int, ranks: int, chunks: int, k: int) -> Slot:
    round_, within = divmod(k, ranks * chunks)
    chunk, offset = divmod(within, ranks)
    return one(ActionKind.BACKWARD, (chunks - 1 - chunk) * ranks + rank, round_ * ranks + offset)


def looped_bfs(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Every micro-batch through one chunk before the next chunk begins (arXiv 2211.05953)."""
    check_counts(ranks, micro_batches)
    rank_slots = []
    for rank in range(ranks):
        stages = [chunk * ranks + rank for chunk in range(chunks)]
        slots = [one(ActionKind.FORWARD, stage, m) for stage in stages for m in range(micro_batches)]
        slots += [one(ActionKind.BACKWARD, stage, m) for stage in reversed(stages) for m in range(micro_batches)]
        rank_slots.append(tuple(slots))
    return Schedule("looped-bfs", ranks * chunks, micro_batches, tuple(rank_slots))


class Naive(PipelineScheduleKind):
    """One micro-batch at a time."""

    name = PipelineSchedule.NAIVE
    short_name = "naive"
    micro_batches_per_rank = 0
    searched = False

    def generate(self, shape: PipelineShape, costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS) -> Schedule:
        """As `naive`."""
        return naive(shape.ranks, shape.micro_batches)

    def in_flight(self, shape: PipelineShape, rank: int) -> float:
        """One."""
        return 1.0

    def _bubble(self, shape: PipelineShape, times: StageTimes) -> float:
        return (shape.ranks - 1) * shape.micro_batches * times.total


class GPipe(PipelineScheduleKind):
    """All forward passes, then all backward passes."""

    name = PipelineSchedule.GPIPE
    short_name = "gpipe"
    forwards_first = True

    def generate(self, shape: PipelineShape, costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS) -> Schedule:
        """As `gpipe`."""
        return gpipe(shape.ranks, shape.micro_batches)

    def in_flight(self, shape: PipelineShape, rank: int) -> float:
        """All of them."""
        return float(shape.micro_batches)

    def _bubble(self, shape: PipelineShape, times: StageTimes) -> float:
        return (shape.ranks - 1) * times.total


class OneForwardOneBackward(PipelineScheduleKind):
    """1F1B: what a pipeline runs that names no schedule."""

    name = PipelineSchedule.ONE_F_ONE_B
    short_name = "1f1b"
    candidate_order = 0

    def generate(self, shape: PipelineShape, costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS) -> Schedule:
        """As `one_f_one_b`."""
        return one_f_one_b(shape.ranks, shape.micro_batches)

    def in_flight(self, shape: PipelineShape, rank: int) -> float:
        """As many as reach the last stage."""
        return float(min(shape.micro_batches, shape.ranks - rank))

    def _bubble(self, shape: PipelineShape, times: StageTimes) -> float:
        return (shape.ranks - 1) * times.total


class Interleaved(PipelineScheduleKind):
    """1F1B over several stages a rank."""

    name = PipelineSchedule.INTERLEAVED
    short_name = "interleaved"
    virtual_stages = True
    whole_rounds = True
    candidate_order = 1

    def generate(self, shape: PipelineShape, costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS) -> Schedule:
        """As `interleaved`."""
        return interleaved(shape.ranks, shape.micro_batches, shape.chunks)

    def in_flight(self, shape: PipelineShape, rank: int) -> float:
        """Its warm-up and one more."""
        if shape.ranks == 1:
            return float(min(shape.micro_batches, 1))
        warmup = 2 * (shape.ranks - rank - 1) + (shape.chunks - 1) * shape.ranks + 1
        return min(float(shape.micro_batches), warmup / shape.chunks)

    def _bubble(self, shape: PipelineShape, times: StageTimes) -> float:
        return (shape.ranks - 1) * times.total / shape.chunks


class LoopedBreadthFirst(PipelineScheduleKind):
    """Every micro-batch through one chunk before the next chunk begins."""

    name = PipelineSchedule.LOOPED_BFS
    short_name = "looped-bfs"
    virtual_stages = True
    forwards_first = True

    def generate(self, shape: PipelineShape, costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS) -> Schedule:
        """As `looped_bfs`."""
        return looped_bfs(shape.ranks, shape.micro_batches, shape.chunks)

    def in_flight(self, shape: PipelineShape, rank: int) -> float:
        """All of them."""
        return float(shape.micro_batches)

    def _bubble(self, shape: PipelineShape, times: StageTimes) -> float:
        return (shape.ranks - 1) * times.total / shape.chunks
