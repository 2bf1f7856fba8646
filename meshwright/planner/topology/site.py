"""The fabric of a site, as its administrator states it: labels, bandwidths, latencies and reduction of each level.

One document serves the operator and the command line. What it leaves out has the default: the known label sets, and the
bandwidths of the GPU's catalog entry. A level's numbers are about GPUs that share a location of the level, and none of
a closer one: those of `rack` are about GPUs of different NVLink domains in one rack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from meshwright.administrator import parse_document
from meshwright.api.base import ApiModel
from meshwright.planner.topology.levels import DEFAULT_LEVELS, LEVELS, RACK, Level
from meshwright.planner.units import GB

CLUSTER = "cluster"
"""The level above all others. It has no labels: every node of the cluster is in it."""
STATED = (*LEVELS, CLUSTER)
"""The levels of the document, closest first."""

LabelKey = Annotated[
    str,
    Field(
        min_length=1,
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    ),
]
"""Key of a node label."""
Device = Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[A-Za-z0-9_.-]+(:[0-9]{1,3})?$")]
"""Name of a device, and its port if it has several, such as `mlx5_0:1`."""
Interface = Annotated[str, Field(min_length=1, max_length=15, pattern=r"^[A-Za-z0-9_.-]+$")]
"""Name of a network interface."""
VARIABLE = r"^(NCCL|RCCL|OFI|FI|UCX|SHARP|GLOO|IBV|MLX5)_[A-Z0-9_]+$"
"""Names of the variables of communication libraries."""

FABRIC_DOCUMENT = "a mapping with `levels` and `network`"
"""What a document of the fabric must be, for error messages."""


class FabricError(ValueError):
    """The fabric's document is invalid. The message names the fields and what they must be."""


class SiteLevel(ApiModel):
    """One level of the fabric."""

    labels: Annotated[list[LabelKey], Field(max_length=16)] | None = None
    """Keys of the node labels that name the locations of this level, most exact first. They replace the keys that
    Meshwright knows. With an empty list, no label names the level."""
    gigabytes_per_second: Annotated[float, Field(gt=0, le=100_000)] | None = None
    """Line rate of one GPU in one direction, in GB (10^9 bytes) per second, to GPUs that share a location of this level
    and none of a closer one."""
    latency_microseconds: Annotated[float, Field(ge=0, le=1_000_000)] | None = None
    """Time of one hop between such GPUs."""
    in_network_reduction: bool | None = None
    """Whether the switches of this level sum the data of a reduction: NVLink SHARP in a domain, SHARP above it."""


class SiteLevels(ApiModel):
    """The levels of the fabric, closest first."""

    domain: SiteLevel | None = None
    """GPUs that reach each other by NVLink."""
    rack: SiteLevel | None = None
    """Nodes under one leaf switch."""
    spine: SiteLevel | None = None
    """Nodes under one spine switch."""
    core: SiteLevel | None = None
    """Nodes under one core switch."""
    zone: SiteLevel | None = None
    """Nodes of one zone."""
    region: SiteLevel | None = None
    """Nodes of one region."""
    cluster: SiteLevel | None = None
    """All nodes. This level has no labels."""

    @model_validator(mode="after")
    def _check_levels(self) -> SiteLevels:
        if self.cluster is not None and self.cluster.labels is not None:
            raise ValueError("`cluster.labels`: remove it, because every node of the cluster is in this level")
        owner: dict[str, str] = {}
        for name, level in self.stated():
            for key in level.labels or ():
                if key in owner:
                    raise ValueError(f"`{name}.labels`: {key} also names `{owner[key]}`: remove it from one of them")
                owner[key] = name
        rates = [(name, level.gigabytes_per_second) for name, level in self.stated() if level.gigabytes_per_second]
        for (inner, faster), (outer, slower) in zip(rates, rates[1:], strict=False):
            if slower > faster:
                raise ValueError(
                    f"`{outer}.gigabytesPerSecond` must be at most that of `{inner}` ({faster:g}), got {slower:g}: "
                    "traffic of a level passes through the closer ones"
                )
        return self

    def stated(self) -> Iterator[tuple[str, SiteLevel]]:
        """Name and content of each level in the document, closest first."""
        for name in STATED:
            level = getattr(self, name)
            if level is not None:
                yield name, level


class NetworkKind(StrEnum):
    """The network between nodes."""

    INFINIBAND = "InfiniBand"
    ROCE = "RoCE"
    EFA = "EFA"
    PLUGIN = "Plugin"
    """Another network, which NCCL reaches by a network plugin in the image, such as GPUDirect-TCPXO."""
    TCP = "TCP"
    """Ethernet without RDMA."""


class SiteNetwork(ApiModel):
    """The network between nodes, and what NCCL must know about it."""

    kind: NetworkKind | None = None
    """The network. Workers check that their pods can use it."""
    adapters: Annotated[list[Device], Field(min_length=1, max_length=64)] | None = None
    """Names of the RDMA devices that NCCL uses, such as `mlx5_0`."""
    interfaces: Annotated[list[Interface], Field(min_length=1, max_length=16)] | None = None
    """Names of the network interfaces for NCCL's bootstrap, for TCP, and for gloo."""
    rails: bool | None = None
    """True: each adapter of a node has its own switch (a rail), so that a ring or tree should stay on one adapter.
    False: all adapters of a node are connected to the same switch. Left out: NCCL decides."""
    gid_index: Annotated[int, Field(ge=0, le=255)] | None = None
    """Index of the GID for RoCE."""
    traffic_class: Annotated[int, Field(ge=0, le=255)] | None = None
    """Traffic class of InfiniBand or RoCE."""
    tcp_fallback: bool = True
    """Whether NCCL may use TCP if it finds no InfiniBand or RoCE device. With false, ranks fail instead."""
    environment: Annotated[
        dict[Annotated[str, Field(max_length=128, pattern=VARIABLE)], Annotated[str, Field(max_length=1024)]],
        Field(max_length=32),
    ] = {}
    """Further variables of NCCL and its libraries for every job with several workers, by name."""

    @model_validator(mode="after")
    def _check_kind(self) -> SiteNetwork:
        rdma = self.kind in (NetworkKind.INFINIBAND, NetworkKind.ROCE)
        for name, value in (("adapters", self.adapters), ("trafficClass", self.traffic_class)):
            if value is not None and not rdma:
                raise ValueError(f"`{name}` requires `kind: InfiniBand` or `kind: RoCE`: set it, or remove `{name}`")
        if self.gid_index is not None and self.kind is not NetworkKind.ROCE:
            raise ValueError("`gidIndex` requires `kind: RoCE`: set it, or remove `gidIndex`")
        if not self.tcp_fallback and not rdma:
            raise ValueError(
                "`tcpFallback: false` requires `kind: InfiniBand` or `kind: RoCE`: set it, or name the plugin of "
                "another network with `environment: {NCCL_NET: ...}`"
            )
        return self


class SiteFabric(ApiModel):
    """The document."""

    levels: SiteLevels = SiteLevels()
    """The levels of the fabric."""
    network: SiteNetwork = SiteNetwork()
    """The network between nodes."""

    def fabric_levels(self) -> tuple[Level, ...]:
        """The levels with their label keys, closest first, as inventories read them."""
        keys = {name: level.labels for name, level in self.levels.stated() if level.labels is not None}
        if not keys:
            return DEFAULT_LEVELS
        return tuple(
            Level(level.name, tuple(keys.get(level.name, level.keys)), level.always) for level in DEFAULT_LEVELS
        )

    def inside(self, level: str) -> SiteLevel:
        """What is stated about GPUs that share a location of `level`, and none of a closer one."""
        return getattr(self.levels, level) or SiteLevel()

    def between(self, level: str, levels: Sequence[str]) -> SiteLevel:
        """What is stated about two locations of `level`, in a tree with these levels.

        They share a location of the tree's next level. Each number is that of the closest level that states it, up to
        that one.
        """
        wider = [name for name in levels if name in LEVELS and LEVELS.index(name) > LEVELS.index(level)]
        last = STATED.index(wider[0] if wider else CLUSTER)
        return self._first([self.inside(name) for name in STATED[STATED.index(level) + 1 : last + 1]])

    def outside_domains(self) -> SiteLevel:
        """What is stated about GPUs of two NVLink domains, if no rack of them is known."""
        return self._first([self.inside(name) for name in STATED[STATED.index(RACK) :]])

    def measured(self, levels: Sequence[str]) -> Mapping[str, float]:
        """Bytes per second between two locations of each level of a tree, where it is stated."""
        rates = {level: self.between(level, levels).gigabytes_per_second for level in levels if level in LEVELS}
        return {level: rate * GB for level, rate in rates.items() if rate is not None}

    @staticmethod
    def _first(levels: Sequence[SiteLevel]) -> SiteLevel:
        found: dict[str, object] = {}
        for level in levels:
            for name in ("gigabytes_per_second", "latency_microseconds", "in_network_reduction"):
                value = getattr(level, name)
                if value is not None:
                    found.setdefault(name, value)
        return SiteLevel.model_validate(found)


DEFAULT_SITE = SiteFabric()
"""Nothing is stated."""


def parse_fabric(text: str) -> SiteFabric:
    """Parse a document, in YAML or JSON. An empty document states nothing.

    Raises:
        FabricError: the document is invalid.
    """
    try:
        return parse_document(SiteFabric, text, FABRIC_DOCUMENT)
    except ValueError as error:
        raise FabricError(str(error)) from None
