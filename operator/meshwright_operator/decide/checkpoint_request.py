"""Requests for a checkpoint now: an annotation of the job asks, and the ranks save after their current step.

Each value of the annotation is one request, and `status.checkpointRequest` says what became of it. Only ranks that
train can save: the request of a job that does not run fails at once. Agents before 0.2 do not answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwright.api.status import CheckpointRequestStatus
from meshwright.protocol.messages import AgentState, WorkerReport
from meshwright.protocol.run_config import NativeRun
from meshwright_operator.decide import lifecycle
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.mesh_generation import rank_zero_report
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.report_interval import HEARD_SECONDS
from meshwright_operator.kube.job_event import WARNING
from meshwright_operator.text import sentences
from meshwright_operator.timestamps import format_time, seconds_since

REQUESTED, SAVED, FAILED = "Requested", "Saved", "Failed"
ANSWER_SECONDS = 60.0
"""Time for an agent to say that it has asked its ranks."""
POLL_SECONDS = 2.0
_ASKED = "The ranks save a checkpoint after their current step"
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,63}")


def update(decision: Decision) -> None:
    """Begins a new request, and updates the current one."""
    observed, current = decision.observed, decision.status.checkpoint_request
    asked = observed.checkpoint_request[:64]
    if asked and (current is None or current.request != asked):
        if not _waits_for_reports(observed):
            _begin(decision, asked)
        else:
            decision.requeue_within(POLL_SECONDS)
    elif current is not None and current.state == REQUESTED:
        _follow(decision, current)


def request_to_send(observed: Observed, current: CheckpointRequestStatus | None) -> str | None:
    """The request that the worker of rank 0 must receive."""
    waits = current is not None and current.state == REQUESTED and current.generation == observed.mesh.generation
    return current.request if current is not None and waits else None


def _begin(decision: Decision, asked: str) -> None:
    observed, problem = decision.observed, _problem(decision.observed)
    report = rank_zero_report(observed)
    done = report.progress.step if report is not None and report.progress is not None else decision.status.step
    current = CheckpointRequestStatus(
        request=asked,
        state=REQUESTED,
        time=format_time(observed.now),
        generation=observed.mesh.generation,
        step=done if done is not None and done >= 0 else None,
    )
    decision.status.checkpoint_request = current
    if problem:
        _fail(decision, current, problem)
        return
    current.message = _ASKED
    decision.add_event("CheckpointRequested", f"{current.message} (request {asked})")
    decision.requeue_within(POLL_SECONDS)


def _follow(decision: Decision, current: CheckpointRequestStatus) -> None:
    observed, report = decision.observed, rank_zero_report(decision.observed)
    answer = report.checkpoint_request if report is not None else None
    if answer is not None and answer.request != current.request:
        answer = None
    agreed = answer is not None and answer.step is not None and answer.step >= 0
    if answer is not None and agreed:
        current.step = answer.step
    ended = observed.mesh.generation != current.generation or _halted(observed)
    saved = decision.status.checkpoint
    if (agreed or ended) and saved is not None and current.step is not None and saved.step >= current.step:
        _complete(decision, current, saved.step)
    elif ended:
        _fail(decision, current, "the ranks stopped before they saved. Ask again once the job is Running")
    elif answer is None and seconds_since(current.time, observed.now) > ANSWER_SECONDS:
        why = "rank 0 did not answer. Worker images before 0.2 cannot: use one of the operator's release"
        _fail(decision, current, why)
    else:
        tiers = report.checkpoint_tiers if report is not None and agreed else []
        current.message = _waiting_message([tier.error for tier in tiers])
        decision.requeue_within(POLL_SECONDS)


def _waiting_message(errors: Sequence[str]) -> str:
    """What the request waits for. `errors` are those of the last save on each tier: one that works is enough."""
    if not errors or not all(errors):
        return _ASKED
    return sentences(f"No checkpoint can be saved: {errors[0]}", "The ranks try again when the next one is due")


def _complete(decision: Decision, current: CheckpointRequestStatus, step: int) -> None:
    current.state, current.step, current.message = SAVED, step, f"Saved the checkpoint of step {step}"
    decision.add_event("CheckpointRequestSaved", f"{current.message} (request {current.request})")


def _fail(decision: Decision, current: CheckpointRequestStatus, why: str) -> None:
    latest = decision.status.checkpoint
    more = f"The latest checkpoint is that of step {latest.step}" if latest is not None else "It has no checkpoint yet"
    current.state, current.step = FAILED, None
    current.message = f"No checkpoint was saved: {why}. {more}"
    decision.add_event("CheckpointNotSaved", f"{current.message} (request {current.request})", WARNING)


def _problem(observed: Observed) -> str:
    """Why nobody can be asked. Empty if the ranks train."""
    if not _VALUE.fullmatch(observed.checkpoint_request):
        return (
            "the value of the annotation must be 1 to 64 letters, digits and `-._:+`, and begin with a letter or "
            "digit: use the time, as `date -u +%FT%TZ` prints it"
        )
    if lifecycle.finished(observed.status):
        return "the job has finished"
    if observed.spec.checkpoint is None:
        return "the job has no `spec.checkpoint`"
    if not isinstance(observed.run, NativeRun):
        return "the ranks run `runtime.command`, which saves its own checkpoints"
    if observed.spec.suspend:
        return "the job is suspended"
    return "" if not _halted(observed) and _trains(rank_zero_report(observed)) else "the job is not Running"


def _halted(observed: Observed) -> bool:
    """Whether no ranks run, or they are being stopped."""
    over = lifecycle.finished(observed.status) or observed.spec.suspend
    return over or not observed.mesh.generation or bool(observed.mesh.pending_cause)


def _trains(report: WorkerReport | None) -> bool:
    return report is not None and report.state is AgentState.RUNNING and not report.paused


def _waits_for_reports(observed: Observed) -> bool:
    """Whether ranks may train of which the operator has not heard since it started."""
    recent = observed.agents.listening_seconds < HEARD_SECONDS
    return recent and not _halted(observed) and rank_zero_report(observed) is None
