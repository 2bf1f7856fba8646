"""Metrics as a Markdown table: the pages that document them are made from what a scrape shows."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

Row = tuple[str, str, str, str]
"""Name, type, labels and meaning."""


def rows_of(holder: object) -> list[Row]:
    """The metrics among an object's attributes, by name, also those without a sample yet."""
    found = []
    for collector in vars(holder).values():
        if isinstance(collector, MetricWrapperBase):
            (family,) = collector.describe()
            found.append(row(family, collector._labelnames))
    return sorted(found)


def row(family: Metric, labels: Sequence[str]) -> Row:
    """A metric's row."""
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return name, family.type, ", ".join(f"`{label}`" for label in labels), family.documentation


def table(rows: Sequence[Row]) -> str:
    """The rows below a head."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in rows]
    return "\n".join(lines)
