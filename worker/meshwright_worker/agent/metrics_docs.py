"""Generates docs/worker-metrics.md from the declarations of metrics."""

from __future__ import annotations

import sys

from meshwright.metrics.declaration import Catalog
from meshwright.metrics.page import label_table, metric_table
from meshwright_worker.agent.metrics import WorkerMetrics

HEAD = """# Metrics of worker pods

Every worker pod serves Prometheus metrics at `/metrics` on its port `metrics` (9464). Only the pod of rank 0 exports
the metrics of the job (loss, tokens, learning rate, loads of experts), so that a sum over pods counts them once.

The phases of a step (`ptj_step_phase_seconds_total`) do not overlap, and their sum is the time of the rank's steps:
waiting for data, forward and backward passes (`compute`), waiting for communication that no computation hid
(`communication`), the update of the parameters, and the rest. `checkpoint` is the time between steps in which they
stand still for a save. On a GPU, passes and waits are timed by events in the compute stream, which the host reads a
step later and never waits for. In a graph of torch.compile, and where FSDP overlaps its collectives on a GPU, waits
count as `compute`. The measured bubble of a rank contains its waits for other stages and, at the end of the step, for
ranks that still compute. Compare its mean over the ranks with the simulated one. `ptj_rank_straggler_ratio` compares
medians over the last 20 steps; the operator returns the median over all ranks to each agent. The same port serves the
measured timeline of a pipeline's step at `/timeline`, as JSON, for `meshwright report`.

This page is generated from the code: `python -m meshwright_worker.agent.metrics_docs > docs/worker-metrics.md`.
"""


def render_page(catalog: type[Catalog] = WorkerMetrics) -> str:
    """Return the page."""
    parts = [HEAD, metric_table(catalog.metrics), "\n## Label values\n", label_table(catalog.metrics), ""]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(render_page())
