"""Declaration of a metric: name, type, help text, labels with their values, buckets, and the source of its value.

A catalog is a class whose attributes are metrics. Its exporter, its table in docs and the checks of label values all
read the same declarations, so that a new metric is one attribute. Importing this module imports no Prometheus client.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

PREFIX = "ptj_"

Sample = tuple[tuple[str, ...], float]
"""Label values, in the order of the metric's labels, and the value."""
Source = TypeVar("Source")


class Kind(StrEnum):
    """A Prometheus metric type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """A label of a metric.

    Attributes:
        name: the label's name.
        values: the values it can have. Empty if the set is open.
        meaning: what the values are. Required for an open set.

    Raises:
        ValueError: neither `values` nor `meaning` is given.
    """

    name: str
    values: tuple[str, ...] = ()
    meaning: str = ""

    def __post_init__(self) -> None:
        if not self.values and not self.meaning:
            raise ValueError(f"label `{self.name}` needs its values, or what the values of an open set are")

    def accepts(self, value: str) -> bool:
        """Whether the label can have this value."""
        return not self.values or value in self.values


@dataclass(frozen=True)
class Metric(Generic[Source]):
    """One metric.

    Attributes:
        name: exported name, with the suffix `_total` for a counter.
        kind: its type.
        help: one sentence.
        labels: in the order in which code passes their values.
        buckets: upper bounds of a histogram's buckets.
        source: computes the samples from the argument that the catalog's exporter passes. Without it, code sets the
            metric.

    Raises:
        ValueError: the name does not suit the type, or only one of histogram and buckets is given.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    source: Callable[[Source], Iterable[Sample]] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(rf"{PREFIX}[a-z0-9_]+", self.name):
            raise ValueError(f"metric `{self.name}`: the name must begin with `{PREFIX}` and have only a-z, 0-9 and _")
        if (self.kind is Kind.COUNTER) != self.name.endswith("_total"):
            raise ValueError(f"metric `{self.name}`: counters end in `_total`, and nothing else does")
        if (self.kind is Kind.HISTOGRAM) != bool(self.buckets):
            raise ValueError(f"metric `{self.name}`: histograms have buckets, and nothing else has")

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of its labels."""
        return tuple(label.name for label in self.labels)


class Catalog:
    """Base class of a catalog: every attribute of a subclass that is a `Metric` is one of its metrics."""

    metrics: ClassVar[tuple[Metric[Any], ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.metrics = (*cls.metrics, *(value for value in vars(cls).values() if isinstance(value, Metric)))
