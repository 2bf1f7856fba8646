"""Stops a job that has to give its nodes back, and keeps it stopped as long as that is so.

Either a job of higher priority waits for its nodes, until that job has started. Or the queue that the job names has not
admitted it, or admits it no longer.

The ranks pause at a step and save a checkpoint while their pods stay. The pods are deleted once status has that
checkpoint. A job that cannot pause, because it saves no checkpoints or its agents do not answer, is stopped with the
grace period of its pods. If the reason goes away before the pods are deleted, the same pods train on.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.api import conditions as names
from meshwright.api.conditions import find
from meshwright.protocol.run_config import NativeRun
from meshwright_operator.decide import failure_detection, gang, lifecycle, resize, restart_policy
from meshwright_operator.decide.admission import QUEUE_UNAVAILABLE, WAITING_FOR_QUOTA
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.mesh_generation import rank_zero_worker
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.placement_outcome import PREEMPTED, WAITING_RETRY_SECONDS
from meshwright_operator.kube.job_event import NORMAL, WARNING
from meshwright_operator.text import counted, sentences
from meshwright_operator.timestamps import format_time, seconds_since

CHECK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a job must not run."""

    reason: str
    """Reason of the conditions."""
    why: str
    """The event when it is stopped."""
    ends: str
    """What ends, after `Saving a checkpoint, then`."""
    stopped: str
    """What a stopped job says."""


def reason_to_stop(observed: Observed) -> Stop | None:
    """Why the job must not run now. None if it may."""
    if other := observed.preempted_by:
        return Stop(
            PREEMPTED,
            f"Stopping job {observed.name} for job {other}, which waits and has a higher priority",
            f"stopping for job {other}",
            f"Stopped for job {other}, which has a higher priority",
        )
    admission = observed.admission
    if admission is None or admission.admitted or (admission.unavailable and observed.live_pods):
        return None
    reason = QUEUE_UNAVAILABLE if admission.unavailable else WAITING_FOR_QUOTA
    said = "evicted it" if admission.evicted else "has not admitted it"
    why = f"Stopping job {observed.name}, because its queue {said}"
    return Stop(reason, sentences(why, admission.message), "giving the quota back", admission.message)


def stop(decision: Decision) -> bool:
    """Does the next step toward stopping the job. Returns whether it must not run."""
    observed = decision.observed
    stop = reason_to_stop(observed)
    if stop is None:
        return False
    if observed.mesh.generation > 0 and not decision.mesh.pending_cause:
        if lifecycle.all_completed(observed) or failure_detection.detect(observed) is not None:
            return False  # what has happened to the ranks comes first
        _begin(decision, stop)
        if observed.spec.checkpoint is not None or observed.spec.runtime.command is not None:
            _hold(decision, stop, f"Saving a checkpoint, then {stop.ends}")
            return True
    elif decision.mesh.pending_cause == restart_policy.JOB_PREEMPTED.name and is_saving(observed):
        _hold(decision, stop, f"Saving a checkpoint, then {stop.ends}")
        return True
    _release(decision, stop)
    return True


def is_saving(observed: Observed) -> bool:
    """Whether ranks that were paused still save a checkpoint, or status does not have it yet."""
    if observed.live_pods and gang.saving_agents(observed):
        return True
    received = observed.agents.reports.get(rank_zero_worker(observed))
    if received is None or not received.report.paused or received.report.generation != observed.mesh.generation:
        return False
    step, checkpoint = observed.status.step, observed.status.checkpoint
    saved = received.report.checkpoint.step if received.report.checkpoint is not None else -1
    behind = step is not None and max(saved, checkpoint.step if checkpoint is not None else -1) < step
    limit = observed.spec.workers.termination_grace_period_seconds + gang.SAVE_MARGIN_SECONDS
    waited = seconds_since(observed.mesh.pending_since, observed.now)
    saves = observed.spec.checkpoint is not None and isinstance(observed.run, NativeRun)
    return saves and behind and waited < limit


def _begin(decision: Decision, stop: Stop) -> None:
    decision.add_cause_event(restart_policy.JOB_PREEMPTED, stop.why)
    decision.count_restart(restart_policy.JOB_PREEMPTED)
    decision.mesh.pending_cause = restart_policy.JOB_PREEMPTED.name
    decision.mesh.pending_since = format_time(decision.observed.now)


def _hold(decision: Decision, stop: Stop, message: str) -> None:
    """Reports that no ranks train, and that the pods stay or end."""
    observed = decision.observed
    elastic = decision.status.elastic
    if observed.joining and elastic is not None and elastic.next_placement is not None:
        resize.abandon_growth(decision, f"{_for_whom(observed)} needs its nodes", failed=False)
    decision.status.ready_ranks = f"0/{observed.plan.layout.world_size}"
    decision.status.tokens_per_second = decision.status.eta_seconds = None
    decision.job_state(stop.reason, message, stalled=stop.reason == QUEUE_UNAVAILABLE)
    decision.requeue_within(CHECK_SECONDS if observed.live_pods else WAITING_RETRY_SECONDS)


def _for_whom(observed: Observed) -> str:
    return f"job {observed.preempted_by}" if observed.preempted_by else "the queue"


def _release(decision: Decision, stop: Stop) -> None:
    """Deletes the pods, and waits until the job may run."""
    observed, status = decision.observed, decision.status
    if not decision.mesh.pending_cause:
        decision.mesh.pending_cause = restart_policy.START.name
    live = observed.live_pods
    placed = find(observed.status.conditions, names.PLACED)
    waits = placed is not None and placed.status == "False" and placed.reason == stop.reason
    if decision.mesh.pending_cause != restart_policy.JOB_PREEMPTED.name and live and not waits:
        decision.add_event(PREEMPTED, stop.why)
    elif not live and not waits and stop.reason != PREEMPTED:
        decision.add_event(stop.reason, stop.stopped, WARNING if stop.reason == QUEUE_UNAVAILABLE else NORMAL)
    resize.end(decision, f"{_for_whom(observed)} needs its nodes")
    if status.placement is not None and status.placement.spares:
        status.placement = status.placement.model_copy(update={"spares": []})
    if not live and stop.reason != PREEMPTED and status.active_since is not None:
        lifecycle.pause(status, observed.now)  # a queue's wait is a suspension, as for every kind of job that it knows
    checkpoint = status.checkpoint
    saved = f"Latest checkpoint: step {checkpoint.step}" if checkpoint is not None else ""
    text = sentences(stop.stopped, saved)
    decision.condition(names.PLACED, False, stop.reason, text)
    waiting = sentences(text, f"Waiting for {counted(len(live), 'pod')} to terminate") if live else text
    _hold(decision, stop, waiting)
    decision.delete += [pod for pod in live if not pod.deleting and pod not in decision.delete]
