"""What the gang needs next, on the way to a new mesh generation: all of it holds, or nothing runs.

The order is the policy: what must not run any more goes first and is waited for, then every missing worker is placed
together, then all gates come off, and a generation is formed when every agent is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright_operator.clock import parse_time
from meshwright_operator.decide import recovery
from meshwright_operator.decide.observed import ENDED, LIVE, Observed, Worker, WorkerState
from meshwright_operator.pods import Pod

PROBLEM_AFTER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Delete:
    """These pods must go."""

    pods: tuple[Pod, ...]
    message: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do but to wait: for an event, or for `seconds`."""

    message: str
    reason: str = ""
    """A problem that somebody has to solve; empty when all goes its way."""
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Workers without a pod need a node."""

    workers: tuple[Worker, ...]
    keep: Mapping[int, str] = field(default_factory=dict)
    """Worker -> node of those that stay."""


@dataclass(frozen=True, slots=True)
class Ungate:
    """The whole gang holds its place: let it start."""

    pods: tuple[Pod, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """Every agent waits: form the next generation."""


Step = Delete | Wait | Place | Ungate | Form


def next_step(observed: Observed, pending_cause: str) -> Step:
    """The gang's next step toward a generation."""
    if unwanted := _unwanted(observed):
        return Delete(tuple(pod for pod, _ in unwanted), unwanted[0][1])
    ending = [w for w in observed.workers if w.state is WorkerState.ENDING or w.older]
    if ending or observed.strays:
        count = len(ending) + len(observed.strays)
        return Wait(f"waiting for {count} {_pods(count)} to end")
    missing = tuple(w for w in observed.workers if w.state in ENDED)
    if missing:
        crashed = recovery.fresh_crashes(observed)
        if (seconds := recovery.crash_wait(observed, crashed)) > 0:
            return Wait(f"{recovery.crash_message(crashed)}; waiting before the next try", seconds=seconds)
        return Place(missing, {w.index: w.node for w in observed.workers if w.state in LIVE})
    gated = tuple(w.pod for w in observed.workers if w.pod is not None and w.pod.gated)
    if gated:
        return Ungate(gated)
    return _gather(observed, pending_cause)


def _gather(observed: Observed, pending_cause: str) -> Step:
    waiting = [w for w in observed.workers if w.state is not WorkerState.RUNNING or w.pod is None or not w.pod.address]
    total = len(observed.workers)
    hellos = observed.agents.hellos
    absent = [w for w in observed.workers if w.index not in hellos or hellos[w.index].incarnation != w.incarnation]
    down = tuple(w.pod for w in absent if w.node_down and w.pod is not None and not w.pod.deleting)
    if down:
        return Delete(down, f"node {down[0].node} is down")
    if waiting:
        return _problem(observed, waiting) or Wait(f"{total - len(waiting)} of {total} pods run")
    if absent:
        return Wait(f"{total - len(absent)} of {total} agents are ready")
    if pending_cause == recovery.RANK_FAILURE:
        since = parse_time(observed.mesh.pending_since) or observed.now
        delay = recovery.backoff_seconds(observed.status.restarts_toward_limit)
        left = delay - (observed.now - since).total_seconds()
        if left > 0:
            return Wait(f"waiting {delay:.0f} s before the next try", seconds=left)
    return Form()


def _unwanted(observed: Observed) -> list[tuple[Pod, str]]:
    """Pods that must go and are not going yet, with the reason."""
    found = [(pod, "the plan has fewer workers") for pod in observed.strays]
    for worker in observed.workers:
        found += [(pod, "a newer pod of the worker exists") for pod in worker.older]
        if worker.pod is None or worker.pod.terminal:
            continue
        if worker.pod.revision != observed.revision:
            found.append((worker.pod, "the spec has changed"))
        elif worker.node_refused:
            found.append((worker.pod, f"node {worker.node} does not take it any more: {worker.node_refused}"))
    return [(pod, reason) for pod, reason in found if not pod.deleting]


def _problem(observed: Observed, waiting: list[Worker]) -> Wait | None:
    """The first thing that has kept a pod from running for a minute; until then it may be about to end by itself."""
    soonest = PROBLEM_AFTER_SECONDS
    troubled = [w.pod for w in waiting if w.pod is not None and w.pod.problem]
    for pod in troubled:
        age = (observed.now - pod.created).total_seconds() if pod.created is not None else PROBLEM_AFTER_SECONDS
        if age >= PROBLEM_AFTER_SECONDS:
            reason = pod.problem.partition(":")[0]
            return Wait(f"pod {pod.name}: {pod.problem}", reason=reason if reason.isalnum() else "PodProblem")
        soonest = min(soonest, PROBLEM_AFTER_SECONDS - age)
    if not troubled:
        return None
    total = len(observed.workers)
    return Wait(f"{total - len(waiting)} of {total} pods run", seconds=soonest)


def _pods(count: int) -> str:
    return "pod" if count == 1 else "pods"
