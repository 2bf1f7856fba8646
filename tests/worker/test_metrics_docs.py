"""A metric of a worker pod is declared once; its series and docs/worker-metrics.md follow."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from meshwright.metrics.declaration import Kind
from meshwright_worker.agent.metrics import WorkerMetrics, job_metric, rank_metric
from meshwright_worker.agent.metrics_docs import render_page
from meshwright_worker.agent.metrics_server import start_metrics_server
from meshwright_worker.rank.task import StepReport

PAGE = Path(__file__).parents[2] / "docs" / "worker-metrics.md"


class ToyMetrics(WorkerMetrics):
    samples = job_metric("ptj_toy_samples", Kind.GAUGE, "Sequences consumed.", lambda report: report.samples)
    waits = rank_metric(
        "ptj_toy_waits_total", Kind.COUNTER, "Half of the waits.", lambda report: report.data_seconds / 2
    )


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render_page(), "run: make generate"


async def test_one_declaration_exports_and_documents_a_metric() -> None:
    metrics = ToyMetrics("team-a", "train")
    metrics.generation(1, [0, 1], restart=False)
    for rank in (0, 1):
        metrics.step(rank, StepReport(3, 2.5, 1.0, 1e-3, 512, 8, 0.2, 0.5))
    runner = await start_metrics_server(metrics, "127.0.0.1", 0)
    assert runner is not None
    try:
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}/metrics") as response:
            text = await response.text()
    finally:
        await runner.cleanup()
    assert 'ptj_toy_samples{job_name="train",namespace="team-a"} 8.0' in text
    assert 'ptj_toy_waits_total{job_name="train",namespace="team-a",rank="1"} 0.25' in text
    page = render_page(ToyMetrics)
    assert "| `ptj_toy_samples` | gauge | `namespace`, `job_name` | Sequences consumed. |" in page
    assert "| `ptj_toy_waits_total` | counter | `namespace`, `job_name`, `rank` | Half of the waits. |" in page
    metrics.generation(2, [1], restart=True)
    text = metrics.exposition().decode()
    assert "ptj_toy_samples{" not in text
    assert 'ptj_toy_waits_total{job_name="train",namespace="team-a",rank="0"}' not in text
