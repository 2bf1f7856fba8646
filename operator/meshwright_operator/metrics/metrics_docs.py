"""Generates docs/metrics.md from the declarations of metrics."""

from __future__ import annotations

import sys

from meshwright.metrics.declaration import Catalog
from meshwright.metrics.page import label_table, metric_table
from meshwright_operator.metrics.cluster_metrics import ClusterMetrics
from meshwright_operator.metrics.job_metrics import JobMetrics
from meshwright_operator.operator_metrics import OperatorMetrics

HEAD = """# Metrics

The operator serves Prometheus metrics at `/metrics` on its metrics port (9471 by default), next to `/healthz` and
`/readyz`. Operator metrics have few label values, however many jobs there are. Job metrics are computed at each scrape
from the current state, so the series of a deleted job are gone at the next scrape. [Worker pods](worker-metrics.md)
serve the metrics of their ranks.

This page is generated from the code: `python -m meshwright_operator.metrics.metrics_docs > docs/metrics.md`.
"""


def render_page(operator: type[Catalog] = OperatorMetrics, jobs: type[Catalog] = JobMetrics) -> str:
    """Return the page."""
    tables: dict[str, type[Catalog]] = {"Operator": operator, "GPUs": ClusterMetrics, "Jobs": jobs}
    parts = [HEAD]
    for title, catalog in tables.items():
        parts += [f"## {title}\n", metric_table(catalog.metrics), ""]
    every = [metric for catalog in tables.values() for metric in catalog.metrics]
    return "\n".join([*parts, "## Label values\n", label_table(every), ""])


if __name__ == "__main__":
    sys.stdout.write(render_page())
