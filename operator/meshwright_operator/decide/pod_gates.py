"""Pods with the scheduling gates of other controllers, such as a queue's: the gang waits for them without a limit.

Only whoever has set a gate knows when it is removed, which may take days. That time counts neither toward the limits of
a start nor toward `spec.activeDeadlineSeconds`, and is booked as queued.
"""

from __future__ import annotations

from meshwright.api import conditions as names
from meshwright.api.conditions import find
from meshwright.api.labels import GANG_GATE
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_operator.decide import lifecycle
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.gang_actions import Wait
from meshwright_operator.decide.observed import Observed
from meshwright_operator.text import counted
from meshwright_operator.timestamps import format_time

SCHEDULING_GATED = "SchedulingGated"
"""Reason of a job whose pods have the scheduling gates of other controllers."""
MAX_NAMED = 3
AFTER_RELEASE_SECONDS = 0.5


def wait_for_gates(observed: Observed) -> Wait | None:
    """The wait for the gates of other controllers. None if no pod has one."""
    gates = _gates(observed)
    if not gates:
        return None
    pods = sum(1 for held in gates if held)
    named = sorted({gate for held in gates for gate in held})
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    which = f"scheduling gate{'s' if len(named) > 1 else ''} {', '.join(named[:MAX_NAMED])}{more}"
    return Wait(f"Waiting for the controller of {which} to release {counted(pods, 'pod')}", SCHEDULING_GATED)


def is_held(status: ParallelTrainingJobStatus) -> bool:
    """Whether the job waits for the gates of other controllers, by its status."""
    ready = find(status.conditions, names.READY)
    return ready is not None and ready.reason == SCHEDULING_GATED


def hold(decision: Decision) -> None:
    """Stops the job's clock while others hold its pods."""
    if decision.status.active_since is not None:
        lifecycle.pause(decision.status, decision.observed.now)


def release(decision: Decision) -> bool:
    """Starts the limits of the start anew, when the last gate is gone. Returns whether that is the decision."""
    observed = decision.observed
    if not is_held(observed.status) or not observed.live_pods or _gates(observed):
        return False
    decision.mesh.pending_since = format_time(observed.now)
    lifecycle.begin(decision.status, observed.now)
    decision.starting("The scheduling gates of other controllers were removed")
    decision.requeue_within(AFTER_RELEASE_SECONDS)
    return True


def _gates(observed: Observed) -> list[tuple[str, ...]]:
    """The gates of others, of each pod that has some."""
    pods = (worker.pod for worker in observed.workers if worker.pod is not None and not worker.pod.terminal)
    others = (tuple(gate for gate in pod.gates if gate != GANG_GATE) for pod in pods)
    return [held for held in others if held]
