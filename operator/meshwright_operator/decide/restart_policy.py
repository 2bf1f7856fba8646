"""The restart policy: which failures count toward the limit, how long the next start waits, and when the job fails.

`RestartCause` is the only definition of a cause. Status, events, metrics, the restart limit and the backoff read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime, timedelta

from meshwright.api.spec import FailureAction, ParallelTrainingJobSpec, RecoverySpec
from meshwright.api.status import MAX_RESTART_TIMES, MeshStatus, ParallelTrainingJobStatus, added
from meshwright.protocol.messages import AgentState, FailureKind
from meshwright.rules.recovery_times import (
    CAUSE_WAIT_SECONDS,
    FAILURE_RESET_SECONDS,
    LONGEST_BACKOFF_SECONDS,
    backoff_seconds,
)
from meshwright_operator.decide.observed import Observed, PodState, Worker
from meshwright_operator.kube.job_event import NORMAL, WARNING
from meshwright_operator.timestamps import format_time, parse_time, seconds_since

SIGNAL_BASE = 128

ExitCodes = Callable[[Observed], set[int]]
Detector = Callable[[Observed], "Interruption | Undetermined | None"]


def _no_exit_codes(_: Observed) -> set[int]:
    return set()


@dataclass(frozen=True, slots=True)
class RestartCause:
    """One cause of restarts."""

    name: str
    """Its name in `status.mesh`, in `status.restarts` and in the label `cause` of `ptj_job_restarts_total`."""
    limited: bool = False
    """Whether it counts toward `recovery.maxRestarts`, because the job's own processes caused it."""
    backs_off: bool = False
    """Whether the next generation waits, with exponential backoff, although all pods run."""
    exit_codes: ExitCodes = _no_exit_codes
    """The exit codes to which the rules of `recovery.exitCodes` apply."""
    event: str = ""
    """Reason of its event; its name if empty."""
    event_type: str = WARNING
    restarts: bool = True
    """Whether it is a restart in `status`. A first start and a resumption are not."""
    replaces_gang: bool = False
    """Whether every worker gets a new pod, so that all of them have the same incarnation."""
    pauses: bool = False
    """Whether the ranks save a checkpoint and stop while their pods stay."""
    detect: Detector | None = None
    """Detects it, if it is not one of the causes below, which `failure_detection.DETECTORS` detect."""

    @property
    def is_failure(self) -> bool:
        """Whether something failed. The operator or a user decides on all other restarts, while steps still run."""
        return self.restarts and self.event_type == WARNING


CAUSES: dict[str, RestartCause] = {}
"""Every cause by name."""


def declare(cause: RestartCause) -> RestartCause:
    """Adds a cause to `CAUSES`."""
    if cause.name in CAUSES:
        raise ValueError(f"restart cause {cause.name} is declared twice")
    CAUSES[cause.name] = cause
    return cause


def cause_named(name: str) -> RestartCause:
    """The cause with this name. For a name that this version does not know, a cause that does not count or wait."""
    return CAUSES.get(name) or RestartCause(name)


@dataclass(frozen=True, slots=True)
class Interruption:
    """The generation is over."""

    cause: RestartCause
    message: str
    """What happened, for events and conditions."""
    detected_in: float = 0.0
    """Seconds from the first symptom to this verdict."""
    lost: tuple[Worker, ...] = ()
    """Workers that are unreachable, whose pods to delete."""
    job_failure: str = ""
    """Reason for which another start would not help until somebody changes something. Usually empty.

    The job is Stalled then, and counts no restart.
    """
    worker: int | None = None
    """The worker that failed, or that has the likely cause, if it is known."""
    rank: int | None = None
    """The rank that is the likely cause, if it is known."""
    node_fault: bool = False
    """Whether the worker's node was found to be at fault, by a check of its nodes."""


@dataclass(frozen=True, slots=True)
class Undetermined:
    """Something failed, but its cause is not certain yet: check again after `seconds`."""

    seconds: float


def worker_exit_codes(workers: Iterable[Worker]) -> set[int]:
    """Exit codes of containers that failed."""
    return {w.pod.exit_code for w in workers if w.pod is not None and w.pod.exit_code}


def crashed_exit_codes(observed: Observed) -> set[int]:
    """Exit codes of the pods that crashed."""
    return worker_exit_codes(w for w in observed.workers if w.state is PodState.CRASHED)


def rank_exit_codes(observed: Observed) -> set[int]:
    """Exit codes of the ranks that caused a failure, in a shell's notation.

    Ranks that exited by themselves take precedence over ranks that a signal killed, because the agent stops the other
    ranks of its worker with signals. Workers that only lost a peer are ignored if any worker failed by itself.
    """
    received = list(observed.reports_in(AgentState.FAILED).values())
    primary = [r for r in received if r.report.failure is not FailureKind.PEER_LOST] or received
    codes = {rank.exit_code for r in primary for rank in r.report.ranks if rank.exit_code}
    return {code for code in codes if code > 0} or {SIGNAL_BASE - code for code in codes}


START = declare(RestartCause("Start", restarts=False))
RESUME = declare(RestartCause("Resume", restarts=False, replaces_gang=True))
SPEC_CHANGED = declare(RestartCause("SpecChanged", event_type=NORMAL, replaces_gang=True))
REBALANCED = declare(RestartCause("Rebalanced", event_type=NORMAL, pauses=True))
RESCALED = declare(RestartCause("Rescaled", event_type=NORMAL, pauses=True))
JOB_PREEMPTED = declare(
    RestartCause("JobPreempted", event="Preempted", event_type=NORMAL, replaces_gang=True, pauses=True)
)
NODE_DRAINED = declare(RestartCause("NodeDrained", event_type=NORMAL, pauses=True))
NODE_LOST = declare(RestartCause("NodeLost"))
PREEMPTED = declare(RestartCause("Preempted"))
EVICTED = declare(RestartCause("Evicted"))
POD_LOST = declare(RestartCause("PodLost"))
POD_FAILED = declare(RestartCause("PodFailed", limited=True, exit_codes=crashed_exit_codes))
RANK_FAILURE = declare(
    RestartCause("RankFailure", limited=True, backs_off=True, exit_codes=rank_exit_codes, event="RankFailed")
)
WENT_BACK = declare(RestartCause("LossAnomaly", limited=True, exit_codes=rank_exit_codes))
HANG = declare(RestartCause("Hang", limited=True, backs_off=True))


def action_for(spec: ParallelTrainingJobSpec, codes: AbstractSet[int]) -> tuple[FailureAction, str]:
    """The action of the first exit-code rule that contains one of `codes`, and its explanation."""
    for rule in spec.recovery.exit_codes:
        named = sorted(codes & set(rule.values))
        if named:
            return rule.action, f"`recovery.exitCodes` has action {rule.action.value} for exit code {named[0]}"
    return FailureAction.COUNT, ""


def count_failure(
    status: ParallelTrainingJobStatus,
    spec: ParallelTrainingJobSpec,
    cause: RestartCause,
    codes: AbstractSet[int],
    now: datetime,
) -> None:
    """Counts a failure for the back-off, and toward the limit unless a rule ignores one of its exit codes."""
    if not cause.limited:
        return
    status.mesh = status.mesh or MeshStatus()
    record_failure(status.mesh, now)
    if action_for(spec, codes)[0] is FailureAction.IGNORE:
        return
    status.restarts_toward_limit = added(status.restarts_toward_limit)
    if spec.recovery.restart_window_seconds is not None:
        status.restart_times = [*status.restart_times, format_time(now)][-MAX_RESTART_TIMES:]


def record_failure(mesh: MeshStatus, now: datetime) -> None:
    """Counts one more consecutive failure. Starts again at 1 if the generation trained for long enough."""
    trained = 0.0 if mesh.pending_cause else seconds_since(mesh.started_time, now)
    mesh.failures = 1 if trained >= FAILURE_RESET_SECONDS else added(mesh.failures)


def drop_expired(status: ParallelTrainingJobStatus, recovery: RecoverySpec, now: datetime) -> None:
    """Forgets restarts that are older than `recovery.restartWindowSeconds`. Without a window, all restarts count."""
    if recovery.restart_window_seconds is None:
        status.restart_times = []
        return
    begin = now - timedelta(seconds=recovery.restart_window_seconds)
    in_window = [text for text in status.restart_times if (moment := parse_time(text)) is not None and moment >= begin]
    # If the window is set later, only restarts from then on count.
    status.restart_times = in_window
    status.restarts_toward_limit = len(in_window)


def exhausted(status: ParallelTrainingJobStatus, recovery: RecoverySpec) -> bool:
    """Whether one more restart that counts exceeds `recovery.maxRestarts`."""
    return status.restarts_toward_limit + 1 > recovery.max_restarts


def backoff_left(observed: Observed, cause: RestartCause) -> tuple[float, float]:
    """Seconds left before the next generation may form after this cause, and the full pause."""
    pause = backoff_seconds(_failures_so_far(observed)) if cause.backs_off else 0.0
    since = parse_time(observed.mesh.pending_since) or observed.now
    # The clock of another operator process may have been ahead when it wrote `pendingSince`.
    return max(0.0, min(pause, pause - (observed.now - since).total_seconds())), pause


def crash_backoff_left(observed: Observed, crashed: Iterable[Worker]) -> float:
    """Seconds left before crashed pods are replaced: exponential backoff, long enough to detect other crashes."""
    ends = [worker.pod.ended for worker in crashed if worker.pod is not None and worker.pod.ended is not None]
    if not ends:
        return 0.0
    pause = min(CAUSE_WAIT_SECONDS * 2.0 ** min(_failures_so_far(observed), 10), LONGEST_BACKOFF_SECONDS)
    # The times are from the nodes' clocks, which may be ahead.
    return max(0.0, min(pause, pause - (observed.now - max(ends)).total_seconds()))


def _failures_so_far(observed: Observed) -> int:
    """The number of failures that sets the next pause: restarts toward the limit, or consecutive failures if higher."""
    return max(observed.status.restarts_toward_limit, observed.mesh.failures)
