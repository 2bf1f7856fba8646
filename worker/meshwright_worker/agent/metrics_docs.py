"""Generates docs/worker-metrics.md: `python -m meshwright_worker.agent.metrics_docs > docs/worker-metrics.md`."""

from __future__ import annotations

import sys

from meshwright.metric_docs import rows_of, table
from meshwright_worker.agent.metrics import TrainerMetrics

HEAD = """# Metrics of worker pods

Every worker pod serves Prometheus metrics at `/metrics` of its port `metrics` (9464). What is the whole job's (loss,
tokens, learning rate, loads of experts) comes from the pod of rank 0 alone, so that a sum over pods counts it once.

This page is generated from the code: `python -m meshwright_worker.agent.metrics_docs > docs/worker-metrics.md`.
"""
VALUES = """
## Label values

| label | values |
|---|---|
| `rank` | the pod's ranks |
| `layer` | number of the mixture's layer |
| `op` | `save`, `load` |
| `phase` | `data`, `rendezvous`, `build`, `load`, `first-step` |
"""


def reference() -> str:
    """Return the entire page."""
    return "\n".join([HEAD, table(rows_of(TrainerMetrics("", ""))), VALUES])


if __name__ == "__main__":
    sys.stdout.write(reference())
