"""The decision on one job: what its status becomes and what is done next. Pure; the steps stand in their order."""

from __future__ import annotations

from datetime import timedelta

from meshwright.api import conditions as names
from meshwright.api.conditions import find, is_true
from meshwright.api.failures import FailureAction
from meshwright.api.labels import LABEL_JOB
from meshwright.api.spec import CordonedNodes
from meshwright_operator.clock import format_time, seconds_since
from meshwright_operator.decide import (
    budget,
    gang,
    handover,
    hangs,
    lifecycle,
    placement,
    policy,
    progress,
    ranks,
    recovery,
)
from meshwright_operator.decide.applied import encode
from meshwright_operator.decide.conditions import still_holds
from meshwright_operator.decide.draft import Draft
from meshwright_operator.decide.mesh import form
from meshwright_operator.decide.observed import Observed, WorkerState, has_started
from meshwright_operator.events import WARNING
from meshwright_operator.words import counted

LOOK_AGAIN_SECONDS = 15.0
MOVE_AFTER_SECONDS = 30.0
MOVE_RETRY_SECONDS = 60.0


def decide(observed: Observed) -> Draft:
    """What to do with the job now."""
    draft = Draft.of(observed)
    if lifecycle.finished(observed.status):
        _after_the_end(draft)
        return draft
    left = lifecycle.deadline_left(observed.spec, observed.status, observed.now)
    if left is not None and left <= 0:
        seconds = observed.spec.active_deadline_seconds
        draft.fail("DeadlineExceeded", f"the job was active for longer than {seconds} s (activeDeadlineSeconds)")
        return draft
    draft.again_in(left)
    _take_plan(draft)
    _tell_held(draft)
    budget.refresh(draft.status, observed.spec.recovery, observed.now)
    progress.note_progress(observed, draft.status)
    if observed.spec.suspend:
        _suspend(draft)
    elif policy.succeeded(observed):
        draft.complete(_completion(draft))
    else:
        _resume(draft)
        _drive(draft)
    return draft


def _after_the_end(draft: Draft) -> None:
    """A finished job only waits to be deleted; what still runs of it goes."""
    still_holds(draft.status, draft.observed.generation)
    draft.delete_live_pods()
    left = lifecycle.keep_left(draft.observed.spec, draft.status, draft.observed.now)
    draft.delete_job = left is not None and left <= 0
    draft.again_in(left)


def _completion(draft: Draft) -> str:
    steps = draft.status.total_steps
    done = f" {counted(steps, 'step')}" if steps else ""
    return f"all ranks finished{done} in generation {draft.mesh.generation}"


def _take_plan(draft: Draft) -> None:
    """Puts the plan in status; another revision than the running one ends the generation."""
    observed, status = draft.observed, draft.status
    changed = status.plan is not None and status.plan.revision not in ("", observed.revision)
    plan = observed.plan.to_status()
    plan.revision = observed.revision
    if status.plan is None or changed or not has_started(status):
        status.plan = plan
    elif not status.plan.revision:
        status.plan.revision = observed.revision
    if changed:
        placement.start_afresh(draft)
    status.applied_spec = encode(observed.spec)
    status.selector = f"{LABEL_JOB}={observed.name}"
    status.replicas = observed.plan.layout.data
    if changed and observed.mesh.generation > 0 and not observed.mesh.pending_cause and not observed.spec.suspend:
        _break(draft, recovery.Break(recovery.SPEC_CHANGED, "the spec has changed"))
    elif changed and observed.mesh.generation > 0:
        draft.mesh.pending_cause = recovery.SPEC_CHANGED


def _suspend(draft: Draft) -> None:
    """Gives the pods back: they save a checkpoint on their way out."""
    observed, status = draft.observed, draft.status
    world = observed.plan.layout.world_size
    status.ready_ranks = f"0/{world}"
    status.tokens_per_second = status.eta_seconds = None
    if status.active_since is not None:
        lifecycle.pause(status, observed.now)
    if observed.mesh.generation > 0 and draft.mesh.pending_cause != recovery.RESUME:
        draft.mesh.pending_cause = recovery.RESUME
        draft.mesh.pending_since = format_time(observed.now)
    draft.delete_live_pods()
    # Nobody reaches a pod on a node that is down: it ends when the node is back, or is given up with it.
    lost = [w.pod for w in observed.workers if w.state is WorkerState.LOST]
    live = sum(pod not in lost for pod in observed.live_pods)
    if live:
        draft.situation("Suspending", f"waiting for {live} {'pod' if live == 1 else 'pods'} to save and end")
        return
    if not is_true(observed.status.conditions, names.SUSPENDED):
        draft.note("Suspended", _suspended_message(draft))
    draft.condition(names.SUSPENDED, True, "SuspendedByUser")
    draft.condition(names.PLACED, False, "Suspended")
    draft.situation("Suspended", "spec.suspend is true", ready=True)


def _suspended_message(draft: Draft) -> str:
    checkpoint = draft.status.checkpoint
    return "the job gave its pods back" + (f"; newest checkpoint: step {checkpoint.step}" if checkpoint else "")


def _resume(draft: Draft) -> None:
    if is_true(draft.observed.status.conditions, names.SUSPENDED):
        placement.start_afresh(draft)
        draft.condition(names.SUSPENDED, False, "Resumed")
        draft.note("Resumed", "spec.suspend is false again")


def _drive(draft: Draft) -> None:
    """Keeps the generation, or works toward the next one."""
    observed = draft.observed
    holding = observed.mesh.generation > 0 and not draft.mesh.pending_cause
    if holding:
        verdict = recovery.diagnose(observed) or hangs.diagnose(observed)
        if verdict is None:
            _train(draft)
            return
        if isinstance(verdict, recovery.Settling):
            _tell_ranks(draft, unsure=True)
            draft.again_in(verdict.seconds)
            return
        _break(draft, verdict)
        if verdict.lost and not lifecycle.finished(draft.status):
            draft.starting(verdict.message)
            return
    if lifecycle.finished(draft.status):
        return
    if not draft.mesh.pending_cause:
        draft.mesh.pending_cause = recovery.START
    draft.status.ready_ranks = f"0/{observed.plan.layout.world_size}"
    draft.status.tokens_per_second = draft.status.eta_seconds = None
    crashed = recovery.fresh_crashes(observed) if not holding else []
    if crashed and not _may_restart(draft, policy.codes_of_workers(crashed), recovery.crash_message(crashed)):
        return
    _toward_generation(draft)


def _break(draft: Draft, verdict: recovery.Break) -> None:
    """The generation is over: counts that, says why, and fails the job if it happened too often."""
    event = {recovery.RANK_FAILURE: "RankFailed", recovery.SPEC_CHANGED: "SpecChanged"}.get(
        verdict.cause, verdict.cause
    )
    draft.note(event, verdict.message, WARNING if verdict.cause != recovery.SPEC_CHANGED else "Normal")
    if policy.refused(draft.observed, verdict.cause):
        draft.fail("RunRefused", verdict.message)
        return
    codes = policy.codes_of(draft.observed, verdict.cause)
    if verdict.cause in recovery.COUNTED and not _may_restart(draft, codes, verdict.message):
        return
    draft.count_restart(verdict.cause, counted=policy.counts(draft.observed.spec, codes))
    draft.mesh.pending_cause = verdict.cause
    # Whole seconds, rounded up: the pods that this verdict has seen ended before it.
    draft.mesh.pending_since = format_time(draft.observed.now + timedelta(seconds=1))
    draft.delete += [w.pod for w in verdict.lost if w.pod is not None and not w.pod.deleting]


def _may_restart(draft: Draft, codes: set[int], message: str) -> bool:
    """Whether the job is started again after a failure with these exit codes; if not, it has failed."""
    action, why = policy.action_for(draft.observed.spec, codes)
    if action is FailureAction.FAIL_JOB:
        draft.fail("FailurePolicy", f"{message}; {why}")
    elif action is FailureAction.COUNT and draft.over_limit():
        _exhausted(draft, message)
    else:
        return True
    return False


def _exhausted(draft: Draft, message: str) -> None:
    limit = draft.observed.spec.recovery.max_restarts
    window = draft.observed.spec.recovery.restart_window_seconds
    spent = counted(limit, "restart") + (f" within {window} s" if window is not None else "")
    draft.note("RestartLimitReached", f"{spent} allowed (recovery.maxRestarts), and used up", WARNING)
    draft.fail("RestartLimitReached", f"after {spent}: {message}")


def _tell_held(draft: Draft) -> None:
    """Says once that an edit is held back and why, and looks again where that can help."""
    held = draft.observed.held
    if held is None:
        return
    ready = find(draft.observed.status.conditions, names.READY)
    if ready is None or ready.reason != held.reason or held.message not in ready.message:
        draft.note(held.reason, held.message, WARNING)
    if held.waits:
        draft.again_in(placement.RETRY_PLACEMENT_SECONDS)


def _toward_generation(draft: Draft) -> None:
    draft.again_in(LOOK_AGAIN_SECONDS)
    observed, cause = draft.observed, draft.mesh.pending_cause
    if observed.refusal is not None:
        placement.give_up(draft, gang.GiveUp(observed.refusal.reason, observed.refusal.message))
        return
    step = gang.next_step(observed, cause)
    if isinstance(step, gang.Place | gang.Wait | gang.GiveUp) and (pause := placement.retry_left(draft)) > 0:
        placement.held(draft, pause)
        return
    match step:
        case gang.Delete(pods, message):
            draft.delete += [pod for pod in pods if pod not in draft.delete]
            draft.starting(f"stopping {len(pods)} {'pod' if len(pods) == 1 else 'pods'}: {message}")
        case gang.Wait(message, reason, seconds):
            draft.starting(message, reason)
            draft.again_in(seconds)
        case gang.Place():
            if ranks.placed_elsewhere(observed):
                handover.hand_over(draft, step)
            else:
                draft.place = step
        case gang.Map():
            draft.map = step
        case gang.GiveUp():
            placement.give_up(draft, step)
        case gang.Ungate(pods):
            draft.ungate += pods
            draft.note("GangStarted", f"the whole gang holds its place: {counted(len(observed.workers), 'pod')}")
            draft.starting("the gang starts")
        case gang.Form():
            draft.status.mesh = form(draft.observed, cause, draft.mesh.failures)
            _announce(draft)
            draft.starting(f"generation {draft.mesh.generation} starts")


def _announce(draft: Draft) -> None:
    mesh, checkpoint = draft.mesh, draft.status.checkpoint
    number, layout = mesh.generation, draft.observed.plan.summary
    draft.note("MeshFormed", f"generation {number} ({mesh.cause}): {layout}, master {mesh.master}")
    if checkpoint is not None and number > 1:
        draft.note(
            "RestartingFromCheckpoint", f"generation {number} goes on from the checkpoint of step {checkpoint.step}"
        )


def _train(draft: Draft) -> None:
    """The generation holds: says how many ranks train."""
    _, unknown = progress.count_ranks(draft.observed)
    if _tell_ranks(draft, unsure=unknown > 0) and not unknown:
        _leave_nodes(draft)


def _tell_ranks(draft: Draft, *, unsure: bool) -> bool:
    """Says how many ranks train; whether all do.

    While that is `unsure` a job that trained is not said to have stopped: after a restart of the operator its agents
    are heard one by one, and a rank that failed is looked at only after a moment.
    """
    observed, status = draft.observed, draft.status
    world = observed.plan.layout.world_size
    training, _ = progress.count_ranks(observed)
    if unsure and status.ready_ranks == f"{world}/{world}":
        training = world
    status.ready_ranks = f"{training}/{world}"
    if training < world:
        draft.starting(f"generation {draft.mesh.generation}: {training} of {world} ranks train")
        return False
    trains = f"{counted(world, 'rank')} train{'s' if world == 1 else ''}"
    draft.situation("Running", f"{trains} in generation {draft.mesh.generation}", ready=True)
    return True


def _leave_nodes(draft: Draft) -> None:
    """Workers on nodes that are about to be emptied move while there is time to save: nobody has to evict them."""
    observed = draft.observed
    leaving = tuple(w for w in observed.workers if w.node_leaving and not w.node_down)
    spec = observed.spec
    if ranks.placed_elsewhere(observed):
        return  # only its own scheduler knows whether there is room elsewhere
    if not leaving or spec.recovery.cordoned_nodes is CordonedNodes.STAY or spec.checkpoint is None:
        return
    trained = seconds_since(observed.mesh.started_time, observed.now)
    if trained < MOVE_AFTER_SECONDS:
        draft.again_in(MOVE_AFTER_SECONDS - trained)
        return
    draft.move = gang.Place(leaving, {w.index: w.node for w in observed.workers if w not in leaving})
    draft.again_in(MOVE_RETRY_SECONDS)
