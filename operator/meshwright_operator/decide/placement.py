"""What a placement, the lack of one, or a start that came to nothing does to the job.

The rule behind all of it: a gang that cannot start holds nothing for long. Pods that do not train yet are let go at
once, survivors of a lost pod after `HOLD_SECONDS`, and the next attempt comes after a pause that doubles.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from meshwright.api import conditions as names
from meshwright.api.conditions import find
from meshwright.api.status import PlacementStatus
from meshwright.planner.placement import Placement
from meshwright_operator.clock import format_time, parse_time, seconds_since
from meshwright_operator.decide import lifecycle, policy, recovery
from meshwright_operator.decide.draft import Draft
from meshwright_operator.decide.gang import GiveUp
from meshwright_operator.decide.observed import Observed, Worker, WorkerState, has_started
from meshwright_operator.events import WARNING
from meshwright_operator.pods import Pod
from meshwright_operator.words import counted, with_remarks

WAITS_FOR_TURN = "WaitsForTurn"
DOES_NOT_FIT = "DoesNotFit"

RETRY_PLACEMENT_SECONDS = 15.0
YIELD_SECONDS = 3.0
HOLD_SECONDS = 30.0
HOLD_RETRY_SECONDS = 3.0
FIRST_RETRY_SECONDS = 15.0
LONGEST_RETRY_SECONDS = 600.0

FOR_SOMEBODY = frozenset(
    {
        *("AdmissionDenied", "PodsForbidden", "PodsInvalid"),
        *("InvalidImageName", "ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff"),
        *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
    }
)
"""Reasons for giving up that no waiting solves: the job is Stalled between attempts, so that somebody looks."""


def placed(draft: Draft, placement: Placement, warnings: Sequence[str] = ()) -> None:
    """Takes a placement: new incarnations for the workers that need pods. `warnings` are told with it."""
    observed, status = draft.observed, draft.status
    assert draft.place is not None
    incarnations = new_incarnations(draft, draft.place.workers)
    if observed.other_plans or not has_started(observed.status):
        status.plan = placement.plan.to_status()
        status.plan.revision = observed.revision
    status.placement = placement.to_status(observed.name, incarnations)
    draft.create += [worker.index for worker in draft.place.workers]
    lifecycle.begin(status, observed.now)
    text = placement_text(status.placement)
    draft.condition(names.PLACED, True, "Placed", with_remarks(text, warnings))
    draft.note("Placed", text)
    draft.starting(f"making {counted(len(draft.create), 'pod')}")


def new_incarnations(draft: Draft, workers: Sequence[Worker]) -> dict[int, int]:
    """Incarnation by worker, with new ones for `workers`, which need pods: an attempt begins."""
    observed = draft.observed
    crashed = recovery.fresh_crashes(observed) if observed.mesh.pending_cause or not observed.mesh.generation else []
    if crashed:
        counts = policy.counts(observed.spec, policy.codes_of_workers(crashed))
        draft.count_restart(recovery.POD_FAILED, counted=counts)
        draft.note("PodFailed", recovery.crash_message(crashed), WARNING)
    if crashed or draft.mesh.pending_since is None:
        draft.mesh.pending_since = format_time(observed.now)
    draft.mesh.retry_time = None
    incarnations = {worker.index: worker.incarnation for worker in observed.workers}
    floor = _floor(observed) if draft.mesh.pending_cause in (recovery.SPEC_CHANGED, recovery.RESUME) else -1
    for worker in workers:
        incarnations[worker.index] = max(worker.incarnation, floor) + 1
    return incarnations


def not_placed(draft: Draft, message: str, because_of_kept: bool, *, yields: bool = False) -> None:
    """There is no room: says so once, and lets go of pods that others could use meanwhile.

    Args:
        draft: the decision so far.
        message: what is short, what would fit and what would have to go.
        because_of_kept: whether the survivors stand in the way: placing all anew would fit.
        yields: whether it would fit, and a job further ahead in the line gets the room.
    """
    observed = draft.observed
    reason = WAITS_FOR_TURN if yields else DOES_NOT_FIT
    old = find(observed.status.conditions, names.PLACED)
    if old is None or old.status != "False" or old.reason not in (WAITS_FOR_TURN, DOES_NOT_FIT):
        draft.note("PlacementFailed", message, WARNING)
    draft.condition(names.PLACED, False, reason, message)
    draft.situation("Placing", message)
    if not observed.live_pods:
        draft.again_in(YIELD_SECONDS if yields else RETRY_PLACEMENT_SECONDS)
    elif because_of_kept or _held_long(draft):
        draft.delete_live_pods()
    else:
        draft.again_in(HOLD_RETRY_SECONDS)


def give_up(draft: Draft, step: GiveUp) -> None:
    """This attempt to start the gang came to nothing: says why, lets go, and tries again after a pause."""
    observed, mesh = draft.observed, draft.mesh
    mesh.attempts += 1
    pause = retry_pause(mesh.attempts)
    retry = observed.now + timedelta(seconds=pause)
    mesh.retry_time = format_time(retry)
    if mesh.pending_since is None:
        mesh.pending_since = format_time(observed.now)
    text = f"{step.message}; attempt {mesh.attempts} was given up, the next comes at {mesh.retry_time}"
    draft.note("GangReleased" if observed.live_pods else "PlacementFailed", text, WARNING)
    draft.condition(names.PLACED, False, step.reason, text)
    draft.situation(step.reason, text, stalled=step.reason in FOR_SOMEBODY)
    draft.avoid |= step.avoid
    _let_go(draft, step.pods)
    draft.again_in(min(pause, HOLD_RETRY_SECONDS) if observed.live_pods else pause)


def held(draft: Draft, seconds: float) -> None:
    """Between two attempts: what was said then still holds, and survivors are not kept for ever."""
    condition = find(draft.status.conditions, names.PLACED)
    if condition is not None:
        draft.situation(condition.reason, condition.message, stalled=condition.reason in FOR_SOMEBODY)
    _let_go(draft, ())
    draft.again_in(min(seconds, HOLD_RETRY_SECONDS) if draft.observed.live_pods else seconds)


def retry_left(draft: Draft) -> float:
    """Seconds until the gang may be tried again; 0 when it may be now."""
    retry = parse_time(draft.mesh.retry_time)
    if retry is None:
        return 0.0
    left = (retry - draft.observed.now).total_seconds()
    # A clock that was set back must not stop the job for longer than the longest pause.
    return left if 0.0 < left <= LONGEST_RETRY_SECONDS else 0.0


def start_afresh(draft: Draft) -> None:
    """What was given up belongs to the past: the spec is another one, or somebody asked for it again."""
    if draft.status.mesh is not None:
        draft.mesh.attempts, draft.mesh.retry_time, draft.mesh.failures = 0, None, 0


def retry_pause(attempts: int) -> float:
    """Seconds between attempt `attempts`, the first being 1, and the next: 15, 30, 60 ... 600."""
    return min(FIRST_RETRY_SECONDS * 2.0 ** min(max(attempts - 1, 0), 16), LONGEST_RETRY_SECONDS)


def _let_go(draft: Draft, wanted: Sequence[Pod]) -> None:
    """Pods that never trained go at once, and `wanted`; those that did, once they were held for long enough."""
    if _held_long(draft):
        draft.delete_live_pods()
        return
    idle = [w.pod for w in draft.observed.workers if w.pod is not None and w.state is WorkerState.PENDING]
    chosen = {pod.uid: pod for pod in (*idle, *wanted)}
    draft.delete += [pod for pod in chosen.values() if not pod.deleting and pod not in draft.delete]


def _held_long(draft: Draft) -> bool:
    return seconds_since(draft.mesh.pending_since, draft.observed.now) >= HOLD_SECONDS


def _floor(observed: Observed) -> int:
    """The highest incarnation of any worker, those of an earlier plan too: none may come again."""
    entries = observed.status.placement.workers if observed.status.placement else []
    known = [entry.incarnation for entry in entries] + [worker.incarnation for worker in observed.workers]
    return max(known, default=-1)


def placement_text(placement: PlacementStatus) -> str:
    """The placement in one sentence."""
    nodes = {entry.node for entry in placement.workers}
    racks = {entry.rack for entry in placement.workers if entry.rack}
    where = f" in {counted(len(racks), 'rack')}" if racks else ""
    return (
        f"{counted(len(placement.workers), 'worker')} on {counted(len(nodes), 'node')}{where};"
        f" cost {placement.cost or '0'}"
    )


def moved(draft: Draft) -> None:
    """There is room elsewhere: the workers of `draft.move` are told to save and go."""
    assert draft.move is not None
    workers = draft.move.workers
    told = "; ".join(f"worker {w.index} leaves {w.node}: {w.node_leaving}" for w in workers[:3])
    more = f" and {len(workers) - 3} more" if len(workers) > 3 else ""
    message = f"{told}{more}; a checkpoint is saved first"
    draft.note(recovery.NODE_DRAINED, message)
    draft.count_restart(recovery.NODE_DRAINED)
    draft.mesh.pending_cause = recovery.NODE_DRAINED
    draft.mesh.pending_since = format_time(draft.observed.now)
    draft.delete += [w.pod for w in workers if w.pod is not None and not w.pod.deleting]
    draft.starting(message)
