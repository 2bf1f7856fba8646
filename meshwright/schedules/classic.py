"""Schedules with whole backward passes: naive, GPipe, 1F1B, interleaved 1F1B, looped breadth-first."""

from __future__ import annotations

from meshwright.schedules.actions import ActionKind, Schedule, Slot, check_counts, one


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
