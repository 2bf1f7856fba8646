"""Meshes that a rank keeps from one case to the next: torch learns anew for every mesh how its tensors are sharded.

The pool decides when ranks may keep them, by giving tasks the same port again; see `RankPool.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from meshwright.api.parallelism import ContextMethod
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.distributed.mesh import Mesh, build_mesh, join_process_group
from meshwright_worker.rank.task import RankTask


class _Kept:
    """What this rank is connected to."""

    def __init__(self) -> None:
        self.port: int | None = None
        self.device = torch.device("cpu")
        self.meshes: dict[Hashable, Mesh] = {}
        self.open = ExitStack()


_kept = _Kept()


def uses_kept_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark what a rank runs as using `kept_mesh`, and no other way to form groups."""
    function.keeps_meshes = True  # type: ignore[attr-defined]
    return function


def keeps_meshes(function: Callable[..., Any]) -> bool:
    """Whether the function has that mark."""
    return getattr(function, "keeps_meshes", False)


def can_be_kept(run: NativeRun) -> bool:
    """Whether a run forms few groups beside the mesh: islands do, FSDP for `reshardSize`, and rings of rings."""
    apart = run.islands > 1 or run.parallelism.data_parallel.reshard_size is not None
    return not apart and run.parallelism.context_method is not ContextMethod.RING_ULYSSES


@contextmanager
def kept_mesh(task: RankTask) -> Iterator[Mesh]:
    """The mesh of a task as `joined` gives it, kept after the block for tasks with the same port."""
    if _kept.port != task.master_port:
        leave()
        _kept.device = _kept.open.enter_context(join_process_group(task))
        _kept.port = task.master_port
    key = (task.run.layout, task.run.islands, task.run.parallelism.data_parallel.shard_size)
    if key not in _kept.meshes:
        _kept.meshes[key] = build_mesh(task, _kept.device)
    yield _kept.meshes[key]


def leave() -> None:
    """Destroy what is kept."""
    _kept.meshes.clear()
    _kept.port = None
    _kept.open.close()
    forget_sharding()


def forget_sharding() -> None:
    """Empty torch's memory of how operators shard."""
    # DTensor takes two meshes of the same ranks for one, and would use the groups of the one that is gone.
    _clear_sharding_prop_cache()
