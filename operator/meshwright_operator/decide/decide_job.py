"""The decision about one job: its next status, and the actions that follow. Pure functions."""

from __future__ import annotations

from datetime import timedelta

from meshwright.api import conditions as names
from meshwright.api.conditions import find, is_true
from meshwright.api.labels import LABEL_JOB
from meshwright.api.spec import FailureAction
from meshwright.api.status import added
from meshwright.memory_recovery import describe
from meshwright.protocol.messages import MemoryRecovery
from meshwright.protocol.run_config import NativeRun
from meshwright_operator.decide import (
    checkpoint_health,
    checkpoint_request,
    failure_detection,
    gang,
    gang_actions,
    in_memory,
    last_failure,
    lifecycle,
    mesh_generation,
    placement_outcome,
    pod_gates,
    preempted_job,
    preflight,
    progress,
    replica_groups,
    resize,
    restart_policy,
    resumed_from,
    size_status,
    stage_balance,
    starting_workers,
    stuck_pods,
    suspect_nodes,
    training_state,
)
from meshwright_operator.decide.applied_spec import updated_applied_spec
from meshwright_operator.decide.conditions import update_observed_generation
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.mesh_generation import next_generation
from meshwright_operator.decide.observed import Observed, PodState, has_started
from meshwright_operator.decide.restart_policy import Interruption, Undetermined
from meshwright_operator.decide.succeeded_workers import format_workers
from meshwright_operator.kube.job_event import NORMAL, WARNING
from meshwright_operator.text import capitalized, counted, sentences
from meshwright_operator.timestamps import format_time, parse_time

REQUEUE_SECONDS = 15.0
RESULT_LOST = "ResultLost"
"""Reason of a finished job of which nobody knows whether it completed or failed."""
CLOCK_SKEW_SECONDS = 30.0
"""A time in status that is later than this after now is from a clock that was set back since."""


def decide(observed: Observed) -> Decision:
    """Return the job's next status and the actions to do now."""
    decision = Decision.of(observed)
    decision.status.waiting_edit = observed.waiting_edit
    last_failure.add_evidence(observed, decision.status)
    checkpoint_request.update(decision)
    if lifecycle.finished(observed.status):
        _clean_up_finished(decision)
        return decision
    completed = not observed.mesh.pending_cause and lifecycle.all_completed(observed)
    succeeded = _succeeded(observed)
    left = lifecycle.deadline_left(observed.spec, observed.status, observed.now)
    if not (succeeded or completed):  # what the ranks have completed is not lost while their pods exit
        if left is not None and left <= 0:
            _fail_on_deadline(decision)
            return decision
        decision.requeue_within(left)
    _adopt_plan(decision)
    _report_blocked_edit(decision)
    restart_policy.drop_expired(decision.status, observed.spec.recovery, observed.now)
    progress.update_progress(observed, decision.status)
    resumed_from.report(decision)
    checkpoint_health.report(decision)
    preflight.report(decision)
    suspect_nodes.forget(observed, decision.status)
    _block_nodes(decision)
    decision.delete += [pod for worker in observed.workers for pod in worker.obsolete_pods]
    _record_succeeded_workers(decision)
    if succeeded:
        decision.complete(_completion(decision))
    elif observed.spec.suspend and not completed:
        _suspend(decision)
    elif _exit_overdue(decision):
        _complete_without_exit(decision)
    else:
        _resume(decision)
        # A job that has another size now must not form a generation of the former one.
        if not preempted_job.stop(decision) and not resize.update_size(decision):
            _advance_generation(decision)
    return decision


def _succeeded(observed: Observed) -> bool:
    """Whether the job has succeeded, also if it is to be suspended now.

    While it is suspended, the pods that prove its success may be removed. Pods that were deleted to suspend it prove
    nothing.
    """
    return lifecycle.succeeded(observed) and not (observed.spec.suspend and bool(observed.mesh.pending_cause))


def _fail_on_deadline(decision: Decision) -> None:
    seconds = decision.observed.spec.active_deadline_seconds
    text = f"The job was active for longer than `spec.activeDeadlineSeconds` ({seconds})"
    decision.fail("DeadlineExceeded", text)


def _block_nodes(decision: Decision) -> None:
    suspects = suspect_nodes.blocked(decision.observed, decision.status)
    decision.requeue_within(suspect_nodes.seconds_until_used(decision.observed, decision.status))
    decision.blocked_nodes = {**suspects, **stuck_pods.nodes_to_avoid(decision.observed.stuck_pods)}


def _clean_up_finished(decision: Decision) -> None:
    """Deletes a finished job's live pods, and the job itself once its time to live is over."""
    if not lifecycle.has_result(decision.status):
        _report_lost_result(decision)
    update_observed_generation(decision.status, decision.observed.generation)
    resize.end(decision, "it has ended")
    decision.delete_live_pods()
    observed = decision.observed
    left = lifecycle.ttl_left(observed.spec, decision.status, observed.now, observed.default_ttl)
    decision.delete_job = left is not None and left <= 0
    decision.requeue_within(left)


def _report_lost_result(decision: Decision) -> None:
    """Reports that a job has finished, and that somebody removed the condition with the result."""
    text = f"The job finished at {decision.status.completion_time}, and its conditions were removed since"
    for kind in (names.COMPLETE, names.FAILED):
        decision.unknown_condition(kind, RESULT_LOST, text)
    decision.job_state(RESULT_LOST, text, stalled=True, unknown=True, final=True)


def _completion(decision: Decision) -> str:
    steps, reached = decision.status.total_steps, decision.status.step
    if not isinstance(decision.observed.run, NativeRun):
        return f"All ranks completed training in generation {decision.mesh.generation}"
    if steps and reached is not None and reached > steps:
        # An edit lowered `training.steps` below the step that the checkpoint has: nothing was left to do.
        end = f"All ranks had completed {counted(reached, 'step')} already, more than `spec.training.steps` ({steps})"
        return f"{end}: training ended in generation {decision.mesh.generation}"
    done = f" {counted(steps, 'step')}" if steps else ""
    return f"All ranks completed{done or ' training'} in generation {decision.mesh.generation}"


def _adopt_plan(decision: Decision) -> None:
    """Writes the plan to status. If the revision changed, ends the generation."""
    observed, status = decision.observed, decision.status
    changed = status.plan is not None and status.plan.revision not in ("", observed.revision)
    plan = observed.plan.to_status()
    plan.revision = observed.revision
    if status.plan is None or changed or not has_started(status):
        status.plan = plan
    elif not status.plan.revision:
        status.plan.revision = observed.revision
    if changed:
        resize.forget_growth(decision)
    edited = observed.generation != observed.status.observed_generation
    if changed or (edited and observed.mesh.retry_time is not None):
        placement_outcome.reset_attempts(decision)
    spec = observed.elastic or observed.spec
    if observed.own_workers is not None:
        spec = spec.model_copy(update={"workers": observed.own_workers})
    status.applied_spec = updated_applied_spec(observed.status, spec, observed.revision)
    status.selector = f"{LABEL_JOB}={observed.name}"
    status.replicas = observed.plan.layout.data
    if changed and observed.mesh.generation > 0 and not observed.mesh.pending_cause and not observed.spec.suspend:
        _end_generation(
            decision, Interruption(restart_policy.SPEC_CHANGED, "The spec has changed. Restarting all workers")
        )
    elif changed and observed.mesh.generation > 0:
        decision.mesh.pending_cause = restart_policy.SPEC_CHANGED.name


def _record_succeeded_workers(decision: Decision) -> None:
    """Writes to status which workers have succeeded in the current generation, before anything is done about it."""
    observed = decision.observed
    if observed.mesh.generation > 0 and not decision.mesh.pending_cause:
        succeeded = (worker.index for worker in observed.workers if worker.completed)
        decision.mesh.succeeded_workers = format_workers(succeeded)
        since = parse_time(decision.mesh.completed_time)
        if since is None or since > observed.now + timedelta(seconds=CLOCK_SKEW_SECONDS):
            since = observed.now
        decision.mesh.completed_time = format_time(since) if lifecycle.all_completed(observed) else None
    elif decision.status.mesh is not None:
        decision.mesh.succeeded_workers = ""
        decision.mesh.completed_time = None


def _exit_overdue(decision: Decision) -> bool:
    """Whether all ranks have completed, but pods have not exited in time: a sidecar or a hung agent keeps them."""
    left = lifecycle.exit_left(decision.status, decision.observed.now)
    if left is not None and left > 0:
        decision.requeue_within(left)
    return left is not None and left <= 0


def _complete_without_exit(decision: Decision) -> None:
    """Completes the job, and deletes the pods that have not exited."""
    running = [pod.name for pod in decision.observed.live_pods]
    more = f" and {len(running) - 3} more" if len(running) > 3 else ""
    which = f"pod {', '.join(running[:3])}{more} did not exit within {lifecycle.EXIT_SECONDS:.0f} s and will be deleted"
    decision.add_event("PodsDoNotExit", capitalized(which), WARNING)
    decision.complete(sentences(_completion(decision), capitalized(which)))


def _suspend(decision: Decision) -> None:
    """Deletes the pods, which save a checkpoint before they exit."""
    observed, status = decision.observed, decision.status
    world = observed.plan.layout.world_size
    resize.end(decision, "it is suspended")
    status.ready_ranks = f"0/{world}"
    status.tokens_per_second = status.eta_seconds = None
    if status.active_since is not None:
        lifecycle.pause(status, observed.now)
    if observed.mesh.generation > 0 and decision.mesh.pending_cause != restart_policy.RESUME.name:
        decision.mesh.pending_cause = restart_policy.RESUME.name
        decision.mesh.pending_since = format_time(observed.now)
    decision.delete_live_pods()
    # No kubelet stops a pod on a node that is down: do not wait for it.
    lost = [w.pod for w in observed.workers if w.state is PodState.LOST]
    live = sum(pod not in lost for pod in observed.live_pods)
    if live:
        waits = [stuck_pods.seconds_until_stuck(pod, observed.now) for pod in observed.live_pods]
        decision.requeue_within(min((seconds for seconds in waits if seconds), default=None))
        decision.job_state("Suspending", f"Waiting for {counted(live, 'pod')} to save a checkpoint and exit")
        return
    if not is_true(observed.status.conditions, names.SUSPENDED):
        unsaved = _unsaved_steps(decision)
        level = WARNING if unsaved else NORMAL
        decision.add_event("Suspended", sentences(_suspended_message(decision), unsaved), level)
    decision.condition(names.SUSPENDED, True, "SuspendedByUser")
    decision.condition(names.PLACED, False, "Suspended")
    stuck = stuck_pods.describe(observed.stuck_pods)
    decision.job_state("Suspended", sentences("`spec.suspend` is true", stuck), ready=True)


def _suspended_message(decision: Decision) -> str:
    checkpoint = decision.status.checkpoint
    saved = f"Latest checkpoint: step {checkpoint.step}" if checkpoint else ""
    return sentences("All pods have exited", saved)


def _unsaved_steps(decision: Decision) -> str:
    """Which steps are lost, because checkpoints could not be saved. Empty if none is known to be."""
    status, known = decision.status, find(decision.status.conditions, names.CHECKPOINT_HEALTHY)
    saved = status.checkpoint.step if status.checkpoint is not None else 0
    if known is None or known.status != "False" or (status.step or 0) <= saved:
        return ""
    return f"Steps {saved + 1} to {status.step} could not be saved, and will be repeated"


def _resume(decision: Decision) -> None:
    if is_true(decision.observed.status.conditions, names.SUSPENDED):
        placement_outcome.reset_attempts(decision)
        decision.condition(names.SUSPENDED, False, "Resumed")
        decision.add_event("Resumed", "`spec.suspend` is false")


def _advance_generation(decision: Decision) -> None:
    """Checks the generation for failures, or works toward the next one."""
    observed = decision.observed
    if decision.mesh.pending_cause == restart_policy.RESCALED.name and not observed.mesh.pending_cause:
        return  # the job has another size now: its pods follow from the new status
    generation_runs = observed.mesh.generation > 0 and not decision.mesh.pending_cause
    if generation_runs:
        verdict = _interruption(decision)
        if verdict is None:
            return
        _end_generation(decision, verdict)
        _block_nodes(decision)
        if verdict.cause is restart_policy.REBALANCED or _needs_correction(observed, verdict):
            return  # with other layers, the ranks' run follows from the new status
        if verdict.lost and not lifecycle.finished(decision.status):
            decision.starting(verdict.message)
            return
    if lifecycle.finished(decision.status):
        return
    if not decision.mesh.pending_cause:
        decision.mesh.pending_cause = restart_policy.START.name
    if observed.joining:
        if resize.take_over(decision) or starting_workers.continue_without_lost(decision):
            return  # the job's workers follow from the new status
        if not starting_workers.keep(decision):
            resize.abandon_growth(decision, "the job restarts", failed=False)
    _repair_pending_since(decision)
    decision.status.ready_ranks = f"0/{observed.plan.layout.world_size}"
    decision.status.tokens_per_second = decision.status.eta_seconds = None
    crashed = failure_detection.uncounted_crashes(observed) if not generation_runs else []
    codes = restart_policy.worker_exit_codes(crashed)
    if crashed and not _may_restart(decision, codes, failure_detection.crash_message(crashed)):
        return
    _start_generation(decision)


def _interruption(decision: Decision) -> Interruption | None:
    """What ends the generation that runs. None if it goes on, or while that is not certain."""
    observed = decision.observed
    verdict = failure_detection.detect(observed)
    if verdict is None:
        if not training_state.report_training(decision):
            return None
        resize.report_training(decision)
        return stage_balance.rebalance(decision)
    if isinstance(verdict, Undetermined):
        training_state.report_ready_ranks(decision, unsure=True)
        decision.requeue_within(verdict.seconds)
        return None
    return suspect_nodes.judge(decision, verdict)


def _repair_pending_since(decision: Decision) -> None:
    """Every wait for pods ends some time after `pendingSince`, so it must be set, and not be in the future."""
    since = parse_time(decision.mesh.pending_since)
    now = decision.observed.now
    if decision.observed.live_pods and (since is None or since > now + timedelta(seconds=CLOCK_SKEW_SECONDS)):
        decision.mesh.pending_since = format_time(now)


def _end_generation(decision: Decision, verdict: Interruption) -> None:
    """Ends the generation: counts the restart, posts the cause, and fails the job if it reached its restart limit."""
    cause = verdict.cause
    decision.detection_seconds = verdict.detected_in
    decision.add_cause_event(cause, verdict.message)
    last_failure.record(decision, verdict)
    codes = cause.exit_codes(decision.observed)
    if _needs_correction(decision.observed, verdict):
        _hold(decision, verdict)
        return
    if cause.limited and not _may_restart(decision, codes, verdict.message):
        return
    decision.count_restart(cause, codes)
    decision.mesh.pending_cause = cause.name
    # Whole seconds, rounded up: pods that this verdict has counted ended before this time.
    decision.mesh.pending_since = format_time(decision.observed.now + timedelta(seconds=1))
    decision.delete += [w.pod for w in verdict.lost if w.pod is not None and not w.pod.deleting]


def _needs_correction(observed: Observed, verdict: Interruption) -> bool:
    """Whether another start would fail in the same way. A rule for the exit code of a user's command precedes."""
    if not verdict.job_failure or isinstance(observed.run, NativeRun):
        return bool(verdict.job_failure)
    return not restart_policy.action_for(observed.spec, verdict.cause.exit_codes(observed))[1]


def _hold(decision: Decision, verdict: Interruption) -> None:
    """Releases the pods of a job whose ranks cannot start, and tries again later, or at once after an edit.

    Somebody can correct the spec or what it names. Its checkpoint, if it has one, belongs to this object: if the job
    failed, a corrected one would start at step 0.
    """
    restart_policy.record_failure(decision.mesh, decision.observed.now)
    decision.mesh.pending_cause = verdict.cause.name
    decision.mesh.pending_since = format_time(decision.observed.now + timedelta(seconds=1))
    decision.mesh.attempts = decision.mesh.failures - 1  # a start that ranks reject resets it
    decision.status.ready_ranks = f"0/{decision.observed.plan.layout.world_size}"
    decision.status.tokens_per_second = decision.status.eta_seconds = None
    placement_outcome.end_attempt(decision, gang_actions.EndAttempt(verdict.job_failure, verdict.message))
    decision.delete.clear()
    decision.delete_live_pods()


def _may_restart(decision: Decision, codes: set[int], message: str) -> bool:
    """Whether the job restarts after a failure with these exit codes. If not, this fails the job."""
    action, why = restart_policy.action_for(decision.observed.spec, codes)
    if action is FailureAction.FAIL_JOB:
        decision.fail("FailurePolicy", sentences(message, why))
    elif action is FailureAction.COUNT and decision.over_limit():
        _fail_on_restart_limit(decision, message)
    else:
        return True
    return False


def _fail_on_restart_limit(decision: Decision, message: str) -> None:
    limit = decision.observed.spec.recovery.max_restarts
    window = decision.observed.spec.recovery.restart_window_seconds
    allowed = f"allowed by `recovery.maxRestarts`{f' within {window} s' if window is not None else ''}"
    used = f"All {limit} restarts {allowed} are used" if limit > 1 else f"The only restart {allowed} is used"
    text = used if limit else "`recovery.maxRestarts` allows no restart"
    decision.add_event("RestartLimitReached", text, WARNING)
    decision.fail("RestartLimitReached", sentences(message, text))


def _report_blocked_edit(decision: Decision) -> None:
    """Posts one event with the reason why an edit is blocked, and requeues the job if the edit may fit later."""
    blocked_edit = decision.observed.blocked_edit
    if blocked_edit is None:
        return
    ready = find(decision.observed.status.conditions, names.READY)
    if ready is None or ready.reason != blocked_edit.reason or sentences(blocked_edit.message) not in ready.message:
        decision.add_event(blocked_edit.reason, blocked_edit.message, WARNING)
    if blocked_edit.retryable:
        decision.requeue_within(blocked_edit.retry_seconds)


def _start_generation(decision: Decision) -> None:
    observed, cause = decision.observed, decision.mesh.pending_cause
    if observed.rejection is not None:
        placement_outcome.end_attempt(
            decision, gang_actions.EndAttempt(observed.rejection.reason, observed.rejection.message)
        )
        return
    if pod_gates.release(decision):
        return
    action = gang.next_action(starting_workers.without_kept(decision), cause)
    if not isinstance(action, gang_actions.Place) or mesh_generation.uses_external_scheduler(observed):
        decision.requeue_within(REQUEUE_SECONDS)
    if (
        isinstance(action, gang_actions.Place | gang_actions.Wait | gang_actions.EndAttempt)
        and (pause := placement_outcome.retry_left(decision)) > 0
    ):
        placement_outcome.wait_for_retry(decision, pause)
        return
    _take(decision, action)


def _take(decision: Decision, action: gang_actions.GangAction) -> None:
    """Decides what the gang's next action asks for."""
    observed = decision.observed
    match action:
        case gang_actions.Delete(pods, why):
            decision.delete += [pod for pod in pods if pod not in decision.delete]
            decision.avoid |= action.avoid
            if action.replaces_agents:
                decision.mesh.agent_replacements = added(decision.mesh.agent_replacements)
                decision.avoid_seconds = placement_outcome.AVOID_FAILED_NODE_SECONDS
            decision.starting(f"Deleting {counted(len(pods), 'pod')}, because {why}")
        case gang_actions.Wait(message, reason, seconds):
            decision.starting(message, reason)
            decision.requeue_within(seconds)
            if reason == pod_gates.SCHEDULING_GATED:
                pod_gates.hold(decision)
        case gang_actions.Place():
            if mesh_generation.uses_external_scheduler(observed):
                placement_outcome.create_unbound_pods(decision, action)
            else:
                decision.place = action
        case gang_actions.MapRanks():
            decision.map_ranks = action
        case gang_actions.EndAttempt():
            placement_outcome.end_attempt(decision, action)
        case gang_actions.Ungate(pods):
            decision.ungate += pods
            count = len(observed.workers)
            text = f"All {count} pods have a node; removed their scheduling gates"
            single = "The pod has a node; removed its scheduling gate"
            decision.add_event("GangStarted", text if count > 1 else single)
            decision.starting(f"Starting {counted(count, 'pod')}")
        case gang_actions.FormGeneration():
            _form_generation(decision)


def _form_generation(decision: Decision) -> None:
    observed = decision.observed
    replans = size_status.is_replanning(decision.status)
    cause = restart_policy.RESCALED.name if replans else decision.mesh.pending_cause
    recovery = in_memory.plan(observed, cause)
    decision.status.mesh = next_generation(observed, cause, decision.mesh.failures)
    decision.mesh.in_memory = in_memory.layout(observed)
    decision.mesh.copies = in_memory.copies(observed)
    decision.mesh.node_check = suspect_nodes.needs_check(observed, decision.status, cause) or None
    if isinstance(recovery, MemoryRecovery):
        decision.mesh.recovery = in_memory.to_status(recovery)
    _announce(decision, recovery)
    decision.starting(f"Starting generation {decision.mesh.generation}")


def _announce(decision: Decision, recovery: MemoryRecovery | str | None) -> None:
    mesh, checkpoint = decision.mesh, decision.status.checkpoint
    going_on = replica_groups.going_on(mesh)
    number, layout = mesh.generation, decision.observed.plan.summary
    decision.add_event("MeshFormed", f"Formed generation {number} ({mesh.cause}): {layout}, master {mesh.master}")
    if going_on:
        decision.add_event("ReplicaGroupsRestarting", replica_groups.describe(mesh))
        return
    if isinstance(recovery, MemoryRecovery):
        decision.add_event("RecoveringInMemory", describe(decision.observed.run, recovery))
        return
    if recovery:
        text = f"{capitalized(recovery)}: the ranks cannot continue from the state in memory"
        decision.add_event("MemoryLost", text, WARNING)
    if decision.observed.spec.recovery.in_memory and not mesh.in_memory:
        text = f"`recovery.inMemory` has no effect: {in_memory.unavailable(decision.observed)}"
        decision.add_event("InMemoryUnavailable", text, WARNING)
    elif mesh.in_memory and (why := in_memory.cannot_continue_why(decision.observed)):
        text = f"`recovery.onReplicaLoss: Continue` has no effect: {why}"
        decision.add_event("InMemoryUnavailable", text, WARNING)
    if checkpoint is not None and number > 1:
        text = f"Restarting from the checkpoint of step {checkpoint.step} (generation {number})"
        decision.add_event("RestartingFromCheckpoint", text)
