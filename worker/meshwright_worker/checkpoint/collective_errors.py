"""Runs an action on the checkpoints' volume on all ranks: an error on one rank is raised on all, so no rank is left
waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright_worker.checkpoint.errors import CheckpointError, CheckpointVolumeError, ForeignCheckpointError
from meshwright_worker.distributed.mesh import Mesh

Result = TypeVar("Result")

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


def on_first_rank(action: Callable[[], Result], mesh: Mesh) -> Result | None:
    """Run `action` only on rank 0, and return its result on every rank. Otherwise as `on_all_ranks`."""
    return on_all_ranks(lambda: action() if mesh.rank == 0 else None, mesh)[0]
