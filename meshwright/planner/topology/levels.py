"""Fabric levels and the label keys that name them, over the label generations of every source that is in use.

Closest level first. The direction differs between sources: AWS counts layers from the spine down (3 is the closest),
topograph's tiers from the node up (0 is the closest). A level may be given any further key, and a cluster any further
level: nothing else in planning knows the names, only their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DOMAIN = "domain"
RACK = "rack"
SPINE = "spine"
CORE = "core"
ZONE = "zone"
REGION = "region"


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the fabric.

    Attributes:
        name: how plans and messages call it.
        keys: label keys; on each node the first one with a meaningful value counts.
        always: whether the level exists also when no node names it (each place below is then a place of its own).
            A level without it is left out of a tree in which no node names it.
    """

    name: str
    keys: tuple[str, ...]
    always: bool = False


DEFAULT_LEVELS = (
    Level(
        DOMAIN,
        (
            "nvidia.com/gpu.clique",
            "accelerator.topograph.run/domain",
            "xclr.topology.nvidia.com/domain",
            "network.topology.nvidia.com/accelerator",
            "topology.k8s.aws/ultraserver-id",
        ),
        always=True,
    ),
    Level(
        RACK,
        (
            "fabric.topograph.run/tier-0",
            "network.topology.nvidia.com/tier-0",
            "network.topology.nvidia.com/leaf",
            "network.topology.nvidia.com/block",
            "topology.k8s.aws/network-node-layer-3",
            "cloud.google.com/gce-topology-subblock",
            "oci.oraclecloud.com/rdma.local_block_id",
            "oci.oraclecloud.com/host.rack_id",
            "backend.coreweave.cloud/leafgroup",
            "ib.coreweave.cloud/leafgroup",
            "node.coreweave.cloud/rack",
            "alibabacloud.com/asw-id",
            "cloud.provider.com/topology-rack",
        ),
        always=True,
    ),
    Level(
        SPINE,
        (
            "fabric.topograph.run/tier-1",
            "network.topology.nvidia.com/tier-1",
            "network.topology.nvidia.com/spine",
            "topology.k8s.aws/network-node-layer-2",
            "cloud.google.com/gce-topology-block",
            "oci.oraclecloud.com/rdma.network_block_id",
            "oci.oraclecloud.com/host.network_block_id",
            "ib.coreweave.cloud/superpod",
            "alibabacloud.com/point-of-delivery",
            "cloud.provider.com/topology-block",
        ),
    ),
    Level(
        CORE,
        (
            "fabric.topograph.run/tier-2",
            "network.topology.nvidia.com/tier-2",
            "network.topology.nvidia.com/core",
            "network.topology.nvidia.com/datacenter",
            "topology.k8s.aws/network-node-layer-1",
            "oci.oraclecloud.com/rdma.hpc_island_id",
            "backend.coreweave.cloud/fabric",
            "ib.coreweave.cloud/fabric",
        ),
    ),
    Level(ZONE, ("topology.kubernetes.io/zone",)),
    Level(REGION, ("topology.kubernetes.io/region",)),
)
"""NVLink domains (GPUs that reach each other without the network; without a label a host is its own), racks (nodes
under one leaf switch), the switch layers above, zones and regions."""


def with_key(levels: Sequence[Level], name: str, key: str) -> tuple[Level, ...]:
    """The levels with a site's own key put before the known ones of the level `name`.

    Raises:
        ValueError: no level has that name; the message lists those there are.
    """
    if all(level.name != name for level in levels):
        known = ", ".join(level.name for level in levels)
        raise ValueError(f"there is no fabric level {name!r}: use one of {known}")
    return tuple(Level(x.name, (key, *x.keys), x.always) if x.name == name else x for x in levels)
