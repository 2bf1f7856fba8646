"""Communication groups in terms of blocks, the units that placement moves.

Rank order is [TP, CP, PP, DP], innermost first (Llama 3, arXiv 2407.21783, section 3.3.2). A *block* is the smallest
number of consecutive workers with complete tensor-parallel groups. Ranks of one block never communicate over the
network, so only the blocks of a group matter. Groups with the same blocks are combined into one group with a count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import gcd, lcm

from meshwright.layout import Layout


class Dimension(StrEnum):
    """What a group of ranks communicates for."""

    CONTEXT = "context"
    EXPERT = "expert"
    PIPELINE = "pipeline"
    DATA = "data"


@dataclass(frozen=True, slots=True)
class RankBlocks:
    """The degrees of a run and the size of its workers, as placement sees them.

    `expert` divides `data * context`: experts are spread over consecutive ranks of one pipeline stage.

    Raises:
        ValueError: the degrees contradict each other; the message names them.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    gpus_per_worker: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "context", "pipeline", "data", "expert", "gpus_per_worker"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, not {getattr(self, name)}")
        if self.data * self.context % self.expert:
            raise ValueError(f"`expert` {self.expert} does not divide data x context = {self.data * self.context}")
        if self.world_size % self.block_gpus:
            raise ValueError(
                f"a world of {self.world_size} ranks does not divide into blocks of {self.block_gpus} GPUs, which hold "
                "whole workers and whole tensor-parallel groups"
            )

    @classmethod
    def of(cls, layout: Layout, gpus_per_worker: int) -> RankBlocks:
        """The mesh of a layout."""
        return cls(layout.tensor, layout.context, layout.pipeline, layout.data, layout.expert, gpus_per_worker)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def block_gpus(self) -> int:
        """GPUs of one block."""
        return lcm(self.tensor, self.gpus_per_worker)

    @property
    def block_workers(self) -> int:
        """Workers of one block."""
        return self.block_gpus // self.gpus_per_worker

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.world_size // self.block_gpus

    @property
    def segment_blocks(self) -> int:
        """The smallest number of consecutive blocks with complete replicas."""
        replica = self.tensor * self.context * self.pipeline
        return lcm(self.block_gpus, replica) // self.block_gpus

    @property
    def context_blocks(self) -> int:
        """The smallest number of consecutive blocks with complete context-parallel groups."""
        return lcm(self.block_gpus, self.tensor * self.context) // self.block_gpus

    @property
    def expert_segments(self) -> int:
        """The smallest number of consecutive segments with complete expert-parallel groups."""
        replicas = self.expert // gcd(self.expert, self.context)
        held = self.segment_blocks * self.block_gpus // (self.tensor * self.context * self.pipeline)
        return lcm(replicas, held) // held if self.expert > 1 else 1

    def groups(self) -> tuple[BlockGroup, ...]:
        """Every group that touches more than one block."""
        return _groups(self)

    def counted_groups(self) -> Counter[tuple[Dimension, tuple[int, ...]]]:
        """The blocks that groups touch -> how many groups touch exactly these."""
        return Counter(found for dimension in Dimension for found in self._groups_of(dimension))

    def _groups_of(self, dimension: Dimension) -> Iterator[tuple[Dimension, tuple[int, ...]]]:
        if self._degree(dimension) == 1:
            return
        members: dict[int, dict[int, None]] = {}
        per_block = self.block_gpus // self.tensor
        for block in range(self.blocks):
            for cell in range(block * per_block, (block + 1) * per_block):
                members.setdefault(self._key(dimension, cell), {})[block] = None
        for blocks in members.values():
            if len(blocks) > 1:
                yield dimension, tuple(blocks)

    def _degree(self, dimension: Dimension) -> int:
        degrees = {
            Dimension.CONTEXT: self.context,
            Dimension.EXPERT: self.expert,
            Dimension.PIPELINE: self.pipeline,
            Dimension.DATA: self.data * self.context,
        }
        return degrees[dimension]

    def _key(self, dimension: Dimension, cell: int) -> int:
        """Which group of a dimension a cell is in; a cell is one tensor-parallel group, counted in rank order."""
        rest, context = divmod(cell, self.context)
        data, pipeline = divmod(rest, self.pipeline)
        if dimension is Dimension.CONTEXT:
            return rest
        if dimension is Dimension.PIPELINE:
            return data * self.context + context
        if dimension is Dimension.DATA:
            return pipeline
        return (data * self.context + context) // self.expert * self.pipeline + pipeline


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """The blocks of one group of ranks.

    Attributes:
        dimension: the parallel dimension of the group.
        blocks: the blocks, in order.
        count: number of groups of this dimension with exactly these blocks.
    """

    dimension: Dimension
    blocks: tuple[int, ...]
    count: int = 1


@lru_cache(maxsize=8)
def _groups(mesh: RankBlocks) -> tuple[BlockGroup, ...]:
    """Placing asks for the groups of one mesh several times, and again after every fault."""
    return tuple(BlockGroup(dimension, blocks, count) for (dimension, blocks), count in mesh.counted_groups().items())
