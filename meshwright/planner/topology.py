"""Node labels -> fabric levels, over the label generations of every source that is in use.

Closest level first. A missing or meaningless value makes the node a group of its own, never a member of one large
group of unlabelled nodes: a plan must not rely on a connection nobody vouched for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

MEANINGLESS = frozenset({"", "unknown", "none", "no-imds-data", "n/a", "null"})


@dataclass(frozen=True, slots=True)
class TopologyKeys:
    """Label keys of each level; on each node the first one with a meaningful value counts."""

    domain: tuple[str, ...] = (
        "nvidia.com/gpu.clique",
        "accelerator.topograph.run/domain",
        "xclr.topology.nvidia.com/domain",
        "network.topology.nvidia.com/accelerator",
        "topology.k8s.aws/ultraserver-id",
    )
    """NVLink domains: GPUs that reach each other without the network. Without one, a host is its own domain."""
    rack: tuple[str, ...] = (
        "fabric.topograph.run/tier-0",
        "network.topology.nvidia.com/tier-0",
        "network.topology.nvidia.com/leaf",
        "network.topology.nvidia.com/block",
        "topology.k8s.aws/network-node-layer-3",
        "cloud.google.com/gce-topology-subblock",
        "oci.oraclecloud.com/rdma.local_block_id",
        "ib.coreweave.cloud/leafgroup",
        "node.coreweave.cloud/rack",
        "alibabacloud.com/asw-id",
    )
    """Racks: nodes under one leaf switch."""
    zone: tuple[str, ...] = ("topology.kubernetes.io/zone",)
    """Zones: beyond them the network is much slower."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node sits in the fabric. Names of singletons contain a `/`, which no label value can."""

    domain: str
    rack: str
    zone: str


def locate(name: str, labels: Mapping[str, str], keys: TopologyKeys) -> Place:
    """The node's place. What no label speaks of is named after the level below: it is shared with nobody else."""
    domain = first_value(labels, keys.domain) or f"host/{name}"
    rack = first_value(labels, keys.rack) or f"domain/{domain}"
    return Place(domain, rack, first_value(labels, keys.zone) or f"rack/{rack}")


def first_value(labels: Mapping[str, str], keys: tuple[str, ...]) -> str | None:
    """The value of the first of `keys` that says something."""
    for key in keys:
        value = labels.get(key)
        if isinstance(value, str) and value.strip().lower() not in MEANINGLESS:
            return value
    return None


def as_tree(places: Mapping[str, Place]) -> tuple[dict[str, Place], list[str]]:
    """The places of nodes made a tree, and a sentence for each label that had to give way.

    Nodes of one domain share the commonest rack among them, nodes of one rack the commonest zone: NVLink is the
    closer tie. Where no node names a zone, all are in one, since then the level says nothing.
    """
    warnings: list[str] = []
    racks = _commonest("NVLink domain", "rack", [(p.domain, p.rack) for p in places.values()], warnings)
    zones = _commonest("rack", "zone", [(racks[p.domain], p.zone) for p in places.values()], warnings)
    if all("/" in zone for zone in zones.values()):
        zones = dict.fromkeys(zones, "")
    return {n: Place(p.domain, racks[p.domain], zones[racks[p.domain]]) for n, p in places.items()}, warnings


def _commonest(inner: str, outer: str, pairs: list[tuple[str, str]], warnings: list[str]) -> dict[str, str]:
    counts: dict[str, Counter[str]] = {}
    for name, above in pairs:
        counts.setdefault(name, Counter())[above] += 1
    chosen: dict[str, str] = {}
    for name, above_counts in counts.items():
        named = {above: n for above, n in above_counts.items() if "/" not in above} or above_counts
        chosen[name] = min(named, key=lambda above: (-named[above], above))
        if len(named) > 1:
            warnings.append(f"{inner} {name} is labelled with several {outer}s; {chosen[name]} is taken")
    return chosen
