"""Generates docs/worker-metrics.md from the declarations of metrics."""

from __future__ import annotations

import sys

from meshwright.metrics.declaration import Catalog
from meshwright.metrics.page import label_table, metric_table
from meshwright_worker.agent.metrics import WorkerMetrics

HEAD = """# Metrics of worker pods

Every worker pod serves Prometheus metrics at `/metrics` on its port `metrics` (9464). Only the pod of rank 0 exports
the metrics of the job (loss, tokens, learning rate, loads of experts), so that a sum over pods counts them once.

This page is generated from the code: `python -m meshwright_worker.agent.metrics_docs > docs/worker-metrics.md`.
"""


def render_page(catalog: type[Catalog] = WorkerMetrics) -> str:
    """Return the page."""
    parts = [HEAD, metric_table(catalog.metrics), "\n## Label values\n", label_table(catalog.metrics), ""]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(render_page())
