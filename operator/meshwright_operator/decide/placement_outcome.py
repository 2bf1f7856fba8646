"""Applies the result of a placement, or of an attempt that failed, to the decision.

A gang that cannot start releases its nodes. Pods that have not trained yet are deleted at once, the pods that survived
the loss of another after `RETAIN_PODS_SECONDS`. The next attempt follows with exponential backoff.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from meshwright.api import conditions as names
from meshwright.api.conditions import find
from meshwright.api.objects import pod_name
from meshwright.api.status import PlacementStatus, WorkerPlacement, added
from meshwright.planner.placement import Placement
from meshwright_operator.decide import failure_detection, lifecycle, restart_policy, size_status, stuck_pods
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.external_scheduler import WAITING_FOR_SCHEDULER
from meshwright_operator.decide.gang_actions import EndAttempt, Place, size_of
from meshwright_operator.decide.incarnations import NAME_TAKEN, NO_NAME_LEFT, next_incarnations
from meshwright_operator.decide.observed import PodState, Worker, has_started
from meshwright_operator.decide.preflight import PREFLIGHT_FAILED
from meshwright_operator.decide.size_status import placement_text
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.job_event import WARNING
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.text import counted, sentences, with_warnings
from meshwright_operator.timestamps import format_time, parse_time, seconds_since

QUEUED = "Queued"
DOES_NOT_FIT = "DoesNotFit"
PREEMPTED = "Preempted"
"""Reason of a job that was stopped for another one, and waits for nodes."""

RETRY_PLACEMENT_SECONDS = 15.0
WAITING_RETRY_SECONDS = 120.0
"""Time after which a waiting job asks for nodes again, even if nothing woke it."""
RETAIN_PODS_SECONDS = 30.0
RETAINED_RETRY_SECONDS = 3.0
FIRST_RETRY_SECONDS = 15.0
LONGEST_RETRY_SECONDS = 600.0
AVOID_FAILED_NODE_SECONDS = 120.0
"""How long a job avoids a node that rejected its pod, from which its agent did not poll, or where a fatal check of its
pod failed. Doubled by each attempt.
"""
LONGEST_AVOID_SECONDS = 900.0

NEEDS_USER_ACTION = frozenset(
    {
        *("AdmissionDenied", "PodGroupUnavailable", "PodsForbidden", "PodsInvalid", NAME_TAKEN, NO_NAME_LEFT),
        *("InvalidImageName", "ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff"),
        *("AgentsMissing", *failure_detection.JOB_FAILURES.values()),
        *("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "FailedMount"),
    }
)
"""Reasons that waiting does not resolve: between attempts the job is Stalled, so that alerts reach its user."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Nodes for every worker. The scheduler reserves them until the decision is carried out."""

    placement: Placement
    warnings: tuple[str, ...] = ()
    """Problems with nodes or pods that the scheduler ignored."""
    wake: tuple[JobKey, ...] = ()
    """Jobs to reconcile again now."""


@dataclass(frozen=True, slots=True)
class NotGranted:
    """The job's workers do not fit now, or it is not the job's turn."""

    message: str
    """What is missing, what would fit, and which jobs or pods would have to end."""
    warnings: tuple[str, ...] = ()
    blocked_by_kept_workers: bool = False
    """Whether the gang would fit if all its workers were placed again."""
    waits_for_turn: bool = False
    """Whether the gang fits, but a job ahead of it in the queue gets the nodes."""
    reason: str = ""
    """Reason of the condition, if it is neither the capacity nor the queue."""
    retry_seconds: float = WAITING_RETRY_SECONDS
    """Time after which the job asks again. It is woken earlier if it fits."""
    wake: tuple[JobKey, ...] = ()
    """Jobs to reconcile again now."""


@dataclass(frozen=True, slots=True)
class MappedRanks:
    """Ranks mapped onto the nodes that another scheduler chose."""

    placement: Placement
    """The nodes of the plan's workers."""
    plan_workers: Mapping[int, int]
    """Pod's worker index -> worker of the plan."""


def apply_grant(decision: Decision, grant: Granted | NotGranted) -> None:
    """Applies the scheduler's answer to `decision.place`."""
    if isinstance(grant, Granted):
        _apply_placement(decision, grant)
    else:
        _apply_no_placement(decision, grant)


def _apply_placement(decision: Decision, grant: Granted) -> None:
    """Creates pods with new incarnations for the workers that need them."""
    observed, status = decision.observed, decision.status
    assert decision.place is not None
    placement = grant.placement
    size = size_of(decision.place.sizes, placement)
    incarnations = new_incarnations(decision, decision.place.workers)
    if observed.other_plans or not has_started(observed.status):
        status.plan = placement.plan.to_status()
        status.plan.revision = observed.revision
    if size is None:
        status.placement = placement.to_status(observed.name, incarnations)
        decision.create += [worker.index for worker in decision.place.workers]
    else:
        size_status.place_size(decision, placement, size)
    lifecycle.begin(status, observed.now)
    assert status.placement is not None
    text = placement_text(status.placement)
    decision.condition(names.PLACED, True, "Placed", with_warnings(text, grant.warnings))
    decision.add_event("Placed", f"Placed {text}")
    placed = {worker.pod for worker in decision.place.workers}
    if stuck := [pod for pod in observed.stuck_pods if pod in placed]:
        decision.add_event(stuck_pods.POD_STUCK_TERMINATING, stuck_pods.describe(stuck), WARNING)
    decision.starting(f"Creating {counted(len(decision.create), 'pod')}")


def new_incarnations(decision: Decision, workers: Sequence[Worker]) -> dict[int, int]:
    """Begins an attempt: returns the incarnation of each worker, with new ones for `workers`, which need pods."""
    observed = decision.observed
    crashed = (
        failure_detection.uncounted_crashes(observed)
        if observed.mesh.pending_cause or not observed.mesh.generation
        else []
    )
    if crashed:
        decision.count_restart(restart_policy.POD_FAILED, restart_policy.worker_exit_codes(crashed))
        decision.add_cause_event(restart_policy.POD_FAILED, failure_detection.crash_message(crashed))
    # A gang that was suspended, or waited for nodes, has had no pods since: in that time no agent could come.
    had_no_pods = not observed.live_pods and not decision.mesh.attempts and _retention_expired(decision)
    if crashed or had_no_pods or decision.mesh.pending_since is None:
        decision.mesh.pending_since = format_time(observed.now)
    decision.mesh.retry_time = None
    return next_incarnations(observed, decision.mesh.pending_cause, workers)


def _apply_no_placement(decision: Decision, grant: NotGranted) -> None:
    """Records that the gang does not fit, and deletes pods that occupy GPUs which other jobs could use."""
    observed = decision.observed
    preempted = decision.mesh.pending_cause == restart_policy.JOB_PREEMPTED.name
    reason = grant.reason or (PREEMPTED if preempted else QUEUED if grant.waits_for_turn else DOES_NOT_FIT)
    message = with_warnings(grant.message, grant.warnings)
    old = find(observed.status.conditions, names.PLACED)
    same = (reason,) if grant.reason else (QUEUED, DOES_NOT_FIT, PREEMPTED)
    if old is None or old.status != "False" or old.reason not in same:
        decision.add_event(grant.reason or "PlacementFailed", message, WARNING)
    decision.condition(names.PLACED, False, reason, message)
    if observed.stuck_pods:
        text = sentences(stuck_pods.describe(observed.stuck_pods), message)
        decision.job_state(stuck_pods.POD_STUCK_TERMINATING, text, stalled=True)
    else:
        decision.job_state(PREEMPTED if preempted else "Placing", message)
    if not observed.live_pods:
        decision.requeue_within(grant.retry_seconds)
    elif grant.blocked_by_kept_workers or _retention_expired(decision):
        decision.delete_live_pods()
    else:
        decision.requeue_within(RETAINED_RETRY_SECONDS)


def end_attempt(decision: Decision, action: EndAttempt) -> None:
    """Ends this attempt to start the gang: reports why, deletes its pods, and schedules the next attempt."""
    observed, mesh = decision.observed, decision.mesh
    mesh.attempts = added(mesh.attempts)
    pause = retry_pause(mesh.attempts)
    retry = observed.now + timedelta(seconds=pause)
    mesh.retry_time = format_time(retry)
    if mesh.pending_since is None:
        mesh.pending_since = format_time(observed.now)
    text = sentences(action.message, f"Retrying at {mesh.retry_time} (attempt {mesh.attempts + 1})")
    decision.add_event("GangReleased" if observed.live_pods else "PlacementFailed", text, WARNING)
    decision.condition(names.PLACED, False, action.reason, text)
    decision.job_state(action.reason, text, stalled=action.reason in NEEDS_USER_ACTION)
    decision.avoid |= action.avoid
    if action.reason in ("PodRejected", "AgentsMissing", PREFLIGHT_FAILED):  # the node may be usable again soon
        decision.avoid_seconds = min(
            AVOID_FAILED_NODE_SECONDS * 2.0 ** min(mesh.attempts - 1, 8), LONGEST_AVOID_SECONDS
        )
    _release_pods(decision, action.pods)
    decision.requeue_within(min(pause, RETAINED_RETRY_SECONDS) if observed.live_pods else pause)


def wait_for_retry(decision: Decision, seconds: float) -> None:
    """Waits between two attempts: repeats the last message, and deletes the surviving pods in time."""
    condition = find(decision.status.conditions, names.PLACED)
    if condition is not None:
        decision.job_state(condition.reason, condition.message, stalled=condition.reason in NEEDS_USER_ACTION)
    _release_pods(decision, ())
    decision.requeue_within(min(seconds, RETAINED_RETRY_SECONDS) if decision.observed.live_pods else seconds)


def retry_left(decision: Decision) -> float:
    """Seconds until the next attempt to start the gang; 0 if it may start now."""
    retry = parse_time(decision.mesh.retry_time)
    if retry is None:
        return 0.0
    left = (retry - decision.observed.now).total_seconds()
    # A clock that was set back must not delay the job by more than the longest pause.
    return left if 0.0 < left <= LONGEST_RETRY_SECONDS else 0.0


def reset_attempts(decision: Decision) -> None:
    """Forgets failed attempts, because the spec has changed or the job was resumed."""
    if decision.status.mesh is not None:
        decision.mesh.attempts, decision.mesh.retry_time, decision.mesh.failures = 0, None, 0
        decision.mesh.agent_replacements = 0


def retry_pause(attempts: int) -> float:
    """Seconds between attempt `attempts`, the first being 1, and the next: 15, 30, 60 ... 600."""
    return min(FIRST_RETRY_SECONDS * 2.0 ** min(max(attempts - 1, 0), 16), LONGEST_RETRY_SECONDS)


def _release_pods(decision: Decision, failed_pods: Sequence[Pod]) -> None:
    """Deletes `failed_pods` and pods that have not trained yet, and all others after `RETAIN_PODS_SECONDS`."""
    observed = decision.observed
    if _retention_expired(decision):
        released = observed.live_pods
    else:
        released = [w.pod for w in observed.workers if w.pod is not None and w.state is PodState.PENDING]
    # A pod that a kubelet rejected has ended: if it stayed, every later attempt would take it for its own.
    chosen = {pod.uid: pod for pod in (*released, *failed_pods)}
    decision.delete += [pod for pod in chosen.values() if not pod.deleting and pod not in decision.delete]


def _retention_expired(decision: Decision) -> bool:
    """Whether the pods that survived have waited long enough. Those of an elastic job are needed until it shrinks."""
    elastic = decision.observed.elastic.elastic if decision.observed.elastic is not None else None
    wait = RETAIN_PODS_SECONDS + (elastic.replacement_seconds if elastic is not None else 0)
    return seconds_since(decision.mesh.pending_since, decision.observed.now) >= wait


def apply_move(decision: Decision) -> None:
    """Pauses the generation to move the workers of `decision.move`, which fit on other nodes.

    Their pods are deleted once the ranks have saved a checkpoint. If their nodes drain no more by then, they stay.
    """
    assert decision.move is not None
    workers = decision.move.workers
    moves = ", ".join(f"worker {w.index} off {w.node} ({w.node_drain_reason})" for w in workers[:3])
    more = f" and {len(workers) - 3} more" if len(workers) > 3 else ""
    message = f"Saving a checkpoint, then moving {moves}{more}"
    decision.add_cause_event(restart_policy.NODE_DRAINED, message)
    decision.count_restart(restart_policy.NODE_DRAINED)
    decision.mesh.pending_cause = restart_policy.NODE_DRAINED.name
    decision.mesh.pending_since = format_time(decision.observed.now)
    decision.starting(message)


def create_unbound_pods(decision: Decision, action: Place) -> None:
    """Creates pods for the workers that have none. Their nodes and ranks are known once they are bound."""
    observed, status = decision.observed, decision.status
    incarnations = new_incarnations(decision, action.workers)
    new = {worker.index for worker in action.workers}
    known = {entry.worker: entry for entry in (status.placement.workers if status.placement else [])}
    workers = [
        known[worker.index]
        if worker.index in known and worker.index not in new
        else _unbound_worker(observed.name, worker.index, incarnations[worker.index])
        for worker in observed.workers
    ]
    layout = observed.plan.layout
    status.placement = PlacementStatus(
        workers=workers, tensor=layout.tensor, pipeline=layout.pipeline, data=layout.data
    )
    decision.create += sorted(new)
    lifecycle.begin(status, observed.now)
    pods = counted(len(new), "pod")
    text = f"Waiting for scheduler {observed.spec.workers.scheduler_name} to bind {pods}"
    decision.condition(names.PLACED, False, WAITING_FOR_SCHEDULER, text)
    decision.add_event(WAITING_FOR_SCHEDULER, text)
    decision.starting(f"Creating {pods}")


def apply_mapping(decision: Decision, mapped: MappedRanks | str) -> None:
    """Applies the mapping of ranks onto another scheduler's nodes, or reports why there is none."""
    if isinstance(mapped, str):  # a chosen node is gone: the next reconcile deletes its pod
        decision.starting(mapped)
        decision.map_ranks = None
        decision.requeue_within(RETRY_PLACEMENT_SECONDS)
        return
    placement = mapped.placement
    observed, status = decision.observed, decision.status
    if not observed.mesh.generation:
        status.plan = placement.plan.to_status()
        status.plan.revision = observed.revision
    incarnations = {worker.index: worker.incarnation for worker in observed.workers}
    status.placement = placement.to_status(observed.name, incarnations, mapped.plan_workers)
    text = placement_text(status.placement)
    decision.condition(names.PLACED, True, "Placed", with_warnings(text, placement.notes))
    decision.add_event("RanksMapped", f"Scheduler {observed.spec.workers.scheduler_name} placed {text}")
    decision.starting("Mapped ranks to nodes")


def _unbound_worker(job: str, worker: int, incarnation: int) -> WorkerPlacement:
    return WorkerPlacement(
        worker=worker, incarnation=incarnation, pod=pod_name(job, worker, incarnation), node="", ranks=""
    )
