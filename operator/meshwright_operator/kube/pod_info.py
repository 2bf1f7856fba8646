"""The fields of a worker pod that decisions read, parsed once from the raw object.

Worker index and incarnation come from the pod's name, which cannot be edited, not from its labels, which can. The uid
of the controlling ownerReference identifies the pod's job: labels are not enough, because any user can set them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from meshwright.api.labels import GANG_GATE, KIND, LABEL_JOB, LABEL_REVISION, WORKER_CONTAINER
from meshwright.api.objects import is_sidecar
from meshwright.planner.cluster.pod_resources import node_of
from meshwright_operator.kube.pod_requests import request_json_of
from meshwright_operator.text import shortened
from meshwright_operator.timestamps import parse_time

NAME = re.compile(r"^(?P<job>.+)-w(?P<worker>\d{1,6})-(?P<incarnation>\d{1,9})$")
MAX_INCARNATION = 999_999_999
"""The highest incarnation in the name of a worker pod."""

# Reasons of a Failed pod that the node, the kubelet or the scheduler caused.
DISRUPTION_REASONS = frozenset(
    {
        *("Evicted", "Preempting", "Preempted", "Terminated"),
        *("NodeLost", "NodeShutdown", "Shutdown", "NodeAffinity"),
        *("UnexpectedAdmissionError", "TopologyAffinityError"),
    }
)
OUT_OF = "OutOf"
"""Begins the reason of a pod for which its node had too little of a resource, whose name follows. A kubelet that
restarts asks this again for pods that run: a GPU may have failed since."""
UNSEEN_EXITS = frozenset({"ContainerStatusUnknown", "Unknown"})
"""Reasons of a container whose exit nobody saw, of the kubelet and of containerd: its node has restarted, or another
machine has its name. The exit code, 137 or 255, is made up."""
NODE_RESTARTED = "ContainerStatusUnknown"
"""The disruption of a pod whose container's exit nobody saw."""
SIGTERM_EXIT = 143
# Reasons of a Failed pod without a container that do not come from the kubelet's admission.
NOT_REJECTIONS = frozenset({"Evicted", "Preempting", "Preempted", "Terminated", "NodeLost", "NodeShutdown", "Shutdown"})

INIT_CONTAINER = "init container"
"""What precedes the name of an init container in a pod's problem."""
REASON_LIMIT = 64
IMAGE_LIMIT = 1024
_LIMIT_RANGER_KEY = "kubernetes.io/limit-ranger"
"""Annotation in which the admission plugin says what it has set, such as `LimitRanger plugin set: cpu, memory request
for container worker`."""
_RESOURCE = r"[a-z0-9./-]{1,128}"
_LIMIT_RANGER = re.compile(
    rf"(?:set: |; )((?:{_RESOURCE}, ){{0,16}}{_RESOURCE}) request for container {WORKER_CONTAINER}(?:;|$)"
)
PROBLEM_LIMIT = 512
"""Length of the messages that a pod's problem repeats: conditions and events have a limit, and say more than this."""

# Reasons of the DisruptionTarget condition, and of a Failed pod's status, by cause.
PREEMPTIONS = frozenset({"PreemptionByScheduler", "Preempting", "Preempted"})
EVICTIONS = frozenset(
    {"EvictionByEvictionAPI", "DeletionByTaintManager", "TerminationByKubelet", "Evicted", "NodeShutdown", "Shutdown"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One worker pod."""

    name: str
    namespace: str
    uid: str
    version: int
    """`metadata.resourceVersion` as a number; 0 if it is not one."""
    job: str
    owner: str
    """uid of the controlling owner; empty if it has none."""
    of_job: bool = False
    """Whether its controlling owner is a job."""
    worker: int
    incarnation: int
    revision: str
    gates: tuple[str, ...]
    """All its scheduling gates."""
    node: str
    """Node it is bound or pinned to; empty if it has none."""
    bound: bool
    phase: str
    address: str
    """IP address; empty if it has none yet."""
    created: datetime | None
    deleting: bool
    disrupted: bool
    """Whether it was stopped from outside: evicted, preempted, deleted, or its node was shut down."""
    exit_code: int | None
    ended: datetime | None
    """When its container exited."""
    problem: str
    """Why its container does not start or it is not scheduled, as `Reason: message`; empty without a problem."""
    started: datetime | None = None
    """When its container started; None before that, or if the kubelet does not report it."""
    scheduled: datetime | None = None
    """When it was bound; None before that, or if the scheduler does not report it."""
    disruption: str = ""
    """Why it is stopped from outside, such as `PreemptionByScheduler`; empty if unknown."""
    rejection: str = ""
    """Why the kubelet rejected it before its container started, as `Reason: message`; empty if it did not."""
    deletion_deadline: datetime | None = None
    """When its grace period ends; None if it is not being deleted."""
    out_of_memory: str = ""
    """Its memory limit, or `no limit`, if its container was killed because memory ran out. Empty otherwise."""
    init_failure: str = ""
    """Which init container has failed, and how."""
    image: str = ""
    """The image of its container with its digest, as the kubelet reports it; empty before that."""
    defaulted: tuple[str, ...] = ()
    """Resources that it cannot be scheduled for, and whose requests a LimitRange of its namespace has set."""
    request_json: str = "{}"
    """Its resource requests, as `pod_requests.request_json_of` writes them."""

    @property
    def gated(self) -> bool:
        """Whether it still has the gang's scheduling gate."""
        return GANG_GATE in self.gates

    @property
    def terminal(self) -> bool:
        """Whether all its processes have exited."""
        return self.phase in ("Succeeded", "Failed")


def read_pod(obj: Mapping[str, Any]) -> Pod | None:
    """Parse a worker pod from a raw object; None if it is not a worker pod or is malformed."""
    try:
        return _read(obj)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return None


def _read(obj: Mapping[str, Any]) -> Pod | None:
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    match = NAME.match(metadata["name"])
    labels = metadata.get("labels") or {}
    job = labels.get(LABEL_JOB)
    if match is None or not job or match["job"] != job:
        return None
    version = str(metadata.get("resourceVersion", ""))
    exit_code = _exit_code(status)
    owner: Mapping[str, Any] = next((r for r in metadata.get("ownerReferences") or () if r.get("controller")), {})
    return Pod(
        name=metadata["name"],
        namespace=metadata.get("namespace", ""),
        uid=metadata["uid"],
        version=int(version) if version.isdigit() else 0,
        job=job,
        owner=owner.get("uid", ""),
        of_job=owner.get("kind") == KIND,
        worker=int(match["worker"]),
        incarnation=int(match["incarnation"]),
        revision=labels.get(LABEL_REVISION, ""),
        gates=tuple(gate["name"] for gate in spec.get("schedulingGates") or ()),
        node=node_of(obj, {}) or "",
        bound=bool(spec.get("nodeName")),
        phase=status.get("phase") or "Pending",
        address=status.get("podIP") or "",
        created=parse_time(metadata.get("creationTimestamp")),
        deleting=bool(metadata.get("deletionTimestamp")),
        disrupted=_disrupted(metadata, status, exit_code),
        exit_code=exit_code,
        ended=parse_time((_container(status).get("terminated") or {}).get("finishedAt")),
        problem=_problem(status),
        started=parse_time((_container(status).get("running") or {}).get("startedAt")),
        scheduled=_scheduled(status),
        disruption=_disruption(status),
        rejection=_rejection(status),
        deletion_deadline=parse_time(metadata.get("deletionTimestamp")),
        out_of_memory=_out_of_memory(spec, status),
        init_failure=_init_failure(spec, status),
        image=_image(status),
        defaulted=_defaulted(metadata, status),
        request_json=request_json_of(obj),
    )


def _container(status: Mapping[str, Any]) -> Mapping[str, Any]:
    for container in status.get("containerStatuses") or ():
        if container.get("name") == WORKER_CONTAINER:
            return dict(container.get("state") or {})
    return {}


def _defaulted(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[str, ...]:
    """The resources of which no node has enough, as far as the admission plugin LimitRanger names them."""
    message = _unschedulable(status)
    named = _LIMIT_RANGER.search(str((metadata.get("annotations") or {}).get(_LIMIT_RANGER_KEY) or ""))
    if not message or named is None:
        return ()
    return tuple(name for name in named[1].split(", ") if f"Insufficient {name}" in message)


def _init_failure(spec: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Which init container has failed, and how. Empty if none has: sidecars are restarted, and stopped at the end."""
    sidecars = {c.get("name") for c in spec.get("initContainers") or () if is_sidecar(c)}
    for container in status.get("initContainerStatuses") or ():
        if container.get("name") in sidecars:
            continue
        terminated = (container.get("state") or {}).get("terminated") or {}
        if code := terminated.get("exitCode"):
            message = shortened(str(terminated.get("message") or ""), PROBLEM_LIMIT)
            how = f"{INIT_CONTAINER} {container.get('name')} exited with code {code}"
            return f"{how}: {message}" if message else how
    return ""


def _image(status: Mapping[str, Any]) -> str:
    containers = (c for c in status.get("containerStatuses") or () if c.get("name") == WORKER_CONTAINER)
    return str(next((container.get("imageID") for container in containers), "") or "")[:IMAGE_LIMIT]


def _scheduled(status: Mapping[str, Any]) -> datetime | None:
    for condition in status.get("conditions") or ():
        if (condition.get("type"), condition.get("status")) == ("PodScheduled", "True"):
            return parse_time(condition.get("lastTransitionTime"))
    return None


def _exit_code(status: Mapping[str, Any]) -> int | None:
    terminated = _container(status).get("terminated") or {}
    code = terminated.get("exitCode")
    return code if isinstance(code, int) else None


def _out_of_memory(spec: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    if (_container(status).get("terminated") or {}).get("reason") != "OOMKilled":
        return ""
    worker: Mapping[str, Any] = next((c for c in spec.get("containers") or () if c.get("name") == WORKER_CONTAINER), {})
    limit = ((worker.get("resources") or {}).get("limits") or {}).get("memory")
    return f"limit {limit}" if limit else "no limit"


def _disrupted(metadata: Mapping[str, Any], status: Mapping[str, Any], exit_code: int | None) -> bool:
    if status.get("phase") != "Failed":
        return False
    stop_requested = bool(metadata.get("deletionTimestamp")) or exit_code == SIGTERM_EXIT
    disrupted = _by_the_node(str(status.get("reason") or "")) or bool(_rejection(status))
    return stop_requested or _is_target(status) or disrupted or _exit_unseen(status)


def _by_the_node(reason: str) -> bool:
    """Whether a Failed pod with this reason was ended by its node, the kubelet or the scheduler."""
    return reason in DISRUPTION_REASONS or reason.startswith(OUT_OF)


def _exit_unseen(status: Mapping[str, Any]) -> bool:
    return (_container(status).get("terminated") or {}).get("reason") in UNSEEN_EXITS


def _rejection(status: Mapping[str, Any]) -> str:
    """Why the kubelet rejected the pod: a reason, such as `OutOfcpu`, although its container never started."""
    reason = str(status.get("reason") or "")
    if status.get("phase") != "Failed" or not reason or reason in NOT_REJECTIONS:
        return ""
    started = _container(status).get("terminated") or _container(status).get("running")
    return (
        "" if started or _is_target(status) else f"{reason}: {status.get('message') or 'the kubelet rejected the pod'}"
    )


def _is_target(status: Mapping[str, Any]) -> bool:
    return any(
        c.get("type") == "DisruptionTarget" and c.get("status") == "True" for c in status.get("conditions") or ()
    )


def _disruption(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return str(condition.get("reason") or "")
    reason = str(status.get("reason") or "")
    if not reason and _exit_unseen(status):
        return NODE_RESTARTED
    return reason[:REASON_LIMIT] if _by_the_node(reason) else ""


def _problem(status: Mapping[str, Any]) -> str:
    waiting = [("", _container(status).get("waiting") or {})]
    for container in status.get("initContainerStatuses") or ():
        state = container.get("state") or {}
        waiting.append((f"{INIT_CONTAINER} {container.get('name')}: ", state.get("waiting") or {}))
    for where, state in waiting:
        reason = state.get("reason", "")
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            # The kubelet passes on what a registry or a volume answered, of any length.
            message = str(state.get("message") or "the container does not start")
            return f"{reason[:REASON_LIMIT]}: {where}{shortened(message, PROBLEM_LIMIT)}"
    message = _unschedulable(status)
    return f"Unschedulable: {shortened(message, PROBLEM_LIMIT)}" if message else ""


def _unschedulable(status: Mapping[str, Any]) -> str:
    """Why the scheduler does not bind the pod; empty if it has not said so."""
    for condition in status.get("conditions") or ():
        kind = (condition.get("type"), condition.get("status"), condition.get("reason"))
        if kind == ("PodScheduled", "False", "Unschedulable"):
            return str(condition.get("message") or "no node accepts the pod")
    return ""
