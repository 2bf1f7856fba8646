"""The network as levels, and a communication group's shape on them.

The time of a collective depends much more on how many of its ranks share a node than on how many ranks there are: eight
ranks of a node use eight network cards, one rank uses one. A group is therefore described by its `Span`, the number of
its ranks inside one domain of every level. To estimate the cost of a placement, pass its real spans.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshwright.planner.cost.accelerators import Accelerator

INTRA_LATENCY = 3.4e-6
"""Seconds of one ring hop inside a domain (NCCL 2.27's tuner, H100)."""
INTER_LATENCY = 14e-6
"""Seconds of one ring hop between domains (same source)."""
BASE_LATENCY = 8.4e-6


@dataclass(frozen=True, slots=True)
class FabricLevel:
    """Domains of equal width: NVLink domains, nodes, leaf switches, spines, zones.

    On a rail-optimized fabric a leaf connects GPUs with one local index on many nodes. `gpus` then counts all GPUs of
    the scalable unit, because rings stay on their rail.
    """

    name: str
    gpus: int
    """GPUs of one domain."""
    bandwidth: float
    """Bytes/s per GPU and direction between domains of the level below that share this one."""
    latency: float = INTER_LATENCY
    in_network: bool = False
    """Whether the switches sum the data of a reduction (SHARP)."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """Levels from the NVLink domain outward. The last level contains all GPUs.

    Raises:
        ValueError: `levels` is empty, or not ordered from narrow to wide.
    """

    levels: tuple[FabricLevel, ...]
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.levels))
        widths = [level.gpus for level in self.levels]
        if not widths or widths != sorted(widths) or widths[0] < 1:
            raise ValueError(f"levels must be ordered from narrow to wide, and not {widths}")

    def __hash__(self) -> int:
        """Computed once: fabrics are part of many keys."""
        return self._hash

    @classmethod
    def of(cls, gpu: Accelerator, *, nic: float | None = None, domain: int | None = None) -> Fabric:
        """The usual fabric of a GPU: its domains, and one flat network between them.

        Args:
            gpu: the GPU's catalog entry.
            nic: bytes/s per GPU between domains, if known.
            domain: number of GPUs of one domain, if known.
        """
        inner = domain or gpu.domain
        between = FabricLevel("network", 1 << 30, nic or gpu.nic)
        if inner > 1:
            link = FabricLevel("nvlink", inner, gpu.link, INTRA_LATENCY, gpu.in_network)
            return cls((link, between))
        if gpu.node > 1:
            return cls((FabricLevel("host", gpu.node, gpu.link, INTRA_LATENCY), between))
        return cls((between,))

    def without_nvlink_sums(self) -> Fabric:
        """Return the fabric in whose NVLink domains no switch sums the data of a reduction."""
        inner, *others = self.levels
        return Fabric((replace(inner, in_network=False), *others)) if others and inner.in_network else self

    @property
    def domain(self) -> int:
        """GPUs of the innermost domain."""
        return self.levels[0].gpus


@dataclass(frozen=True, slots=True)
class Span:
    """A group's shape: the number of its ranks in one domain of each level, innermost first. The last has all ranks."""

    members: tuple[int, ...]

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.members[-1]

    @property
    def inner(self) -> int:
        """Ranks that share an innermost domain."""
        return self.members[0]

    @classmethod
    def of(cls, size: int, stride: int, fabric: Fabric) -> Span:
        """Return the shape of `size` ranks, `stride` apart, if ranks fill the fabric in order."""
        members = [max(1, min(size, level.gpus // stride)) for level in fabric.levels]
        members[-1] = size
        return cls(tuple(members))

    @property
    def top(self) -> int:
        """Index of the innermost level with the entire group in one domain."""
        return next(index for index, ranks in enumerate(self.members) if ranks >= self.size)
