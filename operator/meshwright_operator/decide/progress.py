"""How training stands, from the agents' reports, in the form and within the bounds of the job's status.

Reports come from a tenant's pod: a number out of bounds is left out here, so that the API server never refuses the
whole status because of it.
"""

from __future__ import annotations

import math

from pydantic import ValidationError

from meshwright.api.status import CheckpointStatus, EvaluationStatus, ParallelTrainingJobStatus
from meshwright.perplexity import perplexity
from meshwright.protocol import Evaluation, Progress, WorkerReport
from meshwright.protocol import WorkerState as AgentState
from meshwright_operator.clock import format_time, parse_time
from meshwright_operator.decide.observed import Observed, WorkerState
from meshwright_operator.decide.ranks import leader

LARGEST = (1 << 53) - 1

THROTTLED = ("step", "loss", "tokens_per_second", "eta_seconds", "evaluation", "checkpoint")
"""Fields of status that only tell progress: written at most every few seconds."""


def note_progress(observed: Observed, status: ParallelTrainingJobStatus) -> None:
    """Takes step, loss, evaluation, checkpoint and so on from the last report of rank 0's worker of this generation."""
    training = observed.spec.training
    status.total_steps = training.steps if training is not None else None
    heard = observed.agents.reports.get(leader(observed))
    if heard is None or heard.report.generation != observed.mesh.generation:
        return
    if heard.report.progress is not None:
        _note_step(heard.report.progress, status)
    _note_evaluation(heard.report.evaluation, status)
    _note_checkpoint(observed, heard.report, status)


def count_ranks(observed: Observed) -> tuple[int, int]:
    """Ranks that train, and ranks whose agent has not been heard since the operator started."""
    training = unknown = 0
    for worker in observed.workers:
        ranks = observed.plan.gpus_per_worker
        heard = observed.agents.reports.get(worker.index)
        if worker.state is WorkerState.SUCCEEDED:
            training += ranks
        elif worker.state is not WorkerState.RUNNING:
            continue
        elif heard is None or (heard.report.generation, heard.report.incarnation) != (
            observed.mesh.generation,
            worker.incarnation,
        ):
            unknown += 0 if heard is not None else ranks
        elif heard.report.state in (AgentState.RUNNING, AgentState.COMPLETE):
            training += ranks
    return training, unknown


def _note_step(progress: Progress, status: ParallelTrainingJobStatus) -> None:
    step = _count(progress.step)
    if step is None:
        return
    status.step = step
    status.loss = f"{progress.loss:.6g}"[:32]
    status.tokens_per_second = _count(progress.tokens_per_second)
    left = (status.total_steps - step) if status.total_steps is not None else None
    status.eta_seconds = _count(left * progress.step_seconds) if left is not None else None


def _note_evaluation(evaluation: Evaluation | None, status: ParallelTrainingJobStatus) -> None:
    step = _count(evaluation.step) if evaluation is not None else None
    if evaluation is None or step is None or not math.isfinite(evaluation.loss):
        return
    loss = f"{evaluation.loss:.6g}"
    status.evaluation = EvaluationStatus(step=step, loss=loss, perplexity=f"{perplexity(evaluation.loss):.6g}")


def _note_checkpoint(observed: Observed, report: WorkerReport, status: ParallelTrainingJobStatus) -> None:
    commit = report.checkpoint
    if commit is None or (status.checkpoint is not None and status.checkpoint.step == commit.step):
        return
    told = parse_time(commit.time)
    try:
        moment = told if told is not None and told.year >= 1970 else observed.now  # noqa: PLR2004 - the epoch
        status.checkpoint = CheckpointStatus(step=commit.step, time=format_time(moment), path=commit.path)
    except (ValidationError, OverflowError):
        return


def _count(value: float) -> int | None:
    # Neither a number that is none nor one beyond any float passes.
    if not 0 <= value <= LARGEST:
        return None
    return int(value)
