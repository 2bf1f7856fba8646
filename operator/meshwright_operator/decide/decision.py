"""The decision on one job: what its status becomes and what is done next. Pure; the steps stand in their order."""

from __future__ import annotations

from datetime import datetime, timedelta

from meshwright.api import conditions as names
from meshwright.api.conditions import find, is_true
from meshwright.api.labels import LABEL_JOB
from meshwright.api.status import ParallelTrainingJobStatus, PlacementStatus
from meshwright.planner.placement import Placement
from meshwright_operator.clock import format_time, seconds_since
from meshwright_operator.decide import gang, lifecycle, progress, recovery
from meshwright_operator.decide.conditions import Situation, set_condition, set_situation
from meshwright_operator.decide.draft import Draft
from meshwright_operator.decide.mesh import form
from meshwright_operator.decide.observed import Observed, WorkerState, has_started
from meshwright_operator.events import WARNING

LOOK_AGAIN_SECONDS = 15.0
RETRY_PLACEMENT_SECONDS = 15.0
HOLD_SECONDS = 30.0
HOLD_RETRY_SECONDS = 3.0


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
    progress.note_progress(observed, draft.status)
    if observed.spec.suspend:
        _suspend(draft)
    elif observed.workers and all(w.state is WorkerState.SUCCEEDED for w in observed.workers) and _held(observed):
        draft.complete(_completion(draft))
    else:
        _resume(draft)
        _drive(draft)
    return draft


def _after_the_end(draft: Draft) -> None:
    """A finished job only waits to be deleted; what still runs of a failed one goes."""
    if is_true(draft.status.conditions, names.FAILED):
        draft.delete_live_pods()
    left = lifecycle.keep_left(draft.observed.spec, draft.status, draft.observed.now)
    draft.delete_job = left is not None and left <= 0
    draft.again_in(left)


def _held(observed: Observed) -> bool:
    """Whether the pods that ended well ran a generation of this very spec."""
    same = all(w.pod is not None and w.pod.revision == observed.revision for w in observed.workers)
    return observed.mesh.generation > 0 and same


def _completion(draft: Draft) -> str:
    steps = draft.status.total_steps
    return f"all ranks finished{f' {steps} steps' if steps else ''} in generation {draft.mesh.generation}"


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
    live = len(observed.live_pods)
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
        draft.condition(names.SUSPENDED, False, "Resumed")
        draft.note("Resumed", "spec.suspend is false again")


def _drive(draft: Draft) -> None:
    """Keeps the generation, or works toward the next one."""
    observed = draft.observed
    holding = observed.mesh.generation > 0 and not draft.mesh.pending_cause
    if holding:
        verdict = recovery.diagnose(observed)
        if verdict is None:
            _train(draft)
            return
        if isinstance(verdict, recovery.Settling):
            draft.again_in(verdict.seconds)
            return
        _break(draft, verdict)
        if verdict.lost:
            _starting(draft, verdict.message)
            return
    if lifecycle.finished(draft.status):
        return
    if not draft.mesh.pending_cause:
        draft.mesh.pending_cause = recovery.START
    draft.status.ready_ranks = f"0/{observed.plan.layout.world_size}"
    draft.status.tokens_per_second = draft.status.eta_seconds = None
    crashed = recovery.fresh_crashes(observed) if not holding else []
    if crashed and draft.over_limit():
        _exhausted(draft, recovery.crash_message(crashed))
        return
    _toward_generation(draft)


def _break(draft: Draft, verdict: recovery.Break) -> None:
    """The generation is over: counts that, says why, and fails the job if it happened too often."""
    event = {recovery.RANK_FAILURE: "RankFailed", recovery.SPEC_CHANGED: "SpecChanged"}.get(
        verdict.cause, verdict.cause
    )
    draft.note(event, verdict.message, WARNING if verdict.cause != recovery.SPEC_CHANGED else "Normal")
    if verdict.cause in recovery.COUNTED and draft.over_limit():
        _exhausted(draft, verdict.message)
        return
    draft.count_restart(verdict.cause)
    draft.mesh.pending_cause = verdict.cause
    # Whole seconds, rounded up: the pods that this verdict has seen ended before it.
    draft.mesh.pending_since = format_time(draft.observed.now + timedelta(seconds=1))
    draft.delete += [w.pod for w in verdict.lost if w.pod is not None and not w.pod.deleting]


def _exhausted(draft: Draft, message: str) -> None:
    limit = draft.observed.spec.recovery.max_restarts
    draft.note("RestartLimitReached", f"all {limit} restarts are used up (recovery.maxRestarts)", WARNING)
    draft.fail("RestartLimitReached", f"after {limit} restarts: {message}")


def _toward_generation(draft: Draft) -> None:
    draft.again_in(LOOK_AGAIN_SECONDS)
    cause = draft.mesh.pending_cause
    step = gang.next_step(draft.observed, cause)
    match step:
        case gang.Delete(pods, message):
            draft.delete += [pod for pod in pods if pod not in draft.delete]
            _starting(draft, f"stopping {len(pods)} {'pod' if len(pods) == 1 else 'pods'}: {message}")
        case gang.Wait(message, reason, seconds):
            _starting(draft, message, reason)
            draft.again_in(seconds)
        case gang.Place():
            draft.place = step
        case gang.Ungate(pods):
            draft.ungate += pods
            draft.note("GangStarted", f"all {len(draft.observed.workers)} pods hold their places")
            _starting(draft, "the gang starts")
        case gang.Form():
            draft.status.mesh = form(draft.observed, cause)
            _announce(draft)
            _starting(draft, f"generation {draft.mesh.generation} starts")


def _announce(draft: Draft) -> None:
    mesh, checkpoint = draft.mesh, draft.status.checkpoint
    number, layout = mesh.generation, draft.observed.plan.summary
    draft.note("MeshFormed", f"generation {number} ({mesh.cause}): {layout}, master {mesh.master}")
    if checkpoint is not None and number > 1:
        draft.note(
            "RestartingFromCheckpoint", f"generation {number} goes on from the checkpoint of step {checkpoint.step}"
        )


def _starting(draft: Draft, message: str, problem: str = "") -> None:
    cause = draft.mesh.pending_cause or draft.mesh.cause
    first = cause in ("", recovery.START, recovery.RESUME)
    text = message if first else f"{cause}: {message}"
    draft.situation(problem or ("Starting" if first else "Restarting"), text)


def _train(draft: Draft) -> None:
    """The generation holds: says how many ranks train."""
    observed, status = draft.observed, draft.status
    world = observed.plan.layout.world_size
    training, unknown = progress.count_ranks(observed)
    ready = find(status.conditions, names.READY)
    was_running = ready is not None and ready.status == "True" and ready.reason == "Running"
    if unknown and was_running:
        return
    status.ready_ranks = f"{training}/{world}"
    if training < world:
        _starting(draft, f"generation {draft.mesh.generation}: {training} of {world} ranks train")
    else:
        draft.situation("Running", f"{world} ranks train in generation {draft.mesh.generation}", ready=True)


def placed(draft: Draft, placement: Placement) -> None:
    """Takes a placement: new incarnations for the workers that need pods."""
    observed, status = draft.observed, draft.status
    assert draft.place is not None
    crashed = recovery.fresh_crashes(observed) if observed.mesh.pending_cause or not observed.mesh.generation else []
    if crashed:
        draft.count_restart(recovery.POD_FAILED)
        draft.note("PodFailed", recovery.crash_message(crashed), WARNING)
    if crashed or draft.mesh.pending_since is None:
        draft.mesh.pending_since = format_time(observed.now)
    incarnations = {worker.index: worker.incarnation for worker in observed.workers}
    floor = _floor(draft) if draft.mesh.pending_cause in (recovery.SPEC_CHANGED, recovery.RESUME) else -1
    for worker in draft.place.workers:
        incarnations[worker.index] = max(worker.incarnation, floor) + 1
    status.placement = placement.to_status(observed.name, incarnations)
    draft.create += [worker.index for worker in draft.place.workers]
    lifecycle.begin(status, observed.now)
    text = placement_text(status.placement)
    draft.condition(names.PLACED, True, "Placed", text)
    draft.note("Placed", text)
    count = len(draft.create)
    _starting(draft, f"making {count} {'pod' if count == 1 else 'pods'}")


def not_placed(draft: Draft, message: str, because_of_kept: bool) -> None:
    """There is no room: says so once, and lets go of pods that others could use meanwhile."""
    observed = draft.observed
    old = find(observed.status.conditions, names.PLACED)
    if old is None or old.status != "False":
        draft.note("PlacementFailed", message, WARNING)
    draft.condition(names.PLACED, False, "DoesNotFit", message)
    draft.situation("Placing", message)
    waited = seconds_since(draft.mesh.pending_since, observed.now)
    if not observed.live_pods:
        draft.again_in(RETRY_PLACEMENT_SECONDS)
    elif because_of_kept or waited >= HOLD_SECONDS:
        draft.delete_live_pods()
    else:
        draft.again_in(HOLD_RETRY_SECONDS)


def _floor(draft: Draft) -> int:
    """The highest incarnation of any worker, those of an earlier plan too: none may come again."""
    entries = draft.observed.status.placement.workers if draft.observed.status.placement else []
    known = [entry.incarnation for entry in entries] + [worker.incarnation for worker in draft.observed.workers]
    return max(known, default=-1)


def placement_text(placement: PlacementStatus) -> str:
    """The placement in one sentence."""
    nodes = {entry.node for entry in placement.workers}
    racks = {entry.rack for entry in placement.workers if entry.rack}
    where = f" in {len(racks)} {'rack' if len(racks) == 1 else 'racks'}" if racks else ""
    text = f"{len(placement.workers)} workers on {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}{where}"
    return f"{text}; cost {placement.cost or '0'}"


def rejected(
    old: ParallelTrainingJobStatus, generation: int, now: datetime, reason: str, message: str
) -> ParallelTrainingJobStatus:
    """The status of a job that cannot be acted on as its spec stands. Pods it may have are left alone."""
    status = old.model_copy(deep=True)
    status.observed_generation = generation
    set_situation(status, Situation(reason, message, stalled=True), generation, now)
    return status


def unplannable(
    old: ParallelTrainingJobStatus, generation: int, now: datetime, message: str
) -> ParallelTrainingJobStatus:
    """The status of a job for which this cluster, as it is, has no layout; another node may change that."""
    status = old.model_copy(deep=True)
    status.observed_generation = generation
    set_condition(status, names.PLACED, "False", "NoLayout", message, generation, now)
    set_situation(status, Situation("Placing", message), generation, now)
    return status
