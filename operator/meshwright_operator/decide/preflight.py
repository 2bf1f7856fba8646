"""What follows from the checks that agents make in their pods: a condition, events, and whether ranks may start.

Agents check and name what is wrong; `spec.preflight` says what is fatal. Agents before 0.2 report nothing, and are not
waited for longer than `WAIT_SECONDS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.api import conditions as names
from meshwright.api.conditions import find
from meshwright.api.preflight import Check, PreflightMode, PreflightSpec
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.protocol.preflight import Finding, PreflightReport
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.gang_actions import EndAttempt, Wait
from meshwright_operator.decide.observed import Observed, Worker
from meshwright_operator.kube.job_event import WARNING
from meshwright_operator.text import capitalized, counted, sentences

PREFLIGHT_FAILED = "PreflightFailed"
"""Reason of the condition and of the event, and of an attempt that a fatal finding ends."""
PASSED = "PreflightPassed"
CHECK_FAILED = "a check of a pod of this job failed"
"""Why the job avoids a node for a while."""
WAIT_SECONDS = 30.0
"""Time for which ranks wait for the checks of their pods, if any check is fatal."""
MAX_NAMED = 3
"""Findings that a message names."""


@dataclass(frozen=True, slots=True)
class PodFinding:
    """What is wrong with the pod of one worker."""

    worker: Worker
    finding: Finding

    @property
    def sentence(self) -> str:
        """The finding and its fix, with the pod and its node."""
        pod = self.worker.pod.name if self.worker.pod is not None else f"worker {self.worker.index}"
        node = f" on {self.worker.node}" if self.worker.node else ""
        return sentences(f"{pod}{node}: {self.finding.message}", f"Fix: {self.finding.fix}" if self.finding.fix else "")


def policy_of(spec: ParallelTrainingJobSpec) -> PreflightSpec:
    """`spec.preflight`, or its defaults."""
    return spec.preflight or PreflightSpec()


def report(decision: Decision) -> None:
    """Sets the condition `PreflightPassed`, and posts an event with new findings."""
    observed = decision.observed
    if policy_of(observed.spec).mode is PreflightMode.IGNORE:
        others = [one for one in decision.status.conditions if one.type != names.PREFLIGHT_PASSED]
        decision.status.conditions = others
        return
    found = findings(observed)
    if found:
        kinds = Counter(one.finding.check for one in found)
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        text = sentences(*(one.sentence for one in found[:MAX_NAMED]))
        message = f"{', '.join(sorted(kinds))}: {text}{more}"
        before = find(observed.status.conditions, names.PREFLIGHT_PASSED)
        if before is None or before.status != "False" or before.message != message[:1024]:
            decision.add_event(PREFLIGHT_FAILED, message, WARNING)
        decision.condition(names.PREFLIGHT_PASSED, False, PREFLIGHT_FAILED, message)
    elif len(_reports(observed)) == len(observed.workers):
        text = f"{counted(len(observed.workers), 'pod')} checked"
        decision.condition(names.PREFLIGHT_PASSED, True, PASSED, text)


def obstacle(observed: Observed) -> Wait | EndAttempt | None:
    """What prevents the start of ranks: a fatal finding, or checks that are not done yet."""
    policy = policy_of(observed.spec)
    if policy.mode is PreflightMode.IGNORE or not policy.fatal:
        return None
    fatal = [one for one in findings(observed) if one.finding.check in policy.fatal]
    if fatal:
        pods = {one.worker.index: one.worker for one in fatal}
        avoid = {worker.node: CHECK_FAILED for worker in pods.values() if worker.node}
        message = capitalized(sentences(*(one.sentence for one in fatal[:MAX_NAMED])))
        return EndAttempt(PREFLIGHT_FAILED, message, tuple(w.pod for w in pods.values() if w.pod is not None), avoid)
    left = WAIT_SECONDS - observed.audible_seconds(observed.mesh.pending_since)
    missing = len(observed.workers) - len(_reports(observed))
    if missing and left > 0:
        return Wait(f"Waiting for the checks of {counted(missing, 'pod')}", seconds=left)
    return None


def findings(observed: Observed) -> Sequence[PodFinding]:
    """What the checks of all pods have found, without checks that are off."""
    found: Sequence[PodFinding] = observed.once("preflight", lambda: list(_findings(observed)))
    return found


def _findings(observed: Observed) -> Iterator[PodFinding]:
    ignored = set(policy_of(observed.spec).ignored)
    reports = _reports(observed)
    for worker in observed.workers:
        for finding in reports[worker.index].findings if worker.index in reports else ():
            if finding.check not in ignored:
                yield PodFinding(worker, finding)
    if Check.VOLUME not in ignored:
        yield from _other_volumes(observed, reports)


def _other_volumes(observed: Observed, reports: dict[int, PreflightReport]) -> Iterator[PodFinding]:
    """Workers whose checkpoint volume is not that of most workers."""
    volumes = {index: one.volume for index, one in reports.items() if one.volume}
    if len(set(volumes.values())) < 2:
        return
    common = Counter(volumes.values()).most_common(1)[0][0]
    first = min(index for index, volume in volumes.items() if volume == common)
    for worker in observed.workers:
        if volumes.get(worker.index, common) != common:
            message = f"its checkpoint volume is not that of worker {first}: no checkpoint of all ranks is complete"
            fix = "use a claim with access mode ReadWriteMany and one shared volume in `checkpoint.claimName`"
            yield PodFinding(worker, Finding(check=Check.VOLUME.value, message=message, fix=fix))


def _reports(observed: Observed) -> dict[int, PreflightReport]:
    """Worker index -> the result of the checks of its current pod."""
    return {
        worker.index: received.report.preflight
        for worker in observed.workers
        if (received := observed.agents.reports.get(worker.index)) is not None
        and received.report.incarnation == worker.incarnation
        and received.report.preflight is not None
    }
