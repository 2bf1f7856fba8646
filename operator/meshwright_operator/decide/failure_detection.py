"""What interrupted a mesh generation, and its cause: a lost node or pod, a crashed pod, or a failed rank.

The cause of a failed rank is determined only after a wait. When a pod disappears, its peers' connections break before
the pod's deletion arrives. That must be a lost pod, which does not count toward `recovery.maxRestarts`, and not a
failure of the peers.
"""

from __future__ import annotations

from datetime import UTC, datetime

from meshwright.protocol.messages import AgentState, FailureKind
from meshwright.rules.recovery_times import CAUSE_WAIT_SECONDS
from meshwright_operator.decide import lifecycle
from meshwright_operator.decide.hang_detection import hung_command, hung_ranks, silent_agents, stuck_agents
from meshwright_operator.decide.observed import GONE, Observed, PodState, Worker
from meshwright_operator.decide.report_interval import FRESH_INTERVALS
from meshwright_operator.decide.restart_policy import (
    CAUSES,
    EVICTED,
    NODE_LOST,
    POD_FAILED,
    POD_LOST,
    PREEMPTED,
    RANK_FAILURE,
    WENT_BACK,
    Detector,
    Interruption,
    RestartCause,
    Undetermined,
)
from meshwright_operator.kube.pod_info import EVICTIONS, NODE_RESTARTED, PREEMPTIONS, Pod
from meshwright_operator.text import capitalized
from meshwright_operator.timestamps import parse_time

PEER_LOST_WAIT_SECONDS = 10.0
PAUSE_SECONDS = 20.0
DRAIN_MARGIN_SECONDS = 60.0

CHECKPOINT_INCOMPATIBLE = "CheckpointIncompatible"
INVALID_INPUT = "InvalidInput"
JOB_FAILURES = {
    FailureKind.REJECTED: "RunRejected",
    FailureKind.INVALID_INPUT: INVALID_INPUT,
    FailureKind.CHECKPOINT_INCOMPATIBLE: CHECKPOINT_INCOMPATIBLE,
}
"""Failures of ranks that another start would repeat, until somebody changes the spec or its inputs -> reason."""


def detect(observed: Observed) -> Interruption | Undetermined | None:
    """What interrupted the current generation. None while it is healthy."""
    declared = (cause.detect for cause in CAUSES.values() if cause.detect is not None)
    return next((verdict for detector in (*DETECTORS, *declared) if (verdict := detector(observed)) is not None), None)


def lost_pods(observed: Observed) -> Interruption | None:
    """Pods that were deleted, evicted, preempted or lost with their node, or are being deleted.

    A worker that has completed the run needs its pod no more, nor does any other one then.
    """
    if lifecycle.run_ends(observed):
        return None
    gone = [worker for worker in observed.workers if worker.state in GONE and not worker.completed]
    if not gone:
        return None
    causes = [_cause(worker) for worker in gone]
    cause = next(cause for cause in (NODE_LOST, PREEMPTED, EVICTED, POD_LOST) if cause in causes)
    return Interruption(cause, capitalized("; ".join(_describe_loss(worker) for worker in gone[:3]) + _more(gone, 3)))


def crashed_pods(observed: Observed) -> Interruption | None:
    """Pods that failed because their container exited with an error."""
    crashed = [worker for worker in observed.workers if worker.state is PodState.CRASHED]
    return Interruption(POD_FAILED, crash_message(crashed), worker=crashed[0].index) if crashed else None


def failed_ranks(observed: Observed) -> Interruption | Undetermined | None:
    """Ranks that failed while their pods run, after a wait for other failures.

    Without a wait if a node is down, or if a rank failed by itself and every agent has reported a failure: then no
    report is missing, and no pod is gone.
    """
    failing = observed.reports_in(AgentState.FAILED)
    if not failing:
        return None
    down = tuple(worker for worker in observed.workers if worker.node_down and worker.state is PodState.RUNNING)
    if down:
        named = ", ".join(f"worker {worker.index} on {worker.node}" for worker in down[:3]) + _more(down, 3)
        return Interruption(NODE_LOST, f"Ranks failed, and nodes are down: {named}", lost=down)
    root = {index for index, received in failing.items() if received.report.failure is not FailureKind.PEER_LOST}
    if not root and lifecycle.run_ends(observed):
        return None  # they waited for a peer that had completed the run, or that was lost after it
    oldest = max(received.halted_seconds for received in failing.values())
    wait = CAUSE_WAIT_SECONDS if root else PEER_LOST_WAIT_SECONDS
    if root and all(worker.index in failing or _holds_state(worker, observed) for worker in observed.workers):
        wait = 0.0
    if oldest < wait:
        return Undetermined(wait - oldest)
    if not root and (gone := _unheard_since(observed, oldest)):
        named = ", ".join(f"worker {worker.index} on {worker.node}" for worker in gone[:3]) + _more(gone, 3)
        message = f"Ranks lost their peers, and no report has arrived since from {named}"
        return Interruption(POD_LOST, message, detected_in=oldest)
    # A failure that would repeat fails the job, so name it. Otherwise name the earliest root failure.
    worker, received = max(
        failing.items(),
        key=lambda item: (
            item[1].report.failure in JOB_FAILURES,
            item[1].report.failure is FailureKind.NODE_FAULT,
            item[0] in root,
            item[1].halted_seconds,
        ),
    )
    return Interruption(
        WENT_BACK if received.report.failure is FailureKind.WENT_BACK else RANK_FAILURE,
        f"Worker {worker}: {received.report.message or 'a rank failed'}",
        detected_in=oldest,
        job_failure=JOB_FAILURES.get(received.report.failure, "") if received.report.failure is not None else "",
        worker=worker,
        node_fault=received.report.failure is FailureKind.NODE_FAULT,
    )


def _holds_state(worker: Worker, observed: Observed) -> bool:
    """Whether the worker's ranks have left the generation, because of the failures of others."""
    received = observed.reports_in(AgentState.IDLE).get(worker.index)
    return received is not None and any(rank.held is not None for rank in received.report.ranks)


def _unheard_since(observed: Observed, seconds: float) -> list[Worker]:
    """The workers whose agents have sent no report in this time, although several were due.

    Their nodes are probably down, which Kubernetes finds out only after `node-monitor-grace-period`, 40 s by default.
    """
    reports = observed.agents.reports
    return [
        worker
        for worker in observed.workers
        if worker.state is PodState.RUNNING
        and (received := reports.get(worker.index)) is not None
        and received.age >= max(seconds, FRESH_INTERVALS * received.interval)
    ]


def paused_ranks(observed: Observed) -> Interruption | Undetermined | None:
    """Ranks that paused for a pod's deletion. If no pod is deleted after all, only a restart starts them again."""
    paused = observed.reports_in(AgentState.IDLE)
    if not paused:
        return None
    longest = max(received.halted_seconds for received in paused.values())
    # A worker that saves and stops has its grace period. Its agent exits then, or hangs.
    drain = observed.spec.workers.termination_grace_period_seconds + DRAIN_MARGIN_SECONDS
    if observed.reports_in(AgentState.DRAINING) and longest < drain:
        return None
    if longest < PAUSE_SECONDS:
        return Undetermined(PAUSE_SECONDS - longest)
    workers = ", ".join(str(index) for index in sorted(paused))
    message = f"The ranks of worker {workers} stopped for a pod's deletion, but no pod was deleted"
    if observed.spec.runtime.command is not None:
        # Its agent knows this only by the exit code, which the command may use for something else.
        message = (
            f"The command of worker {workers} exited with code 143, as after SIGTERM, but no pod was deleted: at the "
            "end of the run it must exit with 0, after an error with another code"
        )
    return Interruption(RANK_FAILURE, message, detected_in=longest)


def uncounted_crashes(observed: Observed) -> list[Worker]:
    """Workers that exited while the next generation was being formed, which no earlier verdict has counted.

    Exit code 0 counts too, unless ranks in the pod were part of the last generation: without one there was nothing to
    complete, and a container that exits at once must not be restarted without limit.
    """
    since = parse_time(observed.mesh.pending_since)
    return [
        worker
        for worker in observed.workers
        if worker.state in (PodState.CRASHED, PodState.SUCCEEDED)
        and worker.pod is not None
        and (since is None or worker.pod.ended is None or max(worker.pod.ended, _created(worker.pod)) >= since)
        and not _completed_late(observed, worker)
    ]


def _completed_late(observed: Observed, worker: Worker) -> bool:
    """Whether ranks have completed the run although another worker was lost meanwhile. That is no failure of theirs."""
    formed = parse_time(observed.mesh.started_time) if observed.mesh.generation > 0 else None
    created = worker.pod.created if worker.pod is not None else None
    # A generation is formed only once all its pods run: a later pod has had nothing to complete.
    return worker.state is PodState.SUCCEEDED and formed is not None and created is not None and created <= formed


def _created(pod: Pod) -> datetime:
    """When a pod was created, by the API server's clock. The clock of its node may be behind."""
    return pod.created or datetime.min.replace(tzinfo=UTC)


def crash_message(workers: list[Worker]) -> str:
    """Which workers crashed, with their exit codes."""
    return capitalized("; ".join(_describe_crash(worker) for worker in workers[:3]) + _more(workers, 3))


def _cause(worker: Worker) -> RestartCause:
    """Why a worker's pod was deleted or is being deleted."""
    reason = worker.pod.disruption if worker.pod is not None else ""
    if worker.node_down or reason == NODE_RESTARTED:
        return NODE_LOST
    return PREEMPTED if reason in PREEMPTIONS else EVICTED if reason in EVICTIONS else POD_LOST


def _describe_loss(worker: Worker) -> str:
    pod = f"pod {worker.pod.name}" if worker.pod else f"the pod of worker {worker.index}"
    if worker.pod is not None and worker.state is PodState.DISRUPTED and worker.pod.disruption == NODE_RESTARTED:
        return f"{pod} is lost, because node {worker.node} has restarted"
    happened = {
        PodState.MISSING: "no longer exists",
        PodState.ENDING: "is being deleted",
        PodState.DISRUPTED: "was stopped",
        PodState.LOST: f"is lost, because node {worker.node} is down" if worker.node_down else "does not terminate",
    }[worker.state]
    why = f" ({worker.pod.disruption})" if worker.pod is not None and worker.pod.disruption else ""
    return f"{pod} {happened}{why}"


def _describe_crash(worker: Worker) -> str:
    if worker.pod is not None and worker.pod.out_of_memory:
        return (
            f"worker {worker.index} (pod {worker.pod.name}) was killed: out of memory, {worker.pod.out_of_memory}: "
            "raise `spec.workers.resources.memory`"
        )
    code = worker.pod.exit_code if worker.pod else None
    name = f"pod {worker.pod.name}" if worker.pod else f"the pod of worker {worker.index}"
    if code is None and worker.pod is not None and worker.pod.init_failure:
        return f"{name} failed: {worker.pod.init_failure}"
    return f"{name} exited with code {code}" if code is not None else f"{name} failed"


def _more(items: object, shown: int) -> str:
    count = len(items) if isinstance(items, list | tuple) else 0
    return f" and {count - shown} more" if count > shown else ""


DETECTORS: tuple[Detector, ...] = (
    lost_pods,
    crashed_pods,
    failed_ranks,
    paused_ranks,
    hung_ranks,
    hung_command,
    silent_agents,
    stuck_agents,
)
"""Ordered so that a cause comes before its effects: a lost pod makes its peers fail and stop."""
