"""The gang's next action toward a mesh generation: all workers start together, or none does.

The order is the policy. First delete obsolete pods and wait until they are gone. Then place all missing workers
together. Then remove all scheduling gates. When every agent polls, form the generation. Every wait has a time limit,
after which the attempt ends and the gang releases its nodes, except the wait for scheduling gates of other controllers.
"""

from __future__ import annotations

from meshwright.protocol.messages import AgentState
from meshwright.rules.recovery_times import LOSSES
from meshwright_operator.decide import failure_detection, in_memory, preflight, restart_policy, size_status, sizing
from meshwright_operator.decide.external_scheduler import external_scheduler_action
from meshwright_operator.decide.gang_actions import (
    Delete,
    EndAttempt,
    FormGeneration,
    GangAction,
    Place,
    Ungate,
    Wait,
)
from meshwright_operator.decide.incarnations import taken_names
from meshwright_operator.decide.mesh_generation import uses_external_scheduler
from meshwright_operator.decide.observed import ENDED, LIVE, Observed, PodState, Worker
from meshwright_operator.decide.pod_gates import wait_for_gates
from meshwright_operator.decide.pod_problems import PROBLEM_AFTER_SECONDS, fix_for, problem_seconds
from meshwright_operator.decide.report_interval import heard_after
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.text import capitalized, counted, sentences
from meshwright_operator.timestamps import parse_time, seconds_since

AGENTS_MISSING = "AgentsMissing"
PROBLEM_LIMIT_SECONDS = 300.0
"""Age at which a pod with a problem ends the attempt: time for a registry or a volume to become available again."""
REPEATED_PROBLEM_LIMIT_SECONDS = 60.0
"""The same for every attempt after the first, since the problem did not resolve during the first one."""
PROBLEM_LIMIT_SECONDS_BY_REASON = {"InvalidImageName": 60.0, "ErrImageNeverPull": 60.0, "Unschedulable": 120.0}
"""The same for problems that do not resolve by themselves, or that other nodes would resolve."""
POD_START_SECONDS = 1800.0
"""Age at which a pod that does not run and reports no problem ends the attempt: large images pull slowly."""
ABSENT_AGENT_SECONDS = 120.0
"""Seconds after which a pod is replaced if its agent does not poll while other agents do."""
MAX_AGENT_REPLACEMENTS = 3
"""How often pods are replaced because their agents do not poll, before the attempt ends."""
SAVE_MARGIN_SECONDS = 30.0
"""Time that ranks have before a resize, besides the grace period of their pods, to save a checkpoint."""
PAUSE_RECEIVED_SECONDS = 15.0
"""Time after which an agent that has not confirmed a pause does not know pauses."""
SILENT_GANG_SECONDS = 600.0
"""Seconds after which the attempt ends if no agent of the gang reaches the coordinator."""


def next_action(observed: Observed, pending_cause: str) -> GangAction:
    """The gang's next action toward a generation."""
    if pending_cause == restart_policy.NODE_DRAINED.name:
        beside = size_status.is_moving(observed.status)
        if (move := _leave(observed) if beside else _move(observed)) is not None:
            return move
    if obsolete := _obsolete_pods(observed):
        return Delete(tuple(pod for pod, _ in obsolete), obsolete[0][1])
    ending = [w for w in observed.workers if w.state is PodState.ENDING or w.older_pods]
    # A growth that ends now: the job may start with more workers, and another one may get the index of one of these.
    ending += [w for w in observed.joining if w.state in (*LIVE, PodState.ENDING) or w.older_pods]
    if ending or observed.excess_pods:
        count = len(ending) + len(observed.excess_pods)
        return Wait(f"Waiting for {counted(count, 'pod')} to terminate")
    missing = tuple(w for w in observed.workers if w.state in ENDED)
    if rejected := [w.pod for w in missing if w.pod is not None and w.pod.rejection]:
        return _rejected_pods(rejected)
    if missing:
        crashed = [w for w in missing if w.state in (PodState.CRASHED, PodState.SUCCEEDED)]
        if (seconds := restart_policy.crash_backoff_left(observed, crashed)) > 0:
            backoff = f"Backing off before replacing {counted(len(missing), 'pod')}"
            return Wait(sentences(failure_detection.crash_message(crashed), backoff), seconds=seconds)
        if (taken := taken_names(observed, pending_cause, missing)) is not None:
            return taken
        assigned = {w.index: w.node for w in observed.workers if w.state in LIVE}
        return Place(missing, assigned, sizing.sizes_to_place(observed) if observed.elastic is not None else ())
    gated = tuple(w.pod for w in observed.workers if w.pod is not None and w.pod.gated)
    if gated:
        return Ungate(gated)
    if (held := wait_for_gates(observed)) is not None:
        return held
    if uses_external_scheduler(observed) and (action := external_scheduler_action(observed)) is not None:
        return action
    return _wait_for_agents(observed, pending_cause)


def _leave(observed: Observed) -> Delete | Wait | None:
    """Deletes the pods whose replacements have started beside the job, after the ranks have saved a checkpoint."""
    pods = tuple(pod for pod in observed.excess_pods if not pod.deleting)
    if not pods:
        return None
    if saving := saving_agents(observed):
        return Wait(f"{counted(saving, 'worker')} still {'saves' if saving == 1 else 'save'} a checkpoint", seconds=1.0)
    return Delete(pods, f"node {pods[0].node} drains, and workers on other nodes replace them")


def _move(observed: Observed) -> Delete | Wait | None:
    """Deletes the pods on draining nodes after their ranks have saved a checkpoint. None once that is done.

    Pods that replace them stay, also if their nodes drain later: whether they fit elsewhere is asked when they train.
    """
    if any(worker.state is not PodState.RUNNING for worker in observed.workers):
        return None
    since = parse_time(observed.mesh.pending_since) or observed.now
    leaving = [
        worker
        for worker in observed.workers
        if worker.node_drain_reason and worker.pod is not None and (worker.pod.created or since) <= since
    ]
    if not leaving:
        return None
    if saving := saving_agents(observed):
        return Wait(f"{counted(saving, 'worker')} still {'saves' if saving == 1 else 'save'} a checkpoint", seconds=1.0)
    pods = tuple(worker.pod for worker in leaving if worker.pod is not None)
    return Delete(pods, f"node {leaving[0].node} drains ({leaving[0].node_drain_reason})")


def _rejected_pods(pods: list[Pod]) -> EndAttempt:
    """Ends the attempt, because a node's kubelet rejected pods. The same node would reject them again."""
    first, more = pods[0], f" (and {len(pods) - 1} more)" if len(pods) > 1 else ""
    avoid = {pod.node: f"the kubelet rejected a pod of this job ({pod.rejection.partition(':')[0]})" for pod in pods}
    message = f"The kubelet of node {first.node} rejected pod {first.name}{more}: {first.rejection}"
    return EndAttempt("PodRejected", message, tuple(pods), avoid)


def _wait_for_agents(observed: Observed, pending_cause: str) -> GangAction:
    waiting = [w for w in observed.workers if w.state is not PodState.RUNNING or w.pod is None or not w.pod.address]
    total = len(observed.workers)
    waiting_agents = observed.agents.waiting_agents
    absent = [
        w
        for w in observed.workers
        if w.index not in waiting_agents or waiting_agents[w.index].incarnation != w.incarnation
    ]
    down = tuple(w.pod for w in absent if w.node_down and w.pod is not None and not w.pod.deleting)
    if down:
        return Delete(down, f"node {down[0].node} is down")
    if waiting:
        return (
            _overdue_pods(observed, waiting)
            or _problem(observed, waiting)
            or Wait(f"{total - len(waiting)} of {total} pods are running")
        )
    if absent:
        return _absent_agents(observed, absent) or Wait(f"{total - len(absent)} of {total} agents are ready")
    if unheard := _unheard(observed, pending_cause):
        return Wait(f"{total - unheard} of {total} agents have reported what their ranks do", seconds=0.5)
    if in_memory.pauses(observed, pending_cause) and (saving := saving_agents(observed)):
        return Wait(f"{counted(saving, 'worker')} still {'saves' if saving == 1 else 'save'} a checkpoint")
    if (obstacle := preflight.obstacle(observed)) is not None:
        return obstacle
    if leaving := in_memory.leaving(observed, pending_cause):
        return Wait(f"The ranks of {counted(leaving, 'worker')} still leave their generation", seconds=0.5)
    left, pause = restart_policy.backoff_left(observed, restart_policy.cause_named(pending_cause))
    if left > 0 and not in_memory.progresses(observed, pending_cause):
        return Wait(f"Backing off for {pause:.0f} s before the next start", seconds=left)
    return FormGeneration()


def _obsolete_pods(observed: Observed) -> list[tuple[Pod, str]]:
    """Pods to delete that are not being deleted yet, with the reason."""
    obsolete = [(pod, "the plan has fewer workers") for pod in observed.excess_pods]
    for worker in observed.workers:
        obsolete += [(pod, "a newer pod of its worker exists") for pod in worker.older_pods]
        if worker.pod is None or worker.pod.terminal:
            continue
        if worker.pod.revision != observed.revision:
            obsolete.append((worker.pod, "the spec has changed"))
        elif worker.node_rejection:
            obsolete.append((worker.pod, f"node {worker.node} no longer accepts it ({worker.node_rejection})"))
    return [(pod, reason) for pod, reason in obsolete if not pod.deleting]


def _overdue_pods(observed: Observed, waiting: list[Worker]) -> EndAttempt | None:
    """Ends the attempt if pods have not started within their limit."""
    overdue: list[tuple[Pod, str]] = []
    # A pod that runs without an address waits too.
    for pod in (w.pod for w in waiting if w.pod is not None):
        bound = _start_limit(observed, pod)
        if observed.waiting_age(pod, bound) >= bound:
            overdue.append((pod, pod.problem.partition(":")[0]))
    if not overdue:
        return None
    first, reason = overdue[0]
    more = f" (and {len(overdue) - 1} more)" if len(overdue) > 1 else ""
    problem = first.problem or f"not running after {POD_START_SECONDS:.0f} s, and it reports no problem"
    avoid = {pod.node: "the scheduler rejected a pod of this job" for pod, why in overdue if why == "Unschedulable"}
    return EndAttempt(
        _condition_reason(reason) if reason else "PodsDoNotStart",
        sentences(f"Pod {first.name}{more}: {problem}", fix_for(problem, observed.spec, first.defaulted)),
        tuple(pod for pod, _ in overdue),
        avoid,
    )


def _start_limit(observed: Observed, pod: Pod) -> float:
    """The age at which a pod that has not started ends the attempt."""
    reason = pod.problem.partition(":")[0]
    limit = REPEATED_PROBLEM_LIMIT_SECONDS if observed.mesh.attempts else PROBLEM_LIMIT_SECONDS
    return PROBLEM_LIMIT_SECONDS_BY_REASON.get(reason, limit) if reason else POD_START_SECONDS


def _absent_agents(observed: Observed, absent: list[Worker]) -> GangAction | None:
    """Handles agents that do not poll although their pods run: replaces some, or ends the attempt if all are absent.

    Only time in which the coordinator could have received a poll counts, so that downtime of the operator replaces no
    pod.
    """
    listening, replacements = observed.agents.listening_seconds, observed.mesh.agent_replacements
    doubled = 0 if observed.mesh.attempts else min(replacements, MAX_AGENT_REPLACEMENTS - 1)
    wait = ABSENT_AGENT_SECONDS * 2.0**doubled
    late = tuple(
        w.pod
        for w in absent
        if w.pod is not None
        and not w.pod.deleting
        and min(listening, _running_seconds(observed, w.pod), _pending_seconds(observed)) >= wait
    )
    if not late:
        return None
    if len(absent) < len(observed.workers):
        avoid = {pod.node: "the agent of a pod of this job did not poll the coordinator" for pod in late}
        silent = f"the agent of {late[0].name} has not polled the coordinator for {wait:.0f} s"
        if replacements < MAX_AGENT_REPLACEMENTS:
            return Delete(late, silent, avoid, replaces_agents=True)
        message = f"{capitalized(silent)}. Its pod was replaced {replacements} times. Check the log of the pod"
        return EndAttempt(AGENTS_MISSING, message, late, avoid)
    if min(listening, _pending_seconds(observed)) < SILENT_GANG_SECONDS:
        return None
    message = (
        "All pods are running, but no agent reaches the coordinator. Check network policies and the coordinator's URL"
    )
    return EndAttempt("AgentsUnreachable", message, late)


def _unheard(observed: Observed, pending_cause: str) -> int:
    """The number of agents that poll and have not reported yet since this operator started, if that matters.

    Their ranks may hold their state, save a checkpoint, or go on: a generation that forms before would end that.
    """
    if observed.agents.listening_seconds >= heard_after(len(observed.workers)):
        return 0
    cause, mesh = restart_policy.cause_named(pending_cause), observed.mesh
    held = bool(mesh.in_memory) and in_memory.goes_on(observed, pending_cause)
    if not held and not cause.pauses and not (mesh.replica_groups is not None and pending_cause in LOSSES):
        return 0
    polling, reports = observed.agents.waiting_agents, observed.agents.reports
    return sum(
        worker.index in polling
        and polling[worker.index].generation > 0
        and (worker.index not in reports or reports[worker.index].report.incarnation != worker.incarnation)
        for worker in observed.workers
    )


def saving_agents(observed: Observed) -> int:
    """The number of workers whose ranks still run after a pause, as long as they may take to save a checkpoint.

    Agents before version 0.2 do not pause: they are not waited for.
    """
    waited = observed.audible_seconds(observed.mesh.pending_since)
    limit = observed.spec.workers.termination_grace_period_seconds + SAVE_MARGIN_SECONDS
    states = (AgentState.STARTING, AgentState.RUNNING, AgentState.DRAINING)
    reports = [received.report for state in states for received in observed.reports_in(state).values()]
    for pod in observed.excess_pods:  # of workers that end, which save with the others
        received = observed.agents.reports.get(pod.worker)
        if received is not None and received.report.incarnation == pod.incarnation:
            same = received.report.generation == observed.mesh.generation
            reports += [received.report] if same and received.report.state in states else []
    if waited >= limit:
        return 0
    return sum(waited < PAUSE_RECEIVED_SECONDS or report.paused for report in reports)


def _pending_seconds(observed: Observed) -> float:
    return seconds_since(observed.mesh.pending_since, observed.now)


def _running_seconds(observed: Observed, pod: Pod) -> float:
    """Seconds since the pod's container started, without the time to pull its image."""
    since = pod.started or pod.created
    return (observed.now - since).total_seconds() if since is not None else 0.0


def _condition_reason(text: str) -> str:
    return text if text.isalnum() and text.isascii() and text[0].isalpha() else "PodProblem"


def _problem(observed: Observed, waiting: list[Worker]) -> Wait | None:
    """The first problem of a pod that has lasted for a while. A younger problem may still resolve by itself."""
    soonest = PROBLEM_AFTER_SECONDS
    troubled = [w.pod for w in waiting if w.pod is not None and w.pod.problem]
    for pod in troubled:
        limit = problem_seconds(pod.problem)
        age = observed.age(pod, limit)
        if age >= limit:
            text = sentences(f"Pod {pod.name}: {pod.problem}", fix_for(pod.problem, observed.spec, pod.defaulted))
            left = max(1.0, _start_limit(observed, pod) - age)
            return Wait(text, reason=_condition_reason(pod.problem.partition(":")[0]), seconds=left)
        soonest = min(soonest, limit - age)
    if not troubled:
        return None
    total = len(observed.workers)
    return Wait(f"{total - len(waiting)} of {total} pods are running", seconds=soonest)
