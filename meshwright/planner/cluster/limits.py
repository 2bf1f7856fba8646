"""Hardware limits of a plan: size of an NVLink domain, GPUs of a node, memory of a GPU.

They are counted over allocatable resources, not over free ones: a plan lasts longer than the current load, and
placement checks free capacity.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from meshwright.planner.cluster.inventory import Inventory

RESERVED = "reserved for job "
"""Why a node is excluded that another job will get, before that job's name."""

_MAX_NAMED = 3
USABLE_FRACTION = 0.97
"""Fraction of a GPU's memory that an estimate may fill. Context and fragmentation are in the estimate."""


def excluded_nodes(reasons: Mapping[str, str]) -> str:
    """Which nodes are excluded and why (node -> reason), in one sentence. Empty without such nodes."""
    if not reasons:
        return ""
    if len(reasons) <= _MAX_NAMED:
        return f"Excluded nodes: {', '.join(f'{name} ({reasons[name]})' for name in sorted(reasons))}"
    counts = sorted(Counter(reasons.values()).items(), key=lambda item: (-item[1], item[0]))
    commonest = ", ".join(f"{count} {reason}" for reason, count in counts[:_MAX_NAMED])
    return f"Excluded nodes: {len(reasons)} ({commonest})"


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """Limits of the usable nodes. None means unknown: then nothing is rejected because of it."""

    node_gpus: int | None = None
    """GPUs of the largest node."""
    domain_gpus: int | None = None
    """GPUs of the largest NVLink domain, in complete workers."""
    gpus_by_memory: Mapping[int, int] = field(default_factory=dict)
    """Bytes of memory of one GPU -> number of such GPUs."""
    gpus_of_unknown_memory: int = 0
    separate_hosts: int = 0
    """Nodes of cliques that count as separate NVLink domains, because the job's pods have no IMEX channel."""
    linked_gpus: int | None = None
    """GPUs that NVLink joins for the job: those of `domain_gpus`, or of one worker if a host has several workers that
    no claim joins."""
    excluded: str = ""
    """If no node is usable: why, for a message."""

    @classmethod
    def of(cls, inventory: Inventory, gpus_per_worker: int) -> ClusterLimits:
        """Return the limits of the nodes that have the GPUs of a worker. All are unknown without a usable node."""
        usable = inventory.with_workers(gpus_per_worker)
        if not usable:
            return cls(excluded=excluded_nodes(inventory.excluded))
        domains: defaultdict[str, int] = defaultdict(int)
        shared: set[str] = set()
        memory: defaultdict[int, int] = defaultdict(int)
        unknown = 0
        for node in usable:
            domains[node.place.domain] += node.capacity.gpus // gpus_per_worker * gpus_per_worker
            if node.capacity.gpus >= 2 * gpus_per_worker and not inventory.pods_joined:
                shared.add(node.place.domain)
            if node.gpu_memory_bytes is None:
                unknown += node.capacity.gpus
            else:
                memory[node.gpu_memory_bytes] += node.capacity.gpus
        largest = max(node.capacity.gpus for node in usable)
        return cls(
            largest,
            max(domains.values()),
            dict(memory),
            unknown,
            sum(node.separate_host for node in usable),
            linked_gpus=max(gpus_per_worker if name in shared else gpus for name, gpus in domains.items()),
        )

    @property
    def known(self) -> bool:
        """Whether there is a usable node."""
        return self.node_gpus is not None

    @property
    def pods_apart(self) -> bool:
        """Whether NVLink joins fewer GPUs than a domain has, because workers share hosts and no claim joins them."""
        return self.linked_gpus is not None and self.linked_gpus < (self.domain_gpus or 0)

    @property
    def gpus(self) -> int:
        """GPUs of all usable nodes."""
        return self.gpus_of_unknown_memory + sum(self.gpus_by_memory.values())

    def with_gpus(self, gpus: int) -> ClusterLimits:
        """Return the limits of a cluster that has so many of the largest GPUs."""
        if self.gpus_of_unknown_memory:
            return replace(self, gpus_of_unknown_memory=gpus)
        return replace(self, gpus_by_memory={size: gpus for size in [max(self.gpus_by_memory, default=0)] if size})

    def memory_for(self, gpus: int) -> float:
        """The most bytes that each of `gpus` GPUs can hold: 0 if there are fewer, infinite if nothing is known."""
        if not self.known or self.gpus_of_unknown_memory >= gpus:
            return inf
        count = self.gpus_of_unknown_memory
        for size in sorted(self.gpus_by_memory, reverse=True):
            count += self.gpus_by_memory[size]
            if count >= gpus:
                return float(usable_memory(size))
        return 0.0


def usable_memory(gpu_memory_bytes: int) -> int:
    """Bytes of a GPU's memory that a plan may fill."""
    return int(gpu_memory_bytes * USABLE_FRACTION)
