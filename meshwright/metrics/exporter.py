"""Exports the metrics of a catalog with the Prometheus client, which the operator and the worker install.

`CounterMetric`, `GaugeMetric` and `HistogramMetric` declare metrics that code sets. On the catalog's class such an
attribute is the declaration; on an instance of an `Exporter` it is the client's object:

    class QueueMetrics(Exporter):
        depth = GaugeMetric("ptj_queue_depth", "Jobs that wait.")

    QueueMetrics().depth.set(3)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Generic, Self, TypeVar, cast, overload

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric as Family

from meshwright.metrics.declaration import Catalog, Kind, Label, Metric, Sample, Source

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus's text format."""

Exported = TypeVar("Exported", bound=MetricWrapperBase)


class Exporter(Catalog):
    """A catalog whose metrics are in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._exported = {metric.name: _exported(metric, self.registry) for metric in self.metrics}

    def exported(self, metric: Metric[Any]) -> MetricWrapperBase:
        """Return the client's object for a metric of this catalog."""
        return self._exported[metric.name]

    def exposition(self) -> bytes:
        """Return all series in Prometheus's text format."""
        return generate_latest(self.registry)

    async def scrape(self) -> bytes:
        """The same, without blocking the event loop: thousands of series take half a second.

        Series are computed metric by metric, and their text is written in a thread.
        """
        families = []
        for family in self.registry.collect():
            families.append(family)
            await asyncio.sleep(0)
        return await asyncio.to_thread(generate_latest, _Collected(families))


class _Collected(CollectorRegistry):
    """Series that were computed before."""

    def __init__(self, families: Iterable[Family]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Family]:
        """Return them."""
        return self._families


class _SetByCode(Metric[None], Generic[Exported]):
    """A metric without a source."""

    @overload
    def __get__(self, exporter: None, owner: type[Catalog]) -> Self: ...
    @overload
    def __get__(self, exporter: Exporter, owner: type[Catalog]) -> Exported: ...
    def __get__(self, exporter: Exporter | None, owner: type[Catalog]) -> Self | Exported:
        return self if exporter is None else cast(Exported, exporter.exported(self))


class CounterMetric(_SetByCode[Counter]):
    """A counter that code increments."""

    def __init__(self, name: str, text: str, *labels: Label) -> None:
        super().__init__(name, Kind.COUNTER, text, labels)


class GaugeMetric(_SetByCode[Gauge]):
    """A gauge that code sets."""

    def __init__(self, name: str, text: str, *labels: Label) -> None:
        super().__init__(name, Kind.GAUGE, text, labels)


class HistogramMetric(_SetByCode[Histogram]):
    """A histogram that code observes values with."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...], *labels: Label) -> None:
        super().__init__(name, Kind.HISTOGRAM, text, labels, buckets)


def scraped(metric: Metric[Source], source: Source) -> CounterMetricFamily | GaugeMetricFamily:
    """Return the series of a counter or gauge as its source computes them now.

    Raises:
        ValueError: the metric is a histogram, or has no source.
    """
    if metric.source is None or metric.kind is Kind.HISTOGRAM:
        raise ValueError(f"`{metric.name}`: only counters and gauges with a source are computed when scraped")
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.label_names)
    for values, value in metric.source(source):
        family.add_metric(values, value)
    return family


def record(exported: MetricWrapperBase, samples: Iterable[Sample]) -> None:
    """Set a gauge, add to a counter or observe with a histogram, for each sample."""
    for values, value in samples:
        series = exported.labels(*values) if values else exported
        if isinstance(series, Gauge):
            series.set(value)
        elif isinstance(series, Counter):
            series.inc(value)
        else:
            cast(Histogram, series).observe(value)


def _exported(metric: Metric[Any], registry: CollectorRegistry) -> MetricWrapperBase:
    if metric.kind is Kind.HISTOGRAM:
        return Histogram(metric.name, metric.help, metric.label_names, buckets=metric.buckets, registry=registry)
    kind = Counter if metric.kind is Kind.COUNTER else Gauge
    return kind(metric.name, metric.help, metric.label_names, registry=registry)
