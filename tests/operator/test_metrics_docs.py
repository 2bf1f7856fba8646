"""docs/metrics.md is what the registry says, and series go when their job goes."""

from __future__ import annotations

import re

from meshwright.api.status import EvaluationStatus
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.metrics.job_metrics import JobsCollector
from meshwright_operator.metrics.metrics_docs import render_page
from meshwright_operator.metrics.operator_metrics import OperatorMetrics
from tests.operator.builders import placement, running_status
from tests.operator.support import ROOT

KEY = JobKey("default", "train")


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == render_page(), "run: python -m meshwright_operator.metrics.metrics_docs > docs/metrics.md"


def test_every_metric_that_is_scraped_is_on_the_page() -> None:
    metrics, jobs = OperatorMetrics(), JobsCollector()
    metrics.registry.register(jobs)
    jobs.record(KEY, "uid").put(running_status(), None, 0.0)
    scraped = set(re.findall(r"^# TYPE (\S+) (?!unknown)", metrics.exposition().decode(), re.MULTILINE))
    told = set(re.findall(r"^\| `(ptj_\w+)` \|", render_page(), re.MULTILINE))
    assert {name for name in scraped if not name.endswith("_created")} == told


def test_a_jobs_series_tell_its_placement_and_go_with_it() -> None:
    metrics, jobs = OperatorMetrics(), JobsCollector()
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
