"""Metrics as Markdown tables, for the pages that document them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.metrics.declaration import Label, Metric


def metric_table(metrics: Iterable[Metric[Any]]) -> str:
    """Return a table of the metrics, by name."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in sorted(metrics, key=lambda metric: metric.name):
        labels = ", ".join(f"`{name}`" for name in metric.label_names)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines)


def label_table(metrics: Sequence[Metric[Any]]) -> str:
    """Return a table of the labels and their values. A label with several sets of values names the metrics of each."""
    users: dict[Label, list[str]] = {}
    for metric in metrics:
        for label in metric.labels:
            users.setdefault(label, []).append(metric.name)
    names = [label.name for label in users]
    lines = ["| label | values |", "|---|---|"]
    for label, metrics_of_label in users.items():
        which = f"`{label.name}`"
        if names.count(label.name) > 1:
            which += " of " + ", ".join(f"`{name}`" for name in metrics_of_label)
        values = ", ".join(f"`{value}`" for value in label.values)
        lines.append(f"| {which} | {'; '.join(text for text in (values, label.meaning) if text)} |")
    return "\n".join(lines)
