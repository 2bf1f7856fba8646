"""Metrics of ranks: phases of a step, exposed communication, memory, bubble, and compute time against the median."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.agent.mesh_generation import MeshGeneration
from meshwright_worker.agent.metrics import WorkerMetrics
from meshwright_worker.agent.rank_environment import stages_of
from meshwright_worker.command.progress import CommandProgress
from meshwright_worker.command.report_line import ReportedStep
from meshwright_worker.rank.messages import StepDone, decode, encode
from meshwright_worker.rank.task import MemoryPeak, StepReport, StepTimes
from tests.metrics.checks import undeclared_samples

WAITS = {"tensor": 0.2, "pipeline": 0.3, "job": 0.1}
TIMES = StepTimes(compute=1.0, update=0.25, checkpoint=0.5, waits=WAITS, bubble=0.25)
REPORT = StepReport(
    3, 2.5, 1.0, 1e-3, 512, 8, 2.0, 0.1, 1e9, 1e9, 1e10,
    memory=(MemoryPeak("host", 1 << 20),), times=TIMES, simulated_bubble=0.2,
)  # fmt: skip


def values(metrics: WorkerMetrics, rank: str = "0") -> dict[tuple[str, str], float]:
    """(series, value of its last label) -> value, of one rank and of the job."""
    text = metrics.exposition().decode()
    assert undeclared_samples(text, WorkerMetrics.metrics) == []
    return {
        (
            sample.name,
            next((v for k, v in sample.labels.items() if k in ("phase", "dimension", "kind")), ""),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("rank", rank) == rank
    }


def test_phases_divide_the_time_of_a_step() -> None:
    metrics = WorkerMetrics("team-a", "job")
    metrics.generation(1, [0, 1], restart=False)
    metrics.step(0, REPORT)
    metrics.step(0, replace(REPORT, skipped=True))
    found = values(metrics)
    phases = {part: value for (name, part), value in found.items() if name == "ptj_step_phase_seconds_total"}
    assert phases == pytest.approx(
        {"data": 0.2, "compute": 2.0, "communication": 1.2, "update": 0.5, "checkpoint": 1.0, "other": 0.1}
    )
    assert sum(phases.values()) - phases["checkpoint"] == pytest.approx(2 * REPORT.seconds)
    assert found["ptj_exposed_communication_seconds_total", "pipeline"] == pytest.approx(0.6)
    assert found["ptj_memory_peak_bytes", "host"] == 1 << 20
    assert found["ptj_pipeline_bubble_measured_ratio", ""] == 0.25
    assert found["ptj_pipeline_bubble_simulated_ratio", ""] == 0.2
    assert found["ptj_skipped_steps_total", ""] == 1


def test_a_command_s_loss_may_be_no_number_and_a_loss_that_it_does_not_report_is_left_out() -> None:
    metrics = WorkerMetrics("team-a", "job")
    metrics.generation(1, [0], restart=False)
    progress = CommandProgress()

    def after(step: ReportedStep) -> float | None:
        (done,) = progress.messages(step, float(step.step))
        assert isinstance(done, StepDone)
        metrics.step(0, done.report)
        return values(metrics).get(("ptj_loss", ""))

    assert after(ReportedStep(1)) is None
    assert after(ReportedStep(2, 2.5)) == 2.5
    assert after(ReportedStep(3, math.nan)) == pytest.approx(math.nan, nan_ok=True)
    assert after(ReportedStep(4, 0.0)) == 0.0
    assert after(ReportedStep(5)) == 0.0


def test_a_rank_that_moves_takes_its_series_along() -> None:
    metrics = WorkerMetrics("team-a", "job")
    metrics.generation(1, [0, 1], restart=False)
    metrics.step(0, REPORT)
    metrics.step(1, REPORT)
    metrics.compute_times({0: 1.0, 1: 3.0}, 2.0)
    assert values(metrics)["ptj_rank_straggler_ratio", ""] == 0.5
    assert values(metrics, "1")["ptj_rank_straggler_ratio", ""] == 1.5
    metrics.generation(2, [1, 2], restart=True)
    text = metrics.exposition().decode()
    assert 'rank="0"' not in text
    assert "ptj_rank_straggler_ratio{" not in text
    assert "ptj_pipeline_bubble_measured_ratio{" not in text
    assert ("ptj_step_phase_seconds_total", "compute") in values(metrics, "1")


def test_a_ratio_names_the_stage_of_its_rank() -> None:
    run = NativeRun.model_construct(tensor=1, pipeline=2, data_parallel=2, context=1, expert=1)
    metrics = WorkerMetrics("team-a", "job")
    metrics.generation(1, [2, 3], restart=False, stages=stages_of(run, [2, 3]))
    metrics.compute_times({2: 1.0, 3: 3.0}, 2.0)
    text = metrics.exposition().decode()
    assert 'ptj_rank_straggler_ratio{job_name="job",namespace="team-a",rank="2",stage="0"} 0.5' in text
    assert 'ptj_rank_straggler_ratio{job_name="job",namespace="team-a",rank="3",stage="1"} 1.5' in text
    assert stages_of(run, [4]) == {}, "a rank that the run does not have"


@pytest.mark.parametrize("median", [None, 0.0, -1.0])
def test_without_a_median_no_rank_is_slow(median: float | None) -> None:
    metrics = WorkerMetrics("team-a", "job")
    metrics.generation(1, [0], restart=False)
    metrics.compute_times({0: 1.0}, 0.5)
    metrics.compute_times({0: 1.0}, median)
    assert "ptj_rank_straggler_ratio{" not in metrics.exposition().decode()


def test_a_report_has_each_ranks_recent_compute_time_and_the_utilization() -> None:
    generation = MeshGeneration(1, 0, 2, uses_builtin_runtime=True, started=0.0)
    for rank in (0, 1):
        generation.record_spawn(rank, 100 + rank, 0.0)
    for seconds in (60.0, 1.0, 1.0, 1.2, 0.8):
        report = replace(REPORT, times=replace(TIMES, compute=seconds))
        generation.record_message(0, decode(encode(StepDone(report))), 1.0, "")
    first, second = generation.processes(2.0, lambda pid: "")
    assert first.compute_seconds == 1.0, "the first step, which compiles, does not count for long"
    assert second.compute_seconds is None
    progress = generation.progress
    assert progress is not None
    assert progress.mfu == pytest.approx(1e9 / (1e10 * 2.0))


def test_throughput_and_step_time_of_a_command_are_those_between_its_reports() -> None:
    generation = MeshGeneration(2, 0, 1, uses_builtin_runtime=False, started=0.0)
    generation.record_spawn(0, 100, 0.0)
    reports = CommandProgress()
    for step in range(11, 16):
        for loss in (None, 2.5):  # a second line about the step has its loss
            found = ReportedStep(step, loss, tokens=100, total_steps=40)
            for message in reports.messages(found, now=0.5 * step):
                generation.record_message(0, decode(encode(message)), 0.5 * step, "")
    progress = generation.progress
    assert progress is not None
    assert (progress.step, progress.loss, progress.total_steps) == (15, 2.5, 40)
    assert progress.step_seconds == pytest.approx(0.5)
    assert progress.tokens_per_second == pytest.approx(200)
