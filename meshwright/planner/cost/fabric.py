"""The network as levels, and a communication group's shape on them.

What a collective costs depends on how many of its ranks share a node far more than on how many there are: eight
ranks of a node drive eight network cards, one rank drives one. So a group is described by its `Span`, the ranks it has
inside one domain of every level, and a placement can be costed by handing over the spans that it really has.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.planner.cost.accelerators import Accelerator

INTRA_LATENCY = 3.4e-6
"""Seconds of one ring hop inside a domain (NCCL 2.27's tuner, H100)."""
INTER_LATENCY = 14e-6
"""Seconds of one ring hop between domains (the same)."""
BASE_LATENCY = 8.4e-6


@dataclass(frozen=True, slots=True)
class FabricLevel:
    """Domains of equal width: NVLink domains, nodes, leaf switches, spines, zones.

    On a rail-optimised fabric a leaf serves one local index of many nodes: `gpus` then counts all GPUs of the
    scalable unit, since rings keep to their rail.
    """

    name: str
    gpus: int
    """GPUs of one domain."""
    bandwidth: float
    """Bytes/s per GPU and direction between domains of the level below that share this one."""
    latency: float = INTER_LATENCY
    in_network: bool = False
    """Whether the switches add numbers up (SHARP)."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """Levels from the NVLink domain outwards. The last is taken to hold everything.

    Raises:
        ValueError: there is no level, or they are not ordered from narrow to wide.
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
            gpu: what a catalogue knows of it.
            nic: bytes/s per GPU between domains, where known.
            domain: GPUs of one domain, where known.
        """
        inner = domain or gpu.domain
        between = FabricLevel("network", 1 << 30, nic or gpu.nic)
        if inner > 1:
            link = FabricLevel("nvlink", inner, gpu.link, INTRA_LATENCY, gpu.in_network)
            return cls((link, between))
        if gpu.node > 1:
            return cls((FabricLevel("host", gpu.node, gpu.link, INTRA_LATENCY), between))
        return cls((between,))

    @property
    def domain(self) -> int:
        """GPUs of the innermost domain."""
        return self.levels[0].gpus


@dataclass(frozen=True, slots=True)
class Span:
    """A group's shape: how many of its ranks one domain of each level holds, innermost first; the last holds all."""

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
        """The shape of `size` ranks, `stride` apart, when ranks fill the fabric in order."""
        members = [max(1, min(size, level.gpus // stride)) for level in fabric.levels]
        members[-1] = size
        return cls(tuple(members))

    @property
    def top(self) -> int:
        """Index of the innermost level whose one domain holds the whole group."""
        return next(index for index, ranks in enumerate(self.members) if ranks >= self.size)
