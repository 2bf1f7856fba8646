"""Zero-bubble schedules: backward in halves, weights' gradients put where a rank would wait.

Handcrafted ZB-H1 and ZB-H2 (arXiv 2401.10241, section 2) and ZB-V (arXiv 2405.15362), whose second chunk runs back
over the ranks, so that the first rank holds the model's beginning and its end.
"""

from __future__ import annotations

from meshwright.schedules.actions import Action, ActionKind, Schedule, Slot, check_counts, one


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
