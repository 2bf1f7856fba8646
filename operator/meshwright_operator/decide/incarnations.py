"""Incarnations of new pods, and names of new pods that other pods still have.

A pod of a deleted job with the same name is waited for, for a limited time. The names of other pods are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.api import conditions as names
from meshwright.api.conditions import find
from meshwright_operator.decide import restart_policy
from meshwright_operator.decide.gang_actions import EndAttempt, Wait
from meshwright_operator.decide.observed import Observed, Worker
from meshwright_operator.kube.pod_info import MAX_INCARNATION, Pod
from meshwright_operator.timestamps import seconds_since

WAITING_FOR_OLD_PODS = "WaitingForOldPods"
NAME_TAKEN = "NameTaken"
NO_NAME_LEFT = "NoNameLeft"
OLD_PODS_SECONDS = 300.0
"""How long to wait for pods of a deleted job, in addition to the grace period in which they save a checkpoint."""


def next_incarnations(observed: Observed, pending_cause: str, workers: Sequence[Worker]) -> dict[int, int]:
    """The incarnation of each worker, with new ones for `workers`, which need pods."""
    incarnations = {worker.index: worker.incarnation for worker in observed.workers}
    foreign = {(pod.worker, pod.incarnation) for pod in observed.namesakes if not pod.of_job}
    floor = _floor(observed) if restart_policy.cause_named(pending_cause).replaces_gang else -1
    for worker in workers:
        incarnation = max(worker.incarnation, floor) + 1
        while (worker.index, incarnation) in foreign:
            incarnation += 1
        incarnations[worker.index] = incarnation
    return incarnations


def taken_names(observed: Observed, pending_cause: str, workers: Sequence[Worker]) -> Wait | EndAttempt | None:
    """Waits for pods of a deleted job that have the names which the new pods of `workers` need. None without any.

    Ends the attempt if there is no name: a pod with more digits in its name would not be recognized as a worker.
    """
    incarnations = next_incarnations(observed, pending_cause, workers)
    unnamed = next((worker for worker in workers if incarnations[worker.index] > MAX_INCARNATION), None)
    if unnamed is not None:
        return EndAttempt(NO_NAME_LEFT, _no_name_left(unnamed, incarnations[unnamed.index]))
    taken = [pod for pod in observed.namesakes if incarnations.get(pod.worker) == pod.incarnation]
    if not taken:
        return None
    first = min(taken, key=lambda pod: (pod.worker, pod.incarnation))
    limit = OLD_PODS_SECONDS + observed.spec.workers.termination_grace_period_seconds
    waited = seconds_since(_waiting_since(observed), observed.now)
    if waited < limit:
        return Wait(old_pod_message(first, len(taken) - 1), WAITING_FOR_OLD_PODS, limit - waited)
    text = (
        f"Pod {first.name} of the deleted job with the same name has not terminated within {limit:.0f} s. If its node "
        f"is gone, run `kubectl delete pod {first.name} --force`"
    )
    return EndAttempt(NAME_TAKEN, text)


def _no_name_left(worker: Worker, incarnation: int) -> str:
    fix = (
        f"Delete pod {worker.pod.name}"
        if worker.pod is not None and worker.pod.incarnation == MAX_INCARNATION
        else "Correct `incarnation` in `status.placement.workers`, or create the job again"
    )
    return f"Worker {worker.index} needs incarnation {incarnation}, and names of pods end at {MAX_INCARNATION}. {fix}"


def old_pod_message(pod: Pod, others: int = 0) -> str:
    """Says which pod of a deleted job with the same name is waited for."""
    more = f" (and {others} more)" if others else ""
    return f"Waiting for pod {pod.name}{more} of the deleted job with the same name to terminate"


def _waiting_since(observed: Observed) -> str | None:
    """Since when the job is not ready: `pending_since` begins anew with an attempt, and a new job has none."""
    ready = find(observed.status.conditions, names.READY)
    return ready.last_transition_time if ready is not None and ready.status != "True" else observed.mesh.pending_since


def _floor(observed: Observed) -> int:
    """The highest incarnation of any worker, also of an earlier plan: none may be used again."""
    entries = observed.status.placement.workers if observed.status.placement else []
    known = [entry.incarnation for entry in entries] + [worker.incarnation for worker in observed.workers]
    return max(known, default=-1)
