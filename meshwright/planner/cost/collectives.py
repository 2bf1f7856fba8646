"""Seconds of collectives by group shape and bytes: alpha-beta model per level, with the fastest known algorithm.

Ring: 2 (N-1)/N X/B for an all-reduce, half of it for a gather or a scatter (Thakur et al., 2005; Patarasuk and Yuan,
2009). A ring through a node enters and leaves it once per network card of its ranks, so N nodes with r ranks each have
the bandwidth of r cards. Tree and in-network reduction have latencies that grow with the logarithm, and less bandwidth
than a ring, as in NCCL. Hierarchical: scatter inside the domain, all-reduce between domains, gather inside.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log2

from meshwright.planner.cost.fabric import BASE_LATENCY, Fabric, Span

LINK_EFFICIENCY = 0.80
"""Fraction of a domain's nominal rate that large collectives reach (A100: 227 of 300 GB/s; H100: 345 of 450)."""
NETWORK_EFFICIENCY = 0.96
"""Fraction of a network card's nominal rate that large collectives reach (NCCL 2.27's tuner: 48 of 50 GB/s per card).
"""
TREE_EFFICIENCY = 0.72
"""Bandwidth of NCCL's double tree relative to its ring, by bandwidth per card."""
SWITCH_EFFICIENCY = 0.9
"""Fraction of the one-way rate that in-network reduction reaches."""


def _rate(span: Span, fabric: Fabric, level: int) -> float:
    """Bytes/s of one ring through level `level`. Every rank inside a domain adds its own card to the ring's edge."""
    if level == 0:
        return fabric.levels[0].bandwidth * LINK_EFFICIENCY
    return fabric.levels[level].bandwidth * NETWORK_EFFICIENCY * span.members[0]


@lru_cache(maxsize=16384)
def ring_rate(span: Span, fabric: Fabric) -> float:
    """Bytes/s of the slowest edge of a ring over the group."""
    first = 0 if span.inner > 1 else 1
    levels = range(min(first, span.top), span.top + 1)
    return min(_rate(span, fabric, level) for level in levels)


@lru_cache(maxsize=16384)
def ring_latency(span: Span, fabric: Fabric) -> float:
    """Seconds of one turn of a ring for 0 bytes: the sum of the latencies of all hops."""
    total, ranks_below = BASE_LATENCY, 1
    for level, ranks_inside in zip(fabric.levels, span.members, strict=False):
        hops = span.size // ranks_below - span.size // ranks_inside
        total += max(0, hops) * level.latency
        ranks_below = ranks_inside
    return total


@lru_cache(maxsize=16384)
def tree_latency(span: Span, fabric: Fabric) -> float:
    """Seconds up and down a tree for 0 bytes."""
    total, ranks_below = BASE_LATENCY, 1
    for level, ranks_inside in zip(fabric.levels, span.members, strict=False):
        if ranks_inside > ranks_below:
            total += 2 * ceil(log2(ranks_inside / ranks_below)) * level.latency
            ranks_below = ranks_inside
    return total


def all_gather(size: float, span: Span, fabric: Fabric) -> float:
    """Seconds to gather `size` bytes on every rank, each of which has its part.

    A reduce-scatter takes the same time.
    """
    if span.size <= 1 or size <= 0:
        return 0.0
    latency, rate = _ring(span, fabric)
    ring_fraction = (span.size - 1) / span.size
    return latency + ring_fraction * size / rate


@lru_cache(maxsize=16384)
def _ring(span: Span, fabric: Fabric) -> tuple[float, float]:
    """(seconds for 0 bytes, bytes/s) of a ring over the group."""
    return ring_latency(span, fabric), ring_rate(span, fabric)


def reduce_scatter(size: float, span: Span, fabric: Fabric) -> float:
    """Seconds to sum `size` bytes over the group so that every rank has its part of the sum."""
    return all_gather(size, span, fabric)


def all_reduce(size: float, span: Span, fabric: Fabric) -> float:
    """Seconds to sum `size` bytes over the group, with the fastest algorithm."""
    if span.size <= 1 or size <= 0:
        return 0.0
    ring_fraction = (span.size - 1) / span.size
    rate = ring_rate(span, fabric)
    ring = 2 * ring_latency(span, fabric) - BASE_LATENCY + 2 * ring_fraction * size / rate
    tree = tree_latency(span, fabric) + 2 * ring_fraction * size / (rate * TREE_EFFICIENCY)
    best = min(ring, tree)
    if _sums_in_switches(span, fabric):
        best = min(best, tree_latency(span, fabric) + size / (rate * SWITCH_EFFICIENCY))
    if span.top > 0 and span.inner > 1:
        best = min(best, _hierarchical_all_reduce(size, span, fabric))
    return best


def _sums_in_switches(span: Span, fabric: Fabric) -> bool:
    """Whether the switches of every level that the group's data crosses sum it."""
    below = (1, *span.members[:-1])
    crossed = zip(fabric.levels, span.members, below, strict=True)
    return all(level.in_network for level, inside, inner in crossed if inside > inner)


def _hierarchical_all_reduce(size: float, span: Span, fabric: Fabric) -> float:
    inside = Span((span.inner,) * len(span.members))
    between = Span((1, *(max(1, ranks_inside // span.inner) for ranks_inside in span.members[1:])))
    return 2 * all_gather(size, inside, fabric) + all_reduce(size / span.inner, between, fabric)


def all_to_all(size: float, span: Span, fabric: Fabric) -> float:
    """Seconds for every rank to send `size` bytes in total, an equal part to each rank of the group.

    Traffic inside a domain and traffic between domains move at the same time. Each level carries the traffic that
    leaves the level below.
    """
    if span.size <= 1 or size <= 0:
        return 0.0
    slowest, latency, ranks_below = 0.0, BASE_LATENCY, 1
    for index, ranks_inside in enumerate(span.members):
        if ranks_inside > ranks_below:
            efficiency = LINK_EFFICIENCY if index == 0 else NETWORK_EFFICIENCY
            outside = (span.size - ranks_below) / span.size if index else (ranks_inside - ranks_below) / span.size
            slowest = max(slowest, outside * size / (fabric.levels[index].bandwidth * efficiency))
            latency += fabric.levels[index].latency * ceil(log2(ranks_inside / ranks_below))
            ranks_below = ranks_inside
    return latency + slowest


def send(size: float, level: int, fabric: Fabric) -> float:
    """Seconds to send `size` bytes to one peer that shares a domain of `level`."""
    if size <= 0:
        return 0.0
    link = fabric.levels[min(level, len(fabric.levels) - 1)]
    efficiency = LINK_EFFICIENCY if level == 0 else NETWORK_EFFICIENCY
    return link.latency + size / (link.bandwidth * efficiency)
