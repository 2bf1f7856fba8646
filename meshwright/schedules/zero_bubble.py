"""Zero-bubble schedules: backward in halves, weights' gradients put where a rank would wait.

Handcrafted ZB-H1 and ZB-H2 (arXiv 2401.10241, section 2) and ZB-V (arXiv 2405.15362), whose second chunk runs back
over the ranks, so that the first rank holds the model's beginning and its end.
"""

from __future__ import annotations

from meshwright.schedules.actions import Action, Kind, Schedule, Slot, check_counts, one


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B's memory, a third of its bubble: rank r keeps up to r weight gradients for the end."""
    return _handcrafted("zb-h1", ranks, micro_batches, extra=0)


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """Twice 1F1B's memory, no bubble: more forward passes before the first backward pass."""
    return _handcrafted("zb-h2", ranks, micro_batches, extra=1)


def _handcrafted(name: str, ranks: int, micro_batches: int, extra: int) -> Schedule:
    check_counts(ranks, micro_batches)
    every = []
    for rank in range(ranks):
        warm = min(micro_batches, (1 + extra) * (ranks - rank - 1))
        held = (1 + extra) * rank
        slots = [one(Kind.FORWARD, rank, m) for m in range(warm)]
        weights = 0
        for m in range(micro_batches):
            if warm + m < micro_batches:
                slots.append(one(Kind.FORWARD, rank, warm + m))
            slots.append(one(Kind.INPUT, rank, m))
            if m - weights >= held or warm + m >= micro_batches:
                slots.append(one(Kind.WEIGHT, rank, weights))
                weights += 1
        slots += [one(Kind.WEIGHT, rank, m) for m in range(weights, micro_batches)]
        every.append(tuple(slots))
    return Schedule(name, ranks, micro_batches, tuple(every))


class _Order:
    """Collects a rank's slots, numbering each chunk's micro-batches; those past the end are left out."""

    def __init__(self, micro_batches: int, stages: tuple[int, int]) -> None:
        self.slots: list[Slot] = []
        self.done = {(kind, chunk): 0 for kind in Kind for chunk in (0, 1)}
        self._micro_batches, self._stages = micro_batches, stages

    def add(self, kind: Kind, chunk: int) -> None:
        """The chunk's next action of this kind."""
        number = self.done[kind, chunk]
        self.done[kind, chunk] = number + 1
        if number < self._micro_batches:
            self.slots.append((Action(kind, self._stages[chunk], number),))


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """1F1B's memory, no bubble where F, B and W take equally long; twice the sends. Two chunks a rank."""
    check_counts(ranks, micro_batches)
    count = max(2 * ranks - 1, micro_batches)
    every = []
    for rank in range(ranks):
        order = _Order(micro_batches, (rank, 2 * ranks - 1 - rank))
        _v_filling(order, ranks, rank)
        _v_steady(order, count)
        _v_draining(order, ranks, rank)
        every.append(tuple(order.slots))
    return Schedule("zb-v", 2 * ranks, micro_batches, tuple(every))


def _v_filling(order: _Order, ranks: int, rank: int) -> None:
    for _ in range(2 * (ranks - rank) - 1):
        order.add(Kind.FORWARD, 0)
    for _ in range(rank):
        order.add(Kind.FORWARD, 1)
        order.add(Kind.FORWARD, 0)
    for _ in range(ranks - rank):
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT):
            order.add(kind, 1)


def _v_steady(order: _Order, count: int) -> None:
    while order.done[Kind.FORWARD, 1] < order.done[Kind.FORWARD, 0] or order.done[Kind.FORWARD, 0] < count:
        if order.done[Kind.FORWARD, 0] < count:
            order.add(Kind.FORWARD, 0)
        order.add(Kind.INPUT, 0)
        order.add(Kind.WEIGHT, 0)
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT):
            order.add(kind, 1)


def _v_draining(order: _Order, ranks: int, rank: int) -> None:
    for _ in range(rank):
        order.add(Kind.INPUT, 0)
        order.add(Kind.INPUT, 1)
    for _ in range(ranks - rank):
        order.add(Kind.INPUT, 0)
        order.add(Kind.WEIGHT, 0)
    for chunk in (1, 0):
        while order.done[Kind.WEIGHT, chunk] < order.done[Kind.INPUT, chunk]:
            order.add(Kind.WEIGHT, chunk)
