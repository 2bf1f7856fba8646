"""Nodes on which a job's processes fail again and again: which of them the job avoids, and until when.

One failure says little about a node: the job's own code fails on any. So the first is answered by a restart in the same
pods. A node whose workers fail `recovery.suspectNodes.failures` times within the window is suspect: its workers move to
other nodes, and the job avoids it until an expiry. A node that fails after its expiry is avoided again at once, and so
is one that the check of nodes found at fault.

If the moved worker fails on the other node too, the failures follow the worker: then the nodes are innocent, and none
is avoided because of this worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from meshwright.api.spec import SuspectNodesSpec
from meshwright.api.status import MAX_SUSPECT_NODES, ParallelTrainingJobStatus, SuspectNode
from meshwright.protocol.run_config import NativeRun
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.observed import Observed, Worker
from meshwright_operator.decide.restart_policy import HANG, NODE_LOST, POD_FAILED, RANK_FAILURE, Interruption
from meshwright_operator.kube.job_event import WARNING
from meshwright_operator.text import counted, sentences
from meshwright_operator.timestamps import format_time, parse_time, seconds_since

LONGEST_WAIT_SECONDS = 120.0
"""A job that waits longer for nodes uses those that it avoids: a suspect node is better than none."""

_EVIDENCE = (RANK_FAILURE, HANG, POD_FAILED, NODE_LOST)


def judge(decision: Decision, verdict: Interruption) -> Interruption:
    """Record a failure against its node. If the node is suspect now, all workers on it are lost: they move."""
    observed, spec = decision.observed, decision.observed.spec.recovery.suspect_nodes
    failed = _failed_worker(observed, verdict)
    if spec is None or failed is None or not failed.node or verdict.job_failure:
        return verdict
    entry = _struck(decision.status, failed, verdict, spec, observed.now)
    followed = (
        []
        if verdict.node_fault
        else [
            other
            for other in decision.status.suspect_nodes or ()
            if other.worker == failed.index
            and other.node != failed.node
            and _within(other, spec.window_seconds, observed)
        ]
    )
    if followed:
        _clear(decision, entry, followed, failed)
        return verdict
    suspected_before = entry.avoided_until is not None
    if entry.failures < spec.failures and not suspected_before and not verdict.node_fault:
        _write(decision.status, entry)
        return verdict
    until = format_time(observed.now + timedelta(seconds=spec.avoid_seconds))
    _write(decision.status, entry.model_copy(update={"avoided_until": until}))
    workers = tuple(worker for worker in observed.workers if worker.node == failed.node and not worker.completed)
    live = [worker for worker in workers if worker.pod is not None and not worker.pod.terminal]
    again = "again " if suspected_before else ""
    found = verdict.message if verdict.node_fault else verdict.cause.name
    why = f"Node {failed.node} is suspect {again}after {counted(entry.failures, 'failure')} ({found})"
    who = f"{counted(len(workers), 'worker')} {'moves' if len(workers) == 1 else 'move'} to other nodes"
    decision.add_event("NodeSuspect", sentences(why, f"{who}, and the job avoids it until {until}"), WARNING)
    return replace(verdict, lost=tuple({worker.index: worker for worker in (*verdict.lost, *live)}.values()))


def blocked(observed: Observed, status: ParallelTrainingJobStatus) -> Mapping[str, str]:
    """Node -> why the job must not use it now."""
    spec = observed.spec.recovery.suspect_nodes
    if spec is None or _waited(observed, status) > LONGEST_WAIT_SECONDS:
        return {}
    return {
        entry.node: f"it is suspect after {counted(entry.failures, 'failure')} of this job, until {entry.avoided_until}"
        for entry in status.suspect_nodes or ()
        if (left := _seconds_left(entry, observed.now)) is not None and 0 < left <= spec.avoid_seconds
    }


def needs_check(observed: Observed, status: ParallelTrainingJobStatus, cause: str) -> bool:
    """Whether ranks check their nodes before they start: after a failure, if one of their nodes has failed before.

    Ranks that recover in memory go on in their processes, and a user's command has no check.
    """
    spec = observed.spec.recovery.suspect_nodes
    if spec is None or not spec.check_nodes or not isinstance(observed.run, NativeRun):
        return False
    failed = {entry.node for entry in status.suspect_nodes or ()}
    after_failure = cause in {evidence.name for evidence in _EVIDENCE} and not observed.spec.recovery.in_memory
    return after_failure and len(observed.workers) > 1 and any(worker.node in failed for worker in observed.workers)


def seconds_until_used(observed: Observed, status: ParallelTrainingJobStatus) -> float | None:
    """Seconds until a job that waits for nodes uses those that it avoids. None if it does not wait, or avoids none."""
    waited = _waited(observed, status)
    if not 0 < waited <= LONGEST_WAIT_SECONDS or not blocked(observed, status):
        return None
    return LONGEST_WAIT_SECONDS + 1 - waited


def _waited(observed: Observed, status: ParallelTrainingJobStatus) -> float:
    """For how long the next generation has been pending, in seconds."""
    mesh = status.mesh
    pending = mesh is not None and mesh.pending_cause and mesh.pending_since is not None
    return seconds_since(mesh.pending_since, observed.now) if pending and mesh is not None else 0.0


def forget(observed: Observed, status: ParallelTrainingJobStatus) -> None:
    """Remove the nodes that have not failed for so long that their failures count no more."""
    spec = observed.spec.recovery.suspect_nodes
    if spec is None:
        status.suspect_nodes = None
        return
    kept = max(spec.window_seconds, 2 * spec.avoid_seconds)
    status.suspect_nodes = [entry for entry in status.suspect_nodes or () if _within(entry, kept, observed)] or None


def _failed_worker(observed: Observed, verdict: Interruption) -> Worker | None:
    """The worker whose node has to answer for the failure, if it is known."""
    if verdict.cause not in _EVIDENCE:
        return None
    if verdict.cause is NODE_LOST:
        return next((worker for worker in observed.workers if worker.node_down), None)
    return next((worker for worker in observed.workers if worker.index == verdict.worker), None)


def _struck(
    status: ParallelTrainingJobStatus, failed: Worker, verdict: Interruption, spec: SuspectNodesSpec, now: datetime
) -> SuspectNode:
    """The node's entry after one more failure. Failures before the window count no more."""
    old = next((entry for entry in status.suspect_nodes or () if entry.node == failed.node), None)
    recent = old is not None and seconds_since(old.last_failure, now) <= spec.window_seconds
    return SuspectNode(
        node=failed.node,
        worker=failed.index,
        failures=1 + (old.failures if old is not None and recent else 0),
        cause=verdict.cause.name,
        last_failure=format_time(now),
        avoided_until=old.avoided_until if old is not None else None,
    )


def _clear(decision: Decision, entry: SuspectNode, followed: list[SuspectNode], failed: Worker) -> None:
    """Avoid neither this node nor those that the worker was on before."""
    nodes = ", ".join(other.node for other in followed)
    if any(other.avoided_until is not None for other in followed):
        text = f"Worker {failed.index} failed on node {failed.node} as before on {nodes}: no node is avoided for it"
        decision.add_event("NodeCleared", text)
    for other in (*followed, entry):
        _write(decision.status, other.model_copy(update={"avoided_until": None}))


def _write(status: ParallelTrainingJobStatus, entry: SuspectNode) -> None:
    others = [other for other in status.suspect_nodes or () if other.node != entry.node]
    status.suspect_nodes = [*others, entry][-MAX_SUSPECT_NODES:]


def _within(entry: SuspectNode, seconds: float, observed: Observed) -> bool:
    return seconds_since(entry.last_failure, observed.now) <= seconds


def _seconds_left(entry: SuspectNode, now: datetime) -> float | None:
    until = parse_time(entry.avoided_until)
    return None if until is None else (until - now).total_seconds()
