"""What ranks do about the checkpoints' volume, so that a failure of one is an error of all: no rank is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright_worker.checkpoint.errors import CheckpointError, CheckpointVolumeError, ForeignCheckpointError
from meshwright_worker.distributed.mesh import Mesh

Result = TypeVar("Result")

_MAX_NAMED = 3
"""Failures that a message quotes at most: a volume can fail on a thousand ranks."""


def on_all_ranks(action: Callable[[], Result], mesh: Mesh) -> list[Result]:
    """What `action` gives on every rank, in rank order. Collective, and over on no rank before it is on all.

    Raises:
        CheckpointVolumeError: it raised an OSError on some rank; raised on every rank, with that rank's message.
        CheckpointError, ForeignCheckpointError: likewise.
    """
    failure: tuple[type[Exception], str] | None = None
    result: Result | None = None
    try:
        result = action()
    except OSError as error:
        failure = (CheckpointVolumeError, f"rank {mesh.rank} cannot use the checkpoints' volume: {error}")
    except (CheckpointError, ForeignCheckpointError) as error:
        failure = (type(error), str(error))
    gathered: list[Any] = [None] * mesh.layout.world_size
    dist.all_gather_object(gathered, (result, failure), group=mesh.checkpoint_group)
    failures = [failure for _, failure in gathered if failure is not None]
    if failures:
        texts = list(dict.fromkeys(text for _, text in failures))
        more = [f"and {len(texts) - _MAX_NAMED} more"] if len(texts) > _MAX_NAMED else []
        raise failures[0][0]("; ".join(texts[:_MAX_NAMED] + more))
    return [result for result, _ in gathered]


def on_first_rank(action: Callable[[], Result], mesh: Mesh) -> Result | None:
    """What `action` gives on rank 0, which alone takes it. Otherwise as `on_all_ranks`."""
    return on_all_ranks(lambda: action() if mesh.rank == 0 else None, mesh)[0]
