"""Stops a preemptible job for a waiting job of higher priority, and keeps it stopped until that job has started.

The ranks pause at a step and save a checkpoint while their pods stay. The pods are deleted once status has that
checkpoint. A job that cannot pause, because it saves no checkpoints or its agents do not answer, is stopped with the
grace period of its pods. If the waiting job goes away before the pods are deleted, the same pods train on.
"""

from __future__ import annotations

from meshwright.api import conditions as names
from meshwright.api.conditions import find
from meshwright.protocol.run_config import NativeRun
from meshwright_operator.decide import failure_detection, gang, lifecycle, resize, restart_policy
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.mesh_generation import rank_zero_worker
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.placement_outcome import PREEMPTED, WAITING_RETRY_SECONDS
from meshwright_operator.text import counted, sentences
from meshwright_operator.timestamps import format_time, seconds_since

CHECK_SECONDS = 5.0


def stop(decision: Decision) -> bool:
    """Does the next step toward stopping the job for another one. Returns whether it has to stop."""
    observed = decision.observed
    if not observed.preempted_by:
        return False
    if observed.mesh.generation > 0 and not decision.mesh.pending_cause:
        if lifecycle.all_completed(observed) or failure_detection.detect(observed) is not None:
            return False  # what has happened to the ranks comes first
        _begin(decision)
        if observed.spec.checkpoint is not None or observed.spec.runtime.command is not None:
            _hold(decision, f"Saving a checkpoint, then stopping for job {observed.preempted_by}")
            return True
    elif decision.mesh.pending_cause == restart_policy.JOB_PREEMPTED.name and is_saving(observed):
        _hold(decision, f"Saving a checkpoint, then stopping for job {observed.preempted_by}")
        return True
    _release(decision)
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


def _begin(decision: Decision) -> None:
    observed = decision.observed
    decision.add_cause_event(restart_policy.JOB_PREEMPTED, _why(observed))
    decision.count_restart(restart_policy.JOB_PREEMPTED)
    decision.mesh.pending_cause = restart_policy.JOB_PREEMPTED.name
    decision.mesh.pending_since = format_time(observed.now)


def _why(observed: Observed) -> str:
    return f"Stopping job {observed.name} for job {observed.preempted_by}, which waits and has a higher priority"


def _hold(decision: Decision, message: str) -> None:
    """Reports that no ranks train, and that the pods stay or end."""
    observed = decision.observed
    if observed.joining and observed.status.elastic is not None and observed.status.elastic.next_placement is not None:
        resize.abandon_growth(decision, f"job {observed.preempted_by} needs its nodes", failed=False)
    decision.status.ready_ranks = f"0/{observed.plan.layout.world_size}"
    decision.status.tokens_per_second = decision.status.eta_seconds = None
    decision.job_state(PREEMPTED, message)
    decision.requeue_within(CHECK_SECONDS if observed.live_pods else WAITING_RETRY_SECONDS)


def _release(decision: Decision) -> None:
    """Deletes the pods, and waits until the other job has started."""
    observed, status = decision.observed, decision.status
    if not decision.mesh.pending_cause:
        decision.mesh.pending_cause = restart_policy.START.name
    live = observed.live_pods
    placed = find(observed.status.conditions, names.PLACED)
    waits = placed is not None and placed.status == "False" and placed.reason == PREEMPTED
    if decision.mesh.pending_cause != restart_policy.JOB_PREEMPTED.name and live and not waits:
        decision.add_event(PREEMPTED, _why(observed))
    if status.placement is not None and status.placement.spares:
        status.placement = status.placement.model_copy(update={"spares": []})
    checkpoint = status.checkpoint
    saved = f"Latest checkpoint: step {checkpoint.step}" if checkpoint is not None else ""
    text = sentences(f"Stopped for job {observed.preempted_by}, which has a higher priority", saved)
    decision.condition(names.PLACED, False, PREEMPTED, text)
    _hold(decision, sentences(text, f"Waiting for {counted(len(live), 'pod')} to terminate") if live else text)
    decision.delete += [pod for pod in live if not pod.deleting and pod not in decision.delete]
