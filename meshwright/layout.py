"""Mapping between ranks and mesh coordinates, which planner, operator and worker share.

A job has `data x pipeline x context x tensor` ranks, with tensor as the innermost dimension. Consecutive ranks form a
tensor-parallel group, so a worker with consecutive ranks keeps the group that communicates most on one node. The ranks
that share a sequence come next, then the stages of a replica. Replicas are outermost (the order of Llama 3, arXiv
2407.21783, section 3.3.2).

Experts add no ranks. They are spread over ranks with the same dense parameters, which are `data x context` of one stage
(arXiv 2408.04093 calls it folding). This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from meshwright.figures import counted


class Coordinates(NamedTuple):
    """Where a rank sits in the mesh, one index per dimension, each counted from 0."""

    data: int
    pipeline: int
    context: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The parallel degrees of a run. Each is at least 1; all but `expert` multiply to the world size.

    Raises:
        ValueError: a degree is below 1, or `expert` does not divide `data x context`.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline, self.data, self.context, self.expert) < 1:
            name = next(name for name in ("tensor", "pipeline", "data", "context", "expert") if getattr(self, name) < 1)
            raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        if self.shard_ranks % self.expert:
            raise ValueError(f"`expert` ({self.expert}) must divide `data` x `context` ({self.data} x {self.context})")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data * self.pipeline * self.context * self.tensor

    @property
    def replica_size(self) -> int:
        """Ranks that work on one sample together."""
        return self.pipeline * self.context * self.tensor

    @property
    def shard_ranks(self) -> int:
        """Number of ranks with the same dense parameters. Gradients are summed over them, and ZeRO shards over them."""
        return self.data * self.context

    def coordinates(self, rank: int) -> Coordinates:
        """The mesh coordinates of `rank`.

        Raises:
            ValueError: `rank` is not in `range(world_size)`.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        data, pipeline = divmod(rest, self.pipeline)
        return Coordinates(data, pipeline, context, tensor)

    def rank(self, data: int, pipeline: int, context: int, tensor: int) -> int:
        """The rank at these coordinates: the inverse of `coordinates`."""
        return ((data * self.pipeline + pipeline) * self.context + context) * self.tensor + tensor

    def rank_by_stage(self, rank: int) -> int:
        """The number of `rank` for frameworks in whose order stages are outermost, and replicas come next."""
        data, pipeline, context, tensor = self.coordinates(rank)
        return ((pipeline * self.data + data) * self.context + context) * self.tensor + tensor

    def tensor_groups(self) -> list[list[int]]:
        """Every tensor-parallel group, as lists of ranks: the ones that must share an NVLink domain."""
        return self._groups("tensor")

    def context_groups(self) -> list[list[int]]:
        """All context-parallel groups: ranks with slices of the same sequences."""
        return self._groups("context")

    def pipeline_groups(self) -> list[list[int]]:
        """Every pipeline, as lists of ranks in stage order."""
        return self._groups("pipeline")

    def data_groups(self) -> list[list[int]]:
        """All data-parallel groups: ranks with the same shard and different samples."""
        return self._groups("data")

    def shard_groups(self) -> list[list[int]]:
        """All groups of ranks with the same dense parameters, by data and then by context coordinate."""
        return [
            [self.rank(d, p, c, t) for d in range(self.data) for c in range(self.context)]
            for p in range(self.pipeline)
            for t in range(self.tensor)
        ]

    def expert_groups(self) -> list[list[int]]:
        """All expert-parallel groups: ranks with different experts of the same layers, in the experts' order."""
        size = self.expert
        return [group[i : i + size] for group in self.shard_groups() for i in range(0, self.shard_ranks, size)]

    def expert_shard_groups(self) -> list[list[int]]:
        """All groups of ranks with the same experts."""
        return [group[i :: self.expert] for group in self.shard_groups() for i in range(self.expert)]

    def workers(self, gpus_per_worker: int) -> list[range]:
        """The consecutive ranks of each worker pod, by worker index.

        Raises:
            ValueError: the world does not divide into workers of that size.
        """
        if gpus_per_worker < 1 or self.world_size % gpus_per_worker:
            raise ValueError(f"a world of {self.world_size} ranks does not divide into workers of {gpus_per_worker}")
        return [range(first, first + gpus_per_worker) for first in range(0, self.world_size, gpus_per_worker)]

    def _groups(self, own: str) -> list[list[int]]:
        found: dict[Coordinates, list[int]] = {}
        for rank in range(self.world_size):
            found.setdefault(self.coordinates(rank)._replace(**{own: 0}), []).append(rank)
        return list(found.values())


def split_layers(layers: int, stages: int) -> list[range]:
    """The consecutive layers of each pipeline stage; the first stages take the remainder.

    Every layer belongs to exactly one stage, for all numbers. (A split that silently drops layers is a known bug of
    other runtimes.)

    Raises:
        ValueError: there are more stages than layers, or fewer than one.
    """
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{counted(layers, 'layer')} cannot be split into {counted(stages, 'stage')}: each stage needs at least one"
        )
    size, extra = divmod(layers, stages)
    bounds = [stage * size + min(stage, extra) for stage in range(stages + 1)]
    return [range(first, last) for first, last in zip(bounds, bounds[1:], strict=False)]
