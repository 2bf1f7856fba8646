"""The progress of training, copied from the agents' reports to the job's status.

Reports come from a user's pod. A number that is out of range is ignored here, because the API server would reject the
entire status.
"""

from __future__ import annotations

import math
from collections.abc import Set

from pydantic import ValidationError

from meshwright.api.base import MAX_SAFE_INTEGER
from meshwright.api.status import CheckpointStatus, EvaluationStatus, ParallelTrainingJobStatus
from meshwright.perplexity import perplexity
from meshwright.protocol.messages import AgentState, Evaluation, Progress, WorkerReport
from meshwright.protocol.run_config import CommandRun, NativeRun
from meshwright_operator.decide.mesh_generation import rank_zero_report
from meshwright_operator.decide.observed import Observed, PodState
from meshwright_operator.decide.step_limit import step_limit
from meshwright_operator.decide.stragglers import rank_times
from meshwright_operator.timestamps import format_time, parse_time

THROTTLED_FIELDS = (
    "step",
    "loss",
    "tokens_per_second",
    "eta_seconds",
    "evaluation",
    "checkpoint",
    "checkpoint_tiers",
    "slow_rank",
    "limit",
)
"""Fields of status that only show progress. They are written at most every few seconds."""


def update_progress(observed: Observed, status: ParallelTrainingJobStatus) -> None:
    """Copies step, loss, throughput, evaluation and checkpoint from the last report about rank 0."""
    run = observed.run
    status.total_steps = run.training.steps if isinstance(run, NativeRun) else _chosen_steps(run, status)
    report = rank_zero_report(observed)
    if report is None:
        return
    if report.progress is not None and not isinstance(run, NativeRun) and report.progress.total_steps is not None:
        status.total_steps = _count(report.progress.total_steps)
    if report.progress is not None:
        if report.progress.step != status.step and isinstance(run, NativeRun):
            _update_limit(observed, report.progress, status)
        _update_step(report.progress, status)
        if not isinstance(run, NativeRun) and not status.tokens_per_second:
            status.tokens_per_second = None  # a user's command need not report its tokens
    _update_evaluation(report.evaluation, status)
    _update_checkpoint(observed, report, status)


def _chosen_steps(run: CommandRun, status: ParallelTrainingJobStatus) -> int | None:
    """The steps of a user's command: as the spec says, else as the command has reported them."""
    chosen = run.progress.total_steps if run.progress is not None else None
    return chosen if chosen is not None else status.total_steps


def count_ranks(observed: Observed, silent: Set[int] = frozenset()) -> tuple[int, int]:
    """The number of ranks that train, and of ranks whose agent has not reported since the operator started.

    Ranks of the workers in `silent` do not count, whatever they reported last.
    """
    training = unknown = 0
    for worker in observed.workers:
        ranks = observed.plan.gpus_per_worker
        received = observed.agents.reports.get(worker.index)
        if worker.state is PodState.SUCCEEDED:
            training += ranks
        elif worker.state is not PodState.RUNNING or worker.index in silent:
            continue
        elif received is None or (received.report.generation, received.report.incarnation) != (
            observed.mesh.generation,
            worker.incarnation,
        ):
            unknown += 0 if received is not None else ranks
        elif received.report.state in (AgentState.RUNNING, AgentState.COMPLETE):
            training += ranks
    return training, unknown


def _update_step(progress: Progress, status: ParallelTrainingJobStatus) -> None:
    step = _count(progress.step)
    if step is None:
        return
    status.step = step
    status.loss = f"{progress.loss:.6g}"[:32] if progress.has_loss else ""
    status.tokens_per_second = _count(progress.tokens_per_second)
    left = max(0, status.total_steps - step) if status.total_steps is not None else None
    status.eta_seconds = _count(left * progress.step_seconds) if left is not None else None


def _update_limit(observed: Observed, progress: Progress, status: ParallelTrainingJobStatus) -> None:
    layout, reports = observed.plan.layout, (received.report for received in observed.agents.reports.values())
    times = rank_times(reports, observed.mesh.generation)
    status.limit = step_limit(times, layout, progress.step_seconds) or status.limit


def _update_evaluation(evaluation: Evaluation | None, status: ParallelTrainingJobStatus) -> None:
    step = _count(evaluation.step) if evaluation is not None else None
    if evaluation is None or step is None or not math.isfinite(evaluation.loss):
        return
    loss = f"{evaluation.loss:.6g}"
    status.evaluation = EvaluationStatus(step=step, loss=loss, perplexity=f"{perplexity(evaluation.loss):.6g}")


def _update_checkpoint(observed: Observed, report: WorkerReport, status: ParallelTrainingJobStatus) -> None:
    commit = report.checkpoint
    if commit is None or (status.checkpoint is not None and status.checkpoint.step == commit.step):
        return
    reported = parse_time(commit.time)
    try:
        moment = reported if reported is not None and reported.year >= 1970 else observed.now  # noqa: PLR2004 - the epoch
        status.checkpoint = CheckpointStatus(step=commit.step, time=format_time(moment), path=commit.path)
    except (ValidationError, OverflowError):
        return


def _count(value: float) -> int | None:
    # Also rejects NaN and infinity.
    if not 0 <= value <= MAX_SAFE_INTEGER:
        return None
    return int(value)
