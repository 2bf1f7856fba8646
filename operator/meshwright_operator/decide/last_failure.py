"""The latest failure of a job's own processes, with the end of the failed rank's log: it outlives the pod.

A report may have less of the log than a later one, because a rank reports its failure before its last output is read.
"""

from __future__ import annotations

from meshwright.api.base import MAX_SAFE_INTEGER
from meshwright.api.status import FailureStatus, ParallelTrainingJobStatus
from meshwright.printable import printable
from meshwright.protocol.messages import FailureEvidence
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.restart_policy import Interruption
from meshwright_operator.timestamps import format_time

MAX_MESSAGE = 1024


def record(decision: Decision, verdict: Interruption) -> None:
    """Write a failure of the job's own processes to status. Other interruptions are not recorded."""
    observed = decision.observed
    if not verdict.cause.limited:
        return
    failed = next((worker for worker in observed.workers if worker.index == verdict.worker), None)
    decision.status.last_failure = FailureStatus(
        time=format_time(observed.now),
        generation=observed.mesh.generation,
        cause=verdict.cause.name,
        message=printable(verdict.message[:MAX_MESSAGE]),
        worker=verdict.worker,
        pod=failed.pod.name if failed is not None and failed.pod is not None else "",
        node=failed.node if failed is not None else "",
        rank=verdict.rank,
    )
    add_evidence(observed, decision.status)


def add_evidence(observed: Observed, status: ParallelTrainingJobStatus) -> None:
    """Copy what the failed rank has left behind from its agent's report, once it arrives."""
    failure = status.last_failure
    if failure is None or failure.worker is None:
        return
    received = observed.agents.reports.get(failure.worker)
    evidence = received.report.evidence if received is not None else None
    if evidence is None or not _is_about(evidence, failure):
        return
    longer = len(evidence.log) + len(evidence.stacks) > len(failure.log) + len(failure.stacks)
    if longer or (failure.rank, failure.path) != (evidence.rank, evidence.path):
        log, stacks = printable(evidence.log), printable(evidence.stacks)
        changes = {"rank": evidence.rank, "log": log, "stacks": stacks, "path": evidence.path}
        status.last_failure = failure.model_copy(update=changes)


def _is_about(evidence: FailureEvidence, failure: FailureStatus) -> bool:
    """Whether it is about this failure. The numbers come from a user's pod."""
    known = failure.rank in (None, evidence.rank) and 0 <= evidence.rank <= MAX_SAFE_INTEGER
    return known and evidence.generation == failure.generation
