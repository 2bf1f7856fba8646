"""The job's own rules about ends: which exit codes mean what, and when the run is over and well."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.api.failure_policy import FailureAction
from meshwright.api.spec import ParallelTrainingJobSpec, SuccessPolicy
from meshwright.protocol.messages import FailureKind
from meshwright_operator.decide.failure_detection import POD_FAILED, RANK_FAILURE, failures
from meshwright_operator.decide.observed import Observed, Worker, WorkerState
from meshwright_operator.decide.rank_assignment import rank_zero_worker

SIGNAL_BASE = 128


def worker_exit_codes(workers: Iterable[Worker]) -> set[int]:
    """Exit codes of containers that ended badly."""
    return {w.pod.exit_code for w in workers if w.pod is not None and w.pod.exit_code}


def rank_exit_codes(observed: Observed) -> set[int]:
    """Exit codes of the ranks at the root of a failure, in a shell's notation.

    A rank that ended by itself speaks before those that a signal ended, since the agent stops a failed rank's
    neighbours with signals; and where any worker blames itself, those that only lost a peer are not asked.
    """
    received = list(failures(observed).values())
    blamed = [h for h in received if h.report.failure is not FailureKind.PEER_LOST] or received
    codes = {rank.exit_code for h in blamed for rank in h.report.ranks if rank.exit_code}
    return {code for code in codes if code > 0} or {SIGNAL_BASE - code for code in codes}


def exit_codes_for(observed: Observed, cause: str) -> set[int]:
    """Exit codes behind the end of a generation; none where no process of the job's ended by itself."""
    if cause == RANK_FAILURE:
        return rank_exit_codes(observed)
    if cause == POD_FAILED:
        return worker_exit_codes(w for w in observed.workers if w.state is WorkerState.CRASHED)
    return set()


def run_rejected(observed: Observed, cause: str) -> bool:
    """Whether ranks ended because the run cannot be executed as it is written, which no restart changes."""
    kinds = [received.report.failure for received in failures(observed).values()]
    return cause == RANK_FAILURE and FailureKind.REFUSED in kinds


def counts_toward_limit(spec: ParallelTrainingJobSpec, codes: set[int]) -> bool:
    """Whether a restart after these codes counts toward `recovery.maxRestarts`, as far as the rules go."""
    return action_for(spec, codes)[0] is not FailureAction.IGNORE


def action_for(spec: ParallelTrainingJobSpec, codes: set[int]) -> tuple[FailureAction, str]:
    """What the first rule that names one of `codes` says, with the sentence that explains it."""
    for rule in spec.recovery.exit_codes:
        named = sorted(codes.intersection(rule.values))
        if named:
            return rule.action, f"exit code {named[0]}: {rule.action.value} (recovery.exitCodes)"
    return FailureAction.COUNT, ""


def succeeded(observed: Observed) -> bool:
    """Whether the workers that the success policy asks for ended well, in a generation of this very spec."""
    first = observed.spec.success_policy is SuccessPolicy.FIRST_WORKER
    asked = [observed.workers[rank_zero_worker(observed)]] if first and observed.workers else observed.workers
    return (
        bool(asked)
        and observed.mesh.generation > 0
        and all(w.state is WorkerState.SUCCEEDED for w in asked)
        and all(w.pod is not None and w.pod.revision == observed.revision for w in asked)
    )
