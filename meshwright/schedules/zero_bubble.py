"""Zero-bubble schedules: backward in halves, weights' gradients put where a rank would wait.

Handcrafted ZB-H1 and ZB-H2 (arXiv 2401.10241, section 2) and ZB-V (arXiv 2405.15362), whose second chunk runs back
over the ranks, so that the first rank holds the model's beginning and its end. ZB-V's bubble is exact for F = B = W and
otherwise close. ZB-H2's and ZB-V's hold where ranks need not meet at a step's end (arXiv 2401.10241, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from meshwright.api.parallelism import PipelineSchedule
from meshwright.schedules.actions import Action, ActionKind, Schedule, Slot, check_counts, one
from meshwright.schedules.schedule import PipelineScheduleKind, PipelineShape, StageTimes
from meshwright.schedules.simulator import UNIT_COSTS, ActionCosts


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B's memory, a third of its bubble: rank r keeps up to r weight gradients for the end."""
    return _handcrafted("zb-h1", ranks, micro_batches, extra=0)


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """Twice 1F1B's memory, no bubble: more forward passes before the first backward pass."""
    return _handcrafted("zb-h2", ranks, micro_batches, extra=1)


def _handcrafted(name: str, ranks: int, micro_batches: int, extra: int) -> Schedule:
    check_counts(ranks, micro_batches)
    rank_slots = []
    for rank in range(ranks):
        warmup = min(micro_batches, (1 + extra) * (ranks - rank - 1))
        deferred_weights = (1 + extra) * rank
        slots = [one(ActionKind.FORWARD, rank, m) for m in range(warmup)]
        weights_done = 0
        for m in range(micro_batches):
            if warmup + m < micro_batches:
                slots.append(one(ActionKind.FORWARD, rank, warmup + m))
            slots.append(one(ActionKind.INPUT, rank, m))
            if m - weights_done >= deferred_weights or warmup + m >= micro_batches:
                slots.append(one(ActionKind.WEIGHT, rank, weights_done))
                weights_done += 1
        slots += [one(ActionKind.WEIGHT, rank, m) for m in range(weights_done, micro_batches)]
        rank_slots.append(tuple(slots))
    return Schedule(name, ranks, micro_batches, tuple(rank_slots))


class _SlotBuilder:
    """Collects a rank's slots, numbering each chunk's micro-batches; those past the end are left out."""

    def __init__(self, micro_batches: int, stages: tuple[int, int]) -> None:
        self.slots: list[Slot] = []
        self.done = {(kind, chunk): 0 for kind in ActionKind for chunk in (0, 1)}
        self._micro_batches, self._stages = micro_batches, stages

    def add(self, kind: ActionKind, chunk: int) -> None:
        """The chunk's next action of this kind."""
        number = self.done[kind, chunk]
        self.done[kind, chunk] = number + 1
        if number < self._micro_batches:
            self.slots.append((Action(kind, self._stages[chunk], number),))


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """1F1B's memory, no bubble where F, B and W take equally long; twice the sends. Two chunks a rank."""
    check_counts(ranks, micro_batches)
    count = max(2 * ranks - 1, micro_batches)
    rank_slots = []
    for rank in range(ranks):
        builder = _SlotBuilder(micro_batches, (rank, 2 * ranks - 1 - rank))
        _v_filling(builder, ranks, rank)
        _v_steady(builder, count)
        _v_draining(builder, ranks, rank)
        rank_slots.append(tuple(builder.slots))
    return Schedule("zb-v", 2 * ranks, micro_batches, tuple(rank_slots))


def _v_filling(builder: _SlotBuilder, ranks: int, rank: int) -> None:
    for _ in range(2 * (ranks - rank) - 1):
        builder.add(ActionKind.FORWARD, 0)
    for _ in range(rank):
        builder.add(ActionKind.FORWARD, 1)
        builder.add(ActionKind.FORWARD, 0)
    for _ in range(ranks - rank):
        for kind in (ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT):
            builder.add(kind, 1)


def _v_steady(builder: _SlotBuilder, count: int) -> None:
    while (
        builder.done[ActionKind.FORWARD, 1] < builder.done[ActionKind.FORWARD, 0]
        or builder.done[ActionKind.FORWARD, 0] < count
    ):
        if builder.done[ActionKind.FORWARD, 0] < count:
            builder.add(ActionKind.FORWARD, 0)
        builder.add(ActionKind.INPUT, 0)
        builder.add(ActionKind.WEIGHT, 0)
        for kind in (ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT):
            builder.add(kind, 1)


def _v_draining(builder: _SlotBuilder, ranks: int, rank: int) -> None:
    for _ in range(rank):
        builder.add(ActionKind.INPUT, 0)
        builder.add(ActionKind.INPUT, 1)
    for _ in range(ranks - rank):
        builder.add(ActionKind.INPUT, 0)
        builder.add(ActionKind.WEIGHT, 0)
    for chunk in (1, 0):
        while builder.done[ActionKind.WEIGHT, chunk] < builder.done[ActionKind.INPUT, chunk]:
            builder.add(ActionKind.WEIGHT, chunk)


class _Handcrafted(PipelineScheduleKind):
    """What ZB-H1 and ZB-H2 have in common."""

    splits_backward = True
    splits_at_peak = True
    defers_weights_at_peak = True
    depth: ClassVar[int]
    """Weight gradients that a rank defers for each rank before it."""

    def generate(self, shape: PipelineShape, costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS) -> Schedule:
        """As `zb_h1` and `zb_h2`."""
        return _handcrafted(self.short_name, shape.ranks, shape.micro_batches, extra=self.depth - 1)

    def in_flight(self, shape: PipelineShape, rank: int) -> float:
        """As many as reach the last stage, `depth` times over."""
        return float(min(shape.micro_batches, self.depth * (shape.ranks - 1) + 1))

    def pending_weight_gradients(self, shape: PipelineShape, rank: int) -> float:
        """Those that the rank defers, of the micro-batches that there are."""
        if shape.ranks == 1:
            return 0.0
        started = min(shape.micro_batches, self.depth * (shape.ranks - rank - 1) + 1)
        return float(min(self.depth * rank, shape.micro_batches - started))

    def _bubble(self, shape: PipelineShape, times: StageTimes) -> float:
        waiting = times.forward + times.backward_input - self.depth * times.backward_weight
        return (shape.ranks - 1) * max(waiting, 0.0)


class ZeroBubbleH1(_Handcrafted):
    """ZB-H1: 1F1B's memory, a third of its bubble."""

    name = PipelineSchedule.ZB_H1
    short_name = "zb-h1"
    candidate_order = 2
    depth = 1


class ZeroBubbleH2(_Handcrafted):
    """ZB-H2: twice 1F1B's memory, no bubble."""

    name = PipelineSchedule.ZB_H2
    short_name = "zb-h2"
    candidate_order = 4
    depth = 2


class ZeroBubbleV(PipelineScheduleKind):
    """ZB-V: 1F1B's memory, no bubble where F, B and W take equally long."""

    name = PipelineSchedule.ZB_V
    short_name = "zb-v"
    v_shaped = True
    splits_backward = True
    splits_at_peak = True
    candidate_order = 3

    def generate(self, shape: PipelineShape, costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS) -> Schedule:
        """As `zb_v`."""
        return zb_v(shape.ranks, shape.micro_batches)

    def in_flight(self, shape: PipelineShape, rank: int) -> float:
        """1F1B's on its first rank."""
        return float(min(shape.micro_batches, shape.ranks))

    def _bubble(self, shape: PipelineShape, times: StageTimes) -> float:
        longest = max(times.forward, times.backward_input, times.backward_weight)
        return (shape.ranks - 1) * (longest - times.backward_weight)
