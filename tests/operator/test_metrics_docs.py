"""A metric of the operator is declared once; its series, docs/metrics.md and the checks follow."""

from __future__ import annotations

import re

import pytest
from aiohttp.test_utils import TestClient, TestServer

from meshwright.api.status import EvaluationStatus
from meshwright.metrics.declaration import Kind, Label
from meshwright.metrics.exporter import CounterMetric
from meshwright_operator.controller.http_server import health_application
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.metrics.cluster_metrics import ClusterMetrics
from meshwright_operator.metrics.job_metrics import JobMetrics, job_metric
from meshwright_operator.metrics.metrics_docs import render_page
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling.gpu_capacity import GpuCapacity
from meshwright_worker.agent.metrics import WorkerMetrics
from tests.metrics.checks import undeclared_references, undeclared_samples
from tests.operator.builders import placement, running_status
from tests.operator.support import ROOT

KEY = JobKey("default", "train")


class ToyOperatorMetrics(OperatorMetrics):
    toys = CounterMetric("ptj_toys_total", "Toys, by color.", Label("color", ("red", "blue")))


class ToyJobMetrics(JobMetrics):
    toy_steps = job_metric(
        "ptj_job_toy_steps",
        Kind.GAUGE,
        "Steps times two.",
        read=lambda record: [((), 2.0 * (record.status.step or 0))],
    )


async def scrape(metrics: OperatorMetrics) -> str:
    application = health_application(metrics, lambda: True, lambda: "")
    async with TestClient(TestServer(application)) as client:
        return await (await client.get("/metrics")).text()


async def test_one_declaration_of_an_operator_metric_exports_and_documents_it() -> None:
    metrics = ToyOperatorMetrics()
    metrics.toys.labels("red").inc()
    assert 'ptj_toys_total{color="red"} 1.0' in await scrape(metrics)
    page = render_page(operator=ToyOperatorMetrics)
    assert "| `ptj_toys_total` | counter | `color` | Toys, by color. |" in page
    assert "| `color` | `red`, `blue` |" in page


async def test_one_declaration_of_a_job_metric_exports_and_documents_it() -> None:
    metrics, jobs = OperatorMetrics(), ToyJobMetrics()
    metrics.registry.register(jobs)
    jobs.record(KEY, "uid").put(running_status(step=21), None, 0.0)
    assert 'ptj_job_toy_steps{job_name="train",namespace="default"} 42.0' in await scrape(metrics)
    page = render_page(jobs=ToyJobMetrics)
    assert "| `ptj_job_toy_steps` | gauge | `namespace`, `job_name` | Steps times two. |" in page


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == render_page(), "run: make generate"


async def no_gpus() -> dict[str, GpuCapacity]:
    return {}


def test_every_metric_that_is_scraped_is_on_the_page() -> None:
    metrics, jobs = OperatorMetrics(), JobMetrics()
    metrics.registry.register(jobs)
    jobs.record(KEY, "uid").put(running_status(), None, 0.0)
    metrics.registry.register(ClusterMetrics(no_gpus))
    text = metrics.exposition().decode()
    scraped = set(re.findall(r"^# TYPE (\S+) (?!unknown)", text, re.MULTILINE))
    documented = set(re.findall(r"^\| `(ptj_\w+)` \|", render_page(), re.MULTILINE))
    assert {name for name in scraped if not name.endswith("_created")} == documented
    assert undeclared_samples(text, (*OperatorMetrics.metrics, *ClusterMetrics.metrics, *JobMetrics.metrics)) == []


@pytest.mark.parametrize(
    "directory", ["docs", "helm", "examples", "cli", "benchmarks", "dashboards/source", "tests/e2e"]
)
def test_every_metric_named_elsewhere_is_declared(directory: str) -> None:
    declared = (*OperatorMetrics.metrics, *ClusterMetrics.metrics, *JobMetrics.metrics, *WorkerMetrics.metrics)
    files = [path for path in sorted((ROOT / directory).rglob("*")) if path.suffix in {".md", ".py", ".yaml", ".json"}]
    assert files
    problems = {str(path): undeclared_references(path.read_text(), declared) for path in files}
    assert {path: found for path, found in problems.items() if found} == {}


def test_a_jobs_series_show_its_placement_and_go_with_it() -> None:
    metrics, jobs = OperatorMetrics(), JobMetrics()
    metrics.registry.register(jobs)
    placed = placement().model_copy(update={"cost": "2.5", "straddling_replicas": 1})
    jobs.record(KEY, "uid").put(running_status(placement=placed), None, 0.0)
    page = metrics.exposition().decode()
    assert 'ptj_job_placement_cost{job_name="train",namespace="default"} 2.5' in page
    assert 'ptj_job_straddling_groups{job_name="train",kind="replica",namespace="default"} 1.0' in page
    assert "ptj_job_evaluation_loss{" not in page
    jobs.record(KEY, "uid").put(
        running_status(evaluation=EvaluationStatus(step=6, loss="1000", perplexity="inf")), None, 0.0
    )
    page = metrics.exposition().decode()
    for name, value in (("step", "6.0"), ("loss", "1000.0"), ("perplexity", "+Inf")):
        assert f'ptj_job_evaluation_{name}{{job_name="train",namespace="default"}} {value}' in page
    jobs.forget(KEY)
    assert 'job_name="train"' not in metrics.exposition().decode()
