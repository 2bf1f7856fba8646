"""Metrics of the GPUs of the cluster: free, allocated, unusable, largest free block. Counted before a scrape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from meshwright.metrics.declaration import Catalog, Kind, Label, Metric, Sample
from meshwright.metrics.exporter import scraped
from meshwright.planner.topology.levels import LEVELS
from meshwright_operator.scheduling.gpu_capacity import CLUSTER, NODE, GpuCapacity

COUNT_SECONDS = 5.0
"""The nodes are counted at most this often, however often metrics are scraped."""

Capacities = Mapping[str, GpuCapacity]
RESOURCE = Label("resource", meaning="extended resource of the GPUs, such as `nvidia.com/gpu`")
LEVEL = Label("level", (NODE, *LEVELS, CLUSTER), "those of the fabric that no node names have no series")


def _states(capacities: Capacities) -> Iterable[Sample]:
    for resource, count in capacities.items():
        yield (resource, "free"), count.free
        yield (resource, "allocated"), count.allocated
        yield (resource, "unusable"), count.unusable


def _largest_free(capacities: Capacities) -> Iterable[Sample]:
    for resource, count in capacities.items():
        for level, gpus in count.largest_free.items():
            yield (resource, level), gpus


def _fragmentation(capacities: Capacities) -> Iterable[Sample]:
    for resource, count in capacities.items():
        for level, gpus in count.in_partly_used.items():
            if level != CLUSTER:
                yield (resource, level), gpus / count.free if count.free else 0.0


class ClusterMetrics(Catalog, Collector):
    """The metrics of all GPUs of the cluster."""

    gpus = Metric(
        "ptj_gpus",
        Kind.GAUGE,
        "GPUs of all nodes, by state: free, allocated to pods, or free on a node that accepts no pods.",
        (RESOURCE, Label("state", ("free", "allocated", "unusable"))),
        source=_states,
    )
    largest_free = Metric(
        "ptj_gpus_largest_free",
        Kind.GAUGE,
        "The most free GPUs in one location of a level: one node, NVLink domain, rack and so on.",
        (RESOURCE, LEVEL),
        source=_largest_free,
    )
    fragmentation = Metric(
        "ptj_gpu_fragmentation_ratio",
        Kind.GAUGE,
        "Part of the free GPUs in locations of a level in which other GPUs are allocated.",
        (RESOURCE, Label("level", (NODE, *LEVELS), "those of the fabric that no node names have no series")),
        source=_fragmentation,
    )

    def __init__(self, count: Callable[[], Awaitable[Capacities]], clock: Callable[[], float] = time.monotonic) -> None:
        """`count` counts the GPUs of every resource now."""
        self._count = count
        self._clock = clock
        self._counted: Capacities = {}
        self._counted_at = float("-inf")
        self._counting = asyncio.Lock()

    async def refresh(self) -> None:
        """Count the GPUs, unless they were counted a moment ago."""
        async with self._counting:
            if self._clock() - self._counted_at >= COUNT_SECONDS:
                self._counted, self._counted_at = await self._count(), self._clock()

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Return every series, as last counted."""
        return [scraped(metric, self._counted) for metric in self.metrics]

    def describe(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Return the names, without counting."""
        return [scraped(metric, {}) for metric in self.metrics]
