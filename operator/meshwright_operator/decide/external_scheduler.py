"""Gangs whose pods another scheduler binds (`workers.schedulerName`): wait until all are bound, then map ranks."""

from __future__ import annotations

from meshwright_operator.decide.gang_actions import Delete, EndAttempt, GangAction, MapRanks, Wait
from meshwright_operator.decide.mesh_generation import plan_workers
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.pod_problems import PROBLEM_AFTER_SECONDS
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.text import sentences
from meshwright_operator.timestamps import parse_time

WAITING_FOR_SCHEDULER = "WaitingForScheduler"
NOT_SCHEDULED = "NotScheduled"


def external_scheduler_action(observed: Observed) -> GangAction | None:
    """The next action until all pods of an external scheduler have nodes and ranks. None once they do."""
    pods = [w.pod for w in observed.workers if w.pod is not None]
    down = tuple(w.pod for w in observed.workers if w.pod is not None and w.pod.bound and w.node_down)
    if down:
        return Delete(down, f"node {down[0].node} is down")
    unbound = [pod for pod in pods if not pod.bound]
    if unbound:
        return _wait_for_binding(observed, pods, unbound)
    known = plan_workers(observed)
    return MapRanks({w.index: w.node for w in observed.workers}, known) if len(known) < len(pods) else None


def _wait_for_binding(observed: Observed, pods: list[Pod], unbound: list[Pod]) -> GangAction:
    """Waits for the external scheduler. The limit is longer while no pod is bound: the gang may be in its queue."""
    now, scheduler, limits = observed.now, observed.spec.workers.scheduler_name, observed.binding.of(observed.spec)
    bound = [pod.scheduled or pod.created or now for pod in pods if pod.bound]
    since = max(min(bound), parse_time(observed.mesh.pending_since) or min(bound)) if bound else None
    limit = limits.partly_bound if bound else limits.unbound
    waited = (now - since).total_seconds() if since is not None else observed.waiting_age(unbound[0], limit)
    text = f"Scheduler {scheduler} has bound {len(bound)} of {len(pods)} pods"
    problem = next((f"Pod {pod.name}: {pod.problem}" for pod in unbound if pod.problem), "")
    if limit and waited >= limit:
        return EndAttempt(NOT_SCHEDULED, sentences(f"{text}, and no more within {limit:.0f} s", problem), tuple(pods))
    reason = WAITING_FOR_SCHEDULER if waited >= PROBLEM_AFTER_SECONDS else ""
    return Wait(sentences(text, problem), reason, limit - waited if limit else None)
