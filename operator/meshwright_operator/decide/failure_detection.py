"""What is wrong with a mesh generation, and whose fault it is: the pod's, a rank's or nobody's.

A rank that fails is looked at only after a moment: when a pod goes, its peers' connections break first, and that must
count as a lost pod (which never uses up `recovery.maxRestarts`), not as a failure of the ranks that noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from meshwright.protocol.messages import FailureKind
from meshwright.protocol.messages import WorkerState as AgentState
from meshwright_operator.decide.agents import ReceivedReport
from meshwright_operator.decide.observed import Observed, Worker, WorkerState
from meshwright_operator.kube.pod_info import EVICTIONS, PREEMPTIONS, Pod
from meshwright_operator.timestamps import parse_time

START = "Start"
RESUME = "Resume"
POD_LOST = "PodLost"
POD_FAILED = "PodFailed"
RANK_FAILURE = "RankFailure"
SPEC_CHANGED = "SpecChanged"
NODE_LOST = "NodeLost"
NODE_DRAINED = "NodeDrained"
PREEMPTED = "Preempted"
EVICTED = "Evicted"
HANG = "Hang"

LIMITED_CAUSES = frozenset({POD_FAILED, RANK_FAILURE, HANG})
"""Causes that count toward `recovery.maxRestarts`."""

SETTLE_SECONDS = 2.0
PEER_LOST_SETTLE_SECONDS = 10.0
PAUSE_SECONDS = 20.0
LONGEST_BACKOFF_SECONDS = 60.0

GONE = frozenset({WorkerState.MISSING, WorkerState.ENDING, WorkerState.DISRUPTED, WorkerState.LOST})


@dataclass(frozen=True, slots=True)
class Interruption:
    """The generation is over."""

    cause: str
    message: str
    """What happened, for people."""
    detected_in: float = 0.0
    """Seconds from the first sign to this verdict."""
    lost: tuple[Worker, ...] = ()
    """Workers that nobody reaches any more, whose pods must be given up."""


@dataclass(frozen=True, slots=True)
class Settling:
    """Something failed; wait before judging."""

    seconds: float


def diagnose(observed: Observed) -> Interruption | Settling | None:
    """What ended the current generation; None while it holds."""
    gone = [worker for worker in observed.workers if worker.state in GONE]
    if gone:
        cause = next(c for c in (NODE_LOST, PREEMPTED, EVICTED, POD_LOST) if any(_cause(w) == c for w in gone))
        return Interruption(cause, "; ".join(_describe_loss(worker) for worker in gone[:3]) + _more(gone, 3))
    crashed = [worker for worker in observed.workers if worker.state is WorkerState.CRASHED]
    if crashed:
        return Interruption(
            POD_FAILED, "; ".join(_describe_crash(worker) for worker in crashed[:3]) + _more(crashed, 3)
        )
    return _failed_ranks(observed)


def _failed_ranks(observed: Observed) -> Interruption | Settling | None:
    failing = failures(observed)
    if not failing:
        return _paused_ranks(observed)
    down = tuple(worker for worker in observed.workers if worker.node_down and worker.state is WorkerState.RUNNING)
    if down:
        named = ", ".join(f"worker {worker.index} on {worker.node}" for worker in down[:3]) + _more(down, 3)
        return Interruption(NODE_LOST, f"the node is down: {named}", lost=down)
    root = [received for received in failing.values() if received.report.failure is not FailureKind.PEER_LOST]
    oldest = max(received.halted_seconds for received in failing.values())
    wait = SETTLE_SECONDS if root else PEER_LOST_SETTLE_SECONDS
    if oldest < wait:
        return Settling(wait - oldest)
    # A refusal ends the job, so that is what is told; else the oldest of the causes.
    worker, received = max(
        failing.items(),
        key=lambda item: (item[1].report.failure is FailureKind.REFUSED, item[1] in root, item[1].halted_seconds),
    )
    return Interruption(
        RANK_FAILURE, f"worker {worker}: {received.report.message or 'a rank failed'}", detected_in=oldest
    )


def _paused_ranks(observed: Observed) -> Interruption | Settling | None:
    """Ranks pause because a pod goes away; when none does after all, nobody else would start them again."""
    paused = reports_with_state(observed, AgentState.IDLE)
    if not paused or reports_with_state(observed, AgentState.DRAINING):
        return None
    longest = max(received.halted_seconds for received in paused.values())
    if longest < PAUSE_SECONDS:
        return Settling(PAUSE_SECONDS - longest)
    workers = ", ".join(str(index) for index in sorted(paused))
    return Interruption(
        RANK_FAILURE, f"the ranks of worker {workers} stopped, but no pod goes away", detected_in=longest
    )


def failures(observed: Observed) -> dict[int, ReceivedReport]:
    """Reports of failed ranks in the generation in effect, by worker index."""
    return reports_with_state(observed, AgentState.FAILED)


def reports_with_state(observed: Observed, state: AgentState) -> dict[int, ReceivedReport]:
    """Reports with this state of the generation and incarnations in effect, by worker index."""
    return {
        worker.index: received
        for worker in observed.workers
        if (received := observed.agents.reports.get(worker.index)) is not None
        and received.report.state is state
        and received.report.generation == observed.mesh.generation
        and received.report.incarnation == worker.incarnation
    }


def uncounted_crashes(observed: Observed) -> list[Worker]:
    """Workers that ended by themselves while the next generation was being formed: no earlier verdict counted them.

    Ending well counts too: without a generation there was nothing to complete, and a container that exits at once must
    not be started for ever.
    """
    since = parse_time(observed.mesh.pending_since)
    return [
        worker
        for worker in observed.workers
        if worker.state in (WorkerState.CRASHED, WorkerState.SUCCEEDED)
        and worker.pod is not None
        and (since is None or worker.pod.ended is None or max(worker.pod.ended, _created(worker.pod)) >= since)
    ]


def _created(pod: Pod) -> datetime:
    """When a pod was made, by the API server's clock: that of its node may be behind."""
    return pod.created or datetime.min.replace(tzinfo=UTC)


def crash_backoff_seconds(observed: Observed, crashed: list[Worker]) -> float:
    """Seconds to wait before crashed pods are replaced: growing, and long enough to see who else crashes."""
    ends = [worker.pod.ended for worker in crashed if worker.pod is not None and worker.pod.ended is not None]
    if not ends:
        return 0.0
    wait = min(SETTLE_SECONDS * 2.0 ** min(failures_so_far(observed), 10), LONGEST_BACKOFF_SECONDS)
    # By clocks of nodes, which may be ahead.
    return max(0.0, min(wait, wait - (observed.now - max(ends)).total_seconds()))


def failures_so_far(observed: Observed) -> int:
    """Failures that make the next pause longer: those that count, or those in a row that an exit-code rule ignores."""
    return max(observed.status.restarts_toward_limit, observed.mesh.failures)


def backoff_seconds(failed: int) -> float:
    """How long to wait before the start that follows the `failed`-th failure: 0, 2, 4, ... 60."""
    return 0.0 if failed <= 1 else min(2.0 ** min(failed - 1, 10), LONGEST_BACKOFF_SECONDS)


def crash_message(workers: list[Worker]) -> str:
    """Which workers crashed and how."""
    return "; ".join(_describe_crash(worker) for worker in workers[:3]) + _more(workers, 3)


def _cause(worker: Worker) -> str:
    """Whose doing it is that a worker's pod goes or went."""
    if worker.node_down:
        return NODE_LOST
    reason = worker.pod.disruption if worker.pod is not None else ""
    return PREEMPTED if reason in PREEMPTIONS else EVICTED if reason in EVICTIONS else POD_LOST


def _describe_loss(worker: Worker) -> str:
    pod = worker.pod.name if worker.pod else f"the pod of worker {worker.index}"
    happened = {
        WorkerState.MISSING: "is gone",
        WorkerState.ENDING: "is being deleted",
        WorkerState.DISRUPTED: "was stopped",
        WorkerState.LOST: f"was lost with node {worker.node}",
    }[worker.state]
    why = f" ({worker.pod.disruption})" if worker.pod is not None and worker.pod.disruption else ""
    return f"{pod} {happened}{why}"


def _describe_crash(worker: Worker) -> str:
    code = worker.pod.exit_code if worker.pod else None
    name = worker.pod.name if worker.pod else f"worker {worker.index}"
    return f"{name} ended with exit code {code}" if code is not None else f"{name} failed"


def _more(items: object, shown: int) -> str:
    count = len(items) if isinstance(items, list | tuple) else 0
    return f" and {count - shown} more" if count > shown else ""
