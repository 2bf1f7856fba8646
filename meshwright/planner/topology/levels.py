"""Fabric levels, and the sets of node labels that name them.

Closest level first. The direction differs between sources: AWS counts layers from the spine down (3 is the closest),
topograph's tiers from the node up (0 is the closest). Nothing else in planning knows the label keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NODE = "node"
"""One node. It needs no label, and is a level of locations only where a job names it."""
DOMAIN = "domain"
RACK = "rack"
SPINE = "spine"
CORE = "core"
ZONE = "zone"
REGION = "region"

LEVELS = (DOMAIN, RACK, SPINE, CORE, ZONE, REGION)
"""NVLink domains (GPUs that reach each other without the network; a node without a label is its own domain), racks
(nodes under one leaf switch), the switch layers above, zones and regions."""
ALWAYS = frozenset({DOMAIN, RACK})
"""Levels that exist even if no node names them. Each location of the level below then counts as a separate location."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the fabric.

    Attributes:
        name: its name in plans and messages.
        keys: label keys. On each node the first one with a meaningful value counts.
        always: whether the level exists even if no node names it. Each location of the level below then counts as a
            separate location. A level without it is left out of a tree if no node names it.
    """

    name: str
    keys: tuple[str, ...]
    always: bool = False


@dataclass(frozen=True)
class LabelSet:
    """The node labels of one cloud provider or tool.

    Attributes:
        source: who sets the labels.
        keys: the label keys of each level that the set names, most exact first.

    Raises:
        ValueError: a level of `keys` does not exist.
    """

    source: str
    keys: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        for level in self.keys:
            if level not in LEVELS:
                raise ValueError(f"{self.source}: unknown fabric level {level!r}: use one of {', '.join(LEVELS)}")


CLIQUE = "nvidia.com/gpu.clique"
"""The label of nodes whose NVLink reaches other nodes. Only pods with an IMEX channel can use it."""

LABEL_SETS = (
    LabelSet("NVIDIA GPU feature discovery", {DOMAIN: (CLIQUE,)}),
    LabelSet(
        "topograph",
        {
            DOMAIN: ("accelerator.topograph.run/domain",),
            RACK: ("fabric.topograph.run/tier-0",),
            SPINE: ("fabric.topograph.run/tier-1",),
            CORE: ("fabric.topograph.run/tier-2",),
        },
    ),
    LabelSet(
        "topograph, earlier tiers",
        {
            DOMAIN: ("xclr.topology.nvidia.com/domain",),
            RACK: ("network.topology.nvidia.com/tier-0",),
            SPINE: ("network.topology.nvidia.com/tier-1",),
            CORE: ("network.topology.nvidia.com/tier-2",),
        },
    ),
    LabelSet(
        "topograph, leaf and core",
        {
            DOMAIN: ("network.topology.nvidia.com/accelerator",),
            RACK: ("network.topology.nvidia.com/leaf",),
            SPINE: ("network.topology.nvidia.com/spine",),
            CORE: ("network.topology.nvidia.com/core",),
        },
    ),
    LabelSet(
        "topograph, block and data center",
        {
            DOMAIN: ("network.topology.nvidia.com/accelerator",),
            RACK: ("network.topology.nvidia.com/block",),
            SPINE: ("network.topology.nvidia.com/spine",),
            CORE: ("network.topology.nvidia.com/datacenter",),
        },
    ),
    LabelSet(
        "AWS",
        {
            DOMAIN: ("topology.k8s.aws/ultraserver-id",),
            RACK: ("topology.k8s.aws/network-node-layer-3",),
            SPINE: ("topology.k8s.aws/network-node-layer-2",),
            CORE: ("topology.k8s.aws/network-node-layer-1",),
        },
    ),
    LabelSet(
        "Google Cloud",
        {RACK: ("cloud.google.com/gce-topology-subblock",), SPINE: ("cloud.google.com/gce-topology-block",)},
    ),
    LabelSet(
        "Oracle Cloud",
        {
            RACK: ("oci.oraclecloud.com/rdma.local_block_id", "oci.oraclecloud.com/host.rack_id"),
            SPINE: ("oci.oraclecloud.com/rdma.network_block_id", "oci.oraclecloud.com/host.network_block_id"),
            CORE: ("oci.oraclecloud.com/rdma.hpc_island_id",),
        },
    ),
    LabelSet(
        "CoreWeave",
        {
            RACK: ("backend.coreweave.cloud/leafgroup", "ib.coreweave.cloud/leafgroup", "node.coreweave.cloud/rack"),
            SPINE: ("ib.coreweave.cloud/superpod",),
            CORE: ("backend.coreweave.cloud/fabric", "ib.coreweave.cloud/fabric"),
        },
    ),
    LabelSet("Alibaba Cloud", {RACK: ("alibabacloud.com/asw-id",), SPINE: ("alibabacloud.com/point-of-delivery",)}),
    LabelSet(
        "the keys in Kueue's examples",
        {RACK: ("cloud.provider.com/topology-rack",), SPINE: ("cloud.provider.com/topology-block",)},
    ),
    LabelSet("Kubernetes", {ZONE: ("topology.kubernetes.io/zone",), REGION: ("topology.kubernetes.io/region",)}),
)
"""Every known label set. If a node has labels of several sets, the earlier set counts."""


def levels_of(label_sets: Iterable[LabelSet]) -> tuple[Level, ...]:
    """Return the fabric's levels with the label keys of these sets, earlier sets first."""
    keys: dict[str, dict[str, None]] = {name: {} for name in LEVELS}
    for label_set in label_sets:
        for level, more in label_set.keys.items():
            keys[level].update(dict.fromkeys(more))
    return tuple(Level(name, tuple(keys[name]), name in ALWAYS) for name in LEVELS)


DEFAULT_LEVELS = levels_of(LABEL_SETS)
