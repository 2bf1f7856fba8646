"""Which complete checkpoints of a store are removed after a save. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from meshwright.api.checkpoint import Retention
from meshwright_worker.checkpoint.ranking import ranked


def removable(
    steps: Iterable[int],
    retention: Retention,
    now: float,
    saved_at: Callable[[int], float | None],
    evaluation_loss: Callable[[int], float | None],
) -> list[int]:
    """The steps of checkpoints that nothing retains, newest first.

    Args:
        steps: Those of all complete checkpoints.
        retention: What is retained.
        now: Seconds since 1970.
        saved_at: When a step's checkpoint was saved. None if that is not known: it then has no age.
        evaluation_loss: That of a step's checkpoint. None if it has none. Called only if the best are retained.
    """
    ordered = sorted(steps, reverse=True)
    forever = first_of_each(ordered, retention.every_steps) if retention.every_steps is not None else set()
    older = [step for step in ordered[retention.newest :] if step not in forever]
    if retention.best is not None and older:
        best = ranked({step: evaluation_loss(step) for step in ordered})[: retention.best]
        older = [step for step in older if step not in best]
    if retention.seconds is None:
        return older
    return [step for step in older if not _is_younger(saved_at(step), now - retention.seconds)]


def first_of_each(steps: Iterable[int], every: int) -> set[int]:
    """The first of the steps at or after each multiple of `every`, other than 0. Later steps change none of them."""
    first: dict[int, int] = {}
    for step in sorted(steps):
        first.setdefault(step // every, step)
    return {step for multiple, step in first.items() if multiple}


def _is_younger(saved_at: float | None, limit: float) -> bool:
    return saved_at is not None and saved_at > limit
