"""Whether checkpoints are saved: `status.checkpointTiers`, and the condition `CheckpointHealthy` if one was not.

Rank 0 reports each tier. Saves that fail do not stop training, so somebody has to be told: what fails and why, that a
save takes too long, or that no newer checkpoint is there although several were due. Agents before 0.2 report no tiers:
of their jobs only the last is found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import ValidationError

from meshwright.api import conditions as names
from meshwright.api.checkpoint import CheckpointSpec
from meshwright.api.conditions import find
from meshwright.api.status import CheckpointTierStatus, ParallelTrainingJobStatus
from meshwright.printable import printable
from meshwright.protocol.messages import CheckpointTier, FailureHistory, WorkerReport
from meshwright.protocol.run_config import NativeRun
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.goodput import seconds_by_cause
from meshwright_operator.decide.mesh_generation import rank_zero_report
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.restart_policy import cause_named
from meshwright_operator.kube.job_event import WARNING
from meshwright_operator.text import sentences
from meshwright_operator.timestamps import format_time, parse_time, seconds_since

SAVE_FAILED, SAVE_SLOW, OVERDUE, SAVED = "SaveFailed", "SaveSlow", "CheckpointOverdue", "CheckpointSaved"
"""Reasons of the condition. The first three are events too, and `CheckpointsRecovered` is when it is True again."""
RECOVERED = "CheckpointsRecovered"
INTERVALS = 2
"""A checkpoint is overdue after this many intervals."""
SLACK_SECONDS = 120.0
"""Time that a checkpoint may take in addition to them."""
_IDLE_CAUSES = ("Queued", "Suspended")


@dataclass(frozen=True, slots=True)
class _Problem:
    reason: str
    message: str


def failure_history(observed: Observed, status: ParallelTrainingJobStatus) -> FailureHistory | None:
    """What ranks need for an interval that is `Auto`; None if none is."""
    checkpoint = observed.spec.checkpoint
    if checkpoint is None or not (checkpoint.interval_of().is_auto or checkpoint.interval_of(checkpoint.store).is_auto):
        return None
    spent = seconds_by_cause(status, observed.now)
    return FailureHistory(
        failures=sum(entry.count for entry in status.restarts if cause_named(entry.cause).is_failure),
        trained_seconds=round(sum(seconds for cause, seconds in spent.items() if cause not in _IDLE_CAUSES), 3),
        nodes=max(1, len({worker.node for worker in observed.workers if worker.node})),
    )


def report(decision: Decision) -> None:
    """Write the tiers to status, and say whether checkpoints are saved."""
    observed, received = decision.observed, rank_zero_report(decision.observed)
    spec = observed.spec.checkpoint
    if spec is None or received is None or not isinstance(observed.run, NativeRun):
        return
    tiers = [_with_commit(tier, received, spec) for tier in received.checkpoint_tiers]
    decision.status.checkpoint_tiers = [made for made in map(_status_of, tiers) if made] or None
    if observed.mesh.pending_cause:
        return
    problem = next(_problems(decision, spec, received, tiers), None)
    before = find(observed.status.conditions, names.CHECKPOINT_HEALTHY)
    failed = before is not None and before.status == "False"
    if problem is not None:
        if before is None or not failed or before.reason != problem.reason:
            decision.add_event(problem.reason, problem.message, WARNING)
        decision.condition(names.CHECKPOINT_HEALTHY, False, problem.reason, problem.message)
    elif before is not None and failed and _saved_since(before.last_transition_time, decision.status, tiers):
        saved = decision.status.checkpoint
        text = f"Checkpoints are saved again: the newest is that of step {saved.step if saved is not None else 0}"
        decision.add_event(RECOVERED, text)
        decision.condition(names.CHECKPOINT_HEALTHY, True, SAVED, text)


def _problems(
    decision: Decision, spec: CheckpointSpec, received: WorkerReport, tiers: Sequence[CheckpointTier]
) -> Iterator[_Problem]:
    newest = decision.status.checkpoint
    kept = f"The newest checkpoint is that of step {newest.step}" if newest is not None else "There is no checkpoint"
    for tier in tiers:
        if tier.error:
            since = _time(tier.failing_since)
            text = f"No checkpoint can be saved in {tier.place}{f' since {since}' if since else ''}: {tier.error}"
            yield _Problem(SAVE_FAILED, sentences(text, f"Training continues. {kept}"))
    for tier in tiers:
        if since := _time(tier.saving_since):
            text = f"The save in {tier.place} that began at {since} is not complete, and delays others"
            yield _Problem(SAVE_SLOW, sentences(text, f"Training continues. {kept}"))
    if (late := _overdue(decision, spec, received, tiers)) is not None:
        yield _Problem(OVERDUE, sentences(late, f"Training continues. {kept}"))


def _overdue(
    decision: Decision, spec: CheckpointSpec, received: WorkerReport, tiers: Sequence[CheckpointTier]
) -> str | None:
    """Why a newer checkpoint must have been there. Steps that stand still are not the fault of checkpoints."""
    status, progress, now = decision.status, received.progress, decision.observed.now
    if progress is None or not 0 < progress.step_seconds < SLACK_SECONDS * 1000:
        return None
    seconds = min((found for tier in tiers if (found := _interval(tier, progress.step_seconds))), default=None)
    if seconds is None and not tiers and spec.every is None:
        seconds = spec.interval * progress.step_seconds
    mesh = decision.observed.mesh
    last = status.checkpoint.time if status.checkpoint is not None else None
    began = max((text for text in (last, mesh.started_time) if text), key=lambda text: parse_time(text) or now)
    saved = status.checkpoint or status.resumed_from
    done = progress.step - (saved.step if saved is not None else 0)
    if seconds is None or not began:
        return None
    allowed = INTERVALS * seconds + SLACK_SECONDS
    # Each generation begins anew, because a start delays checkpoints. But ranks that recover from memory go on at their
    # step. If they restart often, no generation is long enough, so the steps since the checkpoint count too.
    unsaved_since = last or status.start_time or began
    stepping = min(done * progress.step_seconds, seconds_since(unsaved_since, now))
    passed = max(seconds_since(began, now), stepping)
    if passed < allowed:
        decision.requeue_within(allowed - passed + 1.0)
        return None
    if done * progress.step_seconds < INTERVALS * seconds:
        return None
    since = began if passed > stepping else unsaved_since
    return f"No checkpoint has become complete since {since}, although one is due every {seconds:.0f} s"


def _interval(tier: CheckpointTier, step_seconds: float) -> float | None:
    if tier.every_steps is not None:
        return tier.every_steps * step_seconds
    return tier.interval_seconds if tier.interval_seconds and 0 < tier.interval_seconds < float("inf") else None


def _saved_since(moment: str, status: ParallelTrainingJobStatus, tiers: Sequence[CheckpointTier]) -> bool:
    """Whether each tier has a checkpoint that is newer than the condition."""
    began = parse_time(moment)
    if began is None:
        return True
    if not tiers:
        return status.checkpoint is not None and seconds_since(moment, parse_time(status.checkpoint.time) or began) > 0
    return all(tier.saved_at is not None and tier.saved_at >= began.timestamp() for tier in tiers)


def _with_commit(tier: CheckpointTier, received: WorkerReport, spec: CheckpointSpec) -> CheckpointTier:
    """The tier with the latest checkpoint there. That is reported before the tier is; after the last step, the tier is
    not reported.
    """
    commit, evaluation = received.checkpoint, received.evaluation
    moment = parse_time(commit.time) if commit is not None else None
    newer = commit is not None and commit.path.startswith(tier.place) and commit.step > (tier.step or -1)
    if commit is None or moment is None or not newer:
        return tier
    saved: dict[str, object] = {"step": commit.step, "saved_at": moment.timestamp()}
    keeps_best = spec.retention_of(spec.store if "://" in tier.place else None).best is not None
    if keeps_best and evaluation is not None and evaluation.step == commit.step:
        is_best = tier.best_loss is None or evaluation.loss < tier.best_loss
        saved |= {"best_step": evaluation.step, "best_loss": evaluation.loss} if is_best else {}
    return tier.model_copy(update={**saved, "error": "", "failing_since": None, "saving_since": None})


def _status_of(tier: CheckpointTier) -> CheckpointTierStatus | None:
    """The tier for status. The numbers are from a user's pod: None if the API server would reject them."""
    step, loss = tier.best_step, tier.best_loss
    has_best = step is not None and loss is not None and math.isfinite(loss)
    try:
        return CheckpointTierStatus(
            place=tier.place,
            step=tier.step,
            time=_time(tier.saved_at) or None,
            every_steps=tier.every_steps,
            interval_seconds=round(tier.interval_seconds) if tier.interval_seconds is not None else None,
            reason=printable(tier.reason),
            error=printable(tier.error),
            best_step=step if has_best else None,
            best_loss=f"{loss:.6g}" if has_best else None,
        )
    except (ValidationError, OverflowError, ValueError):
        return None


def _time(seconds: float | None) -> str:
    """Seconds since 1970 as a time; empty if that is none."""
    try:
        return format_time(datetime.fromtimestamp(seconds, UTC)) if seconds is not None else ""
    except (OverflowError, ValueError, OSError):
        return ""
