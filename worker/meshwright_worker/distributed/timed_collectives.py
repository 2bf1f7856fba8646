"""Times the collectives of a rank by dimension of the mesh, also those that torch's FSDP issues.

While `timed_collectives` is active, the functions of `torch.distributed` are replaced by functions that time how long
the caller waits: for a blocking collective its call, for an asynchronous one `Work.wait`. Point-to-point transfers have
no dimension of their own in torch's functions: `wait_for` times them where they are awaited.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright_worker.distributed.mesh import (
    CONTEXT,
    DATA,
    EXPERT,
    EXPERT_REPLICA,
    ISLAND,
    PIPELINE,
    REPLICA,
    SHARD,
    SHARD_REPLICA,
    TENSOR,
    Mesh,
)
from meshwright_worker.distributed.step_clock import StepClock, is_beside_steps, running_clock

JOB = "job"
"""All ranks together: the result of a step."""
DIMENSIONS = (TENSOR, PIPELINE, CONTEXT, EXPERT, DATA, JOB)

_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all_single",
    "broadcast",
    "send",
    "recv",
)


class GroupDimensions:
    """The dimension of each process group of a mesh. Groups that other code creates are known by their ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self.known: dict[dist.ProcessGroup | None, str | None] = {mesh.checkpoint_group: None}
        """The dimensions of the groups that were looked up."""
        self._by_ranks: dict[tuple[int, ...], str] = {}
        layout = mesh.layout
        names = [(TENSOR, TENSOR), (PIPELINE, PIPELINE), (CONTEXT, CONTEXT)]
        names += [(EXPERT, EXPERT), (EXPERT_REPLICA, DATA)] if layout.expert > 1 else []
        names += [(DATA, DATA), (REPLICA, DATA), (SHARD, DATA)]
        names += [(SHARD_REPLICA, DATA)] if mesh.hsdp_mesh is not None else []
        names += [(ISLAND, DATA)] if mesh.islands is not None else []
        for name, dimension in names:
            self._add(mesh.group(name), dimension)
        self._add(mesh.island_group, JOB)
        self.known.setdefault(None, self.known.get(dist.group.WORLD, JOB))

    def _add(self, group: dist.ProcessGroup, dimension: str) -> None:
        self.known.setdefault(group, dimension)
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1:
            self._by_ranks.setdefault(ranks, dimension)

    def of(self, group: dist.ProcessGroup | None) -> str | None:
        """Return the dimension of a group; None for a group whose communication is not a step's."""
        try:
            return self.known[group]
        except KeyError:
            ranks = tuple(dist.get_process_group_ranks(group))
            found = self.known[group] = self._by_ranks.get(ranks)
            return found


class TimedWork(dist.Work):
    """An asynchronous collective, whose wait is timed."""

    def __init__(self, work: dist.Work, dimension: str, clock: StepClock) -> None:
        super().__init__()
        self._work, self._dimension, self._clock = work, dimension, clock

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """See torch's `Work.wait`."""
        clock = self._clock
        began = clock.mark()
        done = self._work.wait(timeout)
        clock.record((self._dimension, began, clock.mark()))
        return done

    def is_completed(self) -> bool:
        """See torch's `Work.is_completed`."""
        return self._work.is_completed()


@contextmanager
def timed_collectives(
    mesh: Mesh, dimensions: GroupDimensions | None = None, *, compiles: bool = False
) -> Iterator[StepClock]:
    """Time the collectives and phases of this process within the block, and yield the clock.

    `dimensions` are those of the mesh, if they are known from an earlier block. `compiles`: whether torch.compile
    may trace collectives.
    """
    dimensions = dimensions or GroupDimensions(mesh)
    # A block of a thread that was left behind inside a collective may still be open: it ends much later.
    originals = {name: _untimed(getattr(dist, name)) for name in _COLLECTIVES if hasattr(dist, name)}
    with running_clock(mesh.device, dimensions.of) as clock:
        timed = {}
        for name, original in originals.items():
            call = _timed(original, dimensions, clock)
            timed[name] = _unless_compiling(call, original) if compiles else call
            timed[name].untimed = original  # type: ignore[attr-defined]
            setattr(dist, name, timed[name])
        try:
            yield clock
        finally:
            for name, original in originals.items():
                if getattr(dist, name) is timed[name]:
                    setattr(dist, name, original)


def _untimed(function: Callable[..., Any]) -> Callable[..., Any]:
    original: Callable[..., Any] = getattr(function, "untimed", function)
    return original


def _timed(original: Callable[..., Any], dimensions: GroupDimensions, clock: StepClock) -> Callable[..., Any]:
    known, mark, record = dimensions.known, clock.mark, clock.record

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        group = options["group"] if "group" in options else _group_of(args)
        dimension = known[group] if group in known else dimensions.of(group)
        if dimension is None or is_beside_steps():
            return original(*args, **options)
        if options.get("async_op"):
            work = original(*args, **options)
            return TimedWork(work, dimension, clock) if work is not None else None
        began = mark()
        result = original(*args, **options)
        record((dimension, began, mark()))
        return result

    return call


def _unless_compiling(timed: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile replaces torch's own functions in graphs, and would not know the timed ones."""

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        return original(*args, **options) if torch.compiler.is_compiling() else timed(*args, **options)

    return call


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    return next((argument for argument in args if isinstance(argument, dist.ProcessGroup)), None)
