"""docs/metrics.md, made from the registry: `python -m meshwright_operator.metrics.metrics_docs > docs/metrics.md`.

What is documented is what a scrape shows, since both come from the same collectors.
"""

from __future__ import annotations

import sys

from prometheus_client import CollectorRegistry

from meshwright.metric_docs import Row, row, rows_of, table
from meshwright_operator.metrics.job_metrics import JobsCollector
from meshwright_operator.metrics.operator_metrics import OperatorMetrics

HEAD = """# Metrics

The operator serves Prometheus metrics at `/metrics` of its metrics port (9471 by default), beside `/healthz` and
`/readyz`. Operator metrics have few label values however many jobs there are. Job metrics are computed at each scrape
from what the operator knows now: a deleted job's series are gone with the next scrape. [Worker pods](worker-metrics.md)
serve the metrics of their ranks themselves.

This page is generated from the code: `python -m meshwright_operator.metrics.metrics_docs > docs/metrics.md`.
"""
VALUES = """
## Label values

| label | values |
|---|---|
| `result` of `ptj_reconcile_duration_seconds` | `ok`, `stale` (the job changed meanwhile; repeated at once), `error` |
| `result` of `ptj_placement_attempts_total` | `placed`, `no_room`, `error` |
| `result` of `ptj_events_total` | `posted`, `failed`, `dropped` |
| `operation` | `create`, `ungate`, `delete` |
| `endpoint` | `mesh`, `report` |
| `code` | HTTP status; 0 when the server could not be reached, 499 when an agent hung up |
| `state` of `ptj_jobs`, `phase` | `queued`, `starting`, `training`, `restarting`, `suspended`; `finished` as a state |
| `state` of `ptj_job_ranks` | `total`, `training` |
| `kind` of `ptj_job_straddling_groups` | `tensor`, `replica` |
| `cause` | as in `status.restarts` |
| `type`, `status` | as in `status.conditions` |
"""


def render_page() -> str:
    """The whole page."""
    parts = [HEAD, "## Operator\n", table(rows_of(OperatorMetrics())), "\n## Jobs\n", table(_job_rows()), VALUES]
    return "\n".join(parts)


def _job_rows() -> list[Row]:
    registry = CollectorRegistry()
    registry.register(JobsCollector())
    return sorted(row(family, tuple(getattr(family, "_labelnames", ()))) for family in registry.collect())


if __name__ == "__main__":
    sys.stdout.write(render_page())
