"""Compute times of ranks: the coordinator compares them and answers with the median, and old agents send none."""

from __future__ import annotations

import math

import pytest

from meshwright.protocol.messages import AgentState, ReportReply, WorkerReport, parse_message
from meshwright_operator.coordinator.agent_registry import COMPUTE_SECONDS, AgentRegistry
from meshwright_operator.coordinator.server import Coordinator
from meshwright_operator.coordinator.tokens import Tokens
from meshwright_operator.decide.stragglers import ComputeTimes, compute_times
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.metrics.job_metrics import JobMetrics
from meshwright_operator.operator_metrics import OperatorMetrics
from tests.operator.builders import report, running_status
from tests.operator.test_job_progress_metrics import page_of, put


def reporting(worker: int, *seconds: float | None, generation: int = 1) -> WorkerReport:
    """A report of a worker with as many ranks."""
    first = worker * len(seconds)
    ranks = [{"rank": first + index, "pid": 1, "compute_seconds": value} for index, value in enumerate(seconds)]
    return report(worker, AgentState.RUNNING, generation, ranks=ranks)


def test_the_slowest_rank_against_the_median() -> None:
    found = compute_times([reporting(0, 1.0, 1.1), reporting(1, 3.3, 0.9), reporting(2, 1.1, 1.1)], 1)
    assert found == ComputeTimes(1.1, 3.3, 2)
    assert found.ratio == pytest.approx(3)


def test_values_that_cannot_be_and_other_generations_are_ignored() -> None:
    bad = [reporting(3, math.nan, math.inf), reporting(4, -1.0, 0.0), reporting(5, 1e9, None)]
    earlier = reporting(6, 9.0, 9.0, generation=3)
    assert compute_times([*bad, earlier, reporting(0, 1.0, 2.0), reporting(1, 2.0, 3.0)], 1) == ComputeTimes(
        2.0, 3.0, 3
    )
    assert compute_times([*bad, reporting(0, 1.0, 2.0)], 1) is None, "two ranks do not say which one is slow"
    assert compute_times([], 1) is None


def test_the_registry_compares_again_every_few_seconds() -> None:
    now = [0.0]
    registry = AgentRegistry(lambda: now[0])
    registry.generation = 1
    assert registry.compute_times() is None
    for worker in range(3):
        registry.receive_report(reporting(worker, 1.0, 2.0 + worker))
    assert registry.compute_times() is None
    now[0] += COMPUTE_SECONDS
    assert registry.compute_times() == ComputeTimes(1.5, 4.0, 5)
    assert registry.agents().compute == ComputeTimes(1.5, 4.0, 5)
    registry.generation = 2
    assert registry.compute_times() is None, "the times of another generation's ranks do not count"


def test_the_answer_to_a_report_has_the_median_and_an_older_agent_ignores_it() -> None:
    coordinator = Coordinator(Cache(), Tokens(b"k" * 32), OperatorMetrics(), lambda key, urgent: None)
    body = coordinator._reply(3, None, None, 2.0, 1.25, None).body
    assert parse_message(ReportReply, body).median_compute_seconds == 1.25
    assert (
        parse_message(ReportReply, coordinator._reply(3, None, None, 2.0, None, None).body).median_compute_seconds
        is None
    )


def test_the_job_has_its_worst_ratio_and_that_rank() -> None:
    jobs, key = JobMetrics(), JobKey("default", "train")
    put(jobs, running_status(), compute=ComputeTimes(2.0, 5.0, 6))
    page = page_of(jobs)
    assert (page["ptj_job_straggler_ratio{}"], page["ptj_job_slowest_rank{}"]) == (2.5, 6)
    put(jobs, running_status())
    assert "ptj_job_straggler_ratio{}" not in page_of(jobs)
    jobs.forget(key)
