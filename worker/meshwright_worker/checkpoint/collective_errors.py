"""Runs an action on all ranks, and on rank 0 what needs their results. An error on one rank is raised on all.

So no rank is left waiting.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright_worker.checkpoint_errors import (
    CheckpointError,
    CheckpointVolumeError,
    FailedSaveError,
    ForeignCheckpointError,
)
from meshwright_worker.distributed.mesh import Mesh

Result = TypeVar("Result")
Answer = TypeVar("Answer")

_MAX_NAMED = 3
"""Maximum number of failures in a message: a volume can fail on a thousand ranks."""


def on_all_ranks(action: Callable[[], Result], mesh: Mesh) -> list[Result]:
    """Return the results of `action` on every rank, in rank order. Collective: no rank returns before all have
    finished.

    Raises:
        CheckpointVolumeError: it raised an OSError on some rank; raised on every rank, with that rank's message.
        CheckpointError, ForeignCheckpointError: it raised this on some rank; raised on every rank.
    """
    failure: tuple[type[Exception], str, int | None] | None = None
    result: Result | None = None
    try:
        result = action()
    except OSError as error:
        failure = (CheckpointVolumeError, f"rank {mesh.rank} cannot use the checkpoints' volume: {error}", error.errno)
    except (CheckpointError, ForeignCheckpointError) as error:
        failure = (type(error), str(error), None)
    gathered: list[Any] = [None] * mesh.layout.world_size
    dist.all_gather_object(gathered, (result, failure), group=mesh.checkpoint_group)
    failures = [failure for _, failure in gathered if failure is not None]
    if failures:
        texts = list(dict.fromkeys(text for _, text, _ in failures))
        more = [f"and {len(texts) - _MAX_NAMED} more"] if len(texts) > _MAX_NAMED else []
        raised, _, number = failures[0]
        summary = raised("; ".join(texts[:_MAX_NAMED] + more))
        if isinstance(summary, OSError):
            summary.errno = number
        raise summary
    return [result for result, _ in gathered]


def collected(action: Callable[[], Result], then: Callable[[list[Result]], Sequence[Answer]], mesh: Mesh) -> Answer:
    """Run `action` on every rank, and `then` on rank 0 with the results in rank order; returns the rank's answer.
    Collective.

    Raises:
        FailedSaveError: either raised on some rank; raised on every rank, with the errors.
    """
    first, world = mesh.rank == 0, mesh.layout.world_size
    gathered: list[Any] | None = [None] * world if first else None
    dist.gather_object(_attempt(action), gathered, group=mesh.checkpoint_group, group_dst=0)
    answers: list[Any] | None = None
    if gathered is not None:
        failures = {rank: error for rank, (_, error) in enumerate(gathered) if error is not None}
        if not failures:
            done, error = _attempt(lambda: then([result for result, _ in gathered]))
            if error is None:
                answers = [(answer, None) for answer in done]
            else:
                failures = {0: error}
        answers = answers or [(None, failures)] * world
    received: list[Any] = [None]
    dist.scatter_object_list(received, answers, group=mesh.checkpoint_group, group_src=0)
    answer, failed = received[0]
    if failed is not None:
        raise FailedSaveError(failed)
    return answer  # type: ignore[no-any-return]


def _attempt(action: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return action(), None
    except BaseException as error:
        try:
            pickle.dumps(error)
        except Exception:
            return None, RuntimeError(f"{type(error).__name__}: {error}")
        return None, error


def on_first_rank(action: Callable[[], Result], mesh: Mesh) -> Result | None:
    """Run `action` only on rank 0, and return its result on every rank. Otherwise as `on_all_ranks`."""
    return on_all_ranks(lambda: action() if mesh.rank == 0 else None, mesh)[0]
