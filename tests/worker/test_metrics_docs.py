"""docs/worker-metrics.md is what a worker pod's metrics are."""

from pathlib import Path

from meshwright_worker.agent.metrics_docs import reference

PAGE = Path(__file__).parents[2] / "docs" / "worker-metrics.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == reference(), f"run: python -m meshwright_worker.agent.metrics_docs > {PAGE.name}"
