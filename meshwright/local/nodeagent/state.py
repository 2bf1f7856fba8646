"""What is known of a pod's containers, and the pod status that follows from it (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.local import clock
from meshwright.local.resources import Object


@dataclass(frozen=True, slots=True)
class Terminated:
    """How a container ended."""

    exit_code: int
    reason: str
    started: str
    finished: str
    message: str = ""

    def wire(self, container_id: str) -> Object:
        """The API's form."""
        body: Object = {
            "exitCode": self.exit_code,
            "reason": self.reason,
            "startedAt": self.started,
            "finishedAt": self.finished,
            "containerID": container_id,
        }
        if self.exit_code > 128 and self.reason == "Error":
            body["signal"] = self.exit_code - 128
        if self.message:
            body["message"] = self.message
        return body


@dataclass(slots=True)
class ContainerState:
    """One container now. Exactly one of `running_since` and `terminated` is set, or neither while it waits."""

    name: str
    image: str
    container_id: str
    waiting: tuple[str, str] = ("ContainerCreating", "")
    running_since: str | None = None
    terminated: Terminated | None = None
    last: Terminated | None = None
    restarts: int = 0
    ready: bool = False
    started: bool = False

    def wire(self) -> Object:
        """The API's containerStatus."""
        if self.running_since is not None:
            state: Object = {"running": {"startedAt": self.running_since}}
        elif self.terminated is not None:
            state = {"terminated": self.terminated.wire(self.container_id)}
        else:
            reason, message = self.waiting
            state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        return {
            "name": self.name,
            "image": self.image,
            "imageID": "",
            "containerID": self.container_id if self.running_since or self.terminated or self.last else "",
            "restartCount": self.restarts,
            "ready": self.ready,
            "started": self.started,
            "state": state,
            "lastState": {"terminated": self.last.wire(self.container_id)} if self.last else {},
        }


@dataclass(slots=True)
class PodState:
    """One pod now."""

    pod_ip: str
    host_ip: str
    start_time: str
    init: list[ContainerState]
    containers: list[ContainerState]
    initialized: bool = False
    over: bool = False
    """No container runs or will run again."""
    reason: str = ""
    """Why the whole pod failed, such as DeadlineExceeded; then its phase is Failed whatever its containers say."""
    message: str = ""
    deleting: bool = False
    transitions: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Condition → its status and since when."""


def phase(state: PodState) -> str:
    """Pending, Running, Succeeded or Failed."""
    if state.over:
        codes = [item.terminated.exit_code if item.terminated else 137 for item in state.containers]
        failed_init = any(item.terminated and item.terminated.exit_code for item in state.init)
        return "Failed" if state.reason or failed_init or any(codes) else "Succeeded"
    begun = any(item.running_since or item.terminated or item.last for item in state.containers)
    return "Running" if begun else "Pending"


def status(state: PodState, gates: list[str], others: list[Object]) -> Object:
    """The pod status to report.

    Args:
        state: What is known.
        gates: Condition types of the pod's readinessGates.
        others: The pod's conditions as the API has them, for the gates.
    """
    now = phase(state)
    over = now in ("Succeeded", "Failed")
    running = all(item.ready for item in state.containers) and not over
    passed = {item["type"] for item in others if item["status"] == "True"}
    gated = [gate for gate in gates if gate not in passed]
    unready = "PodCompleted" if now == "Succeeded" else "PodFailed" if now == "Failed" else "ContainersNotReady"
    body: Object = {
        "phase": now,
        "podIP": state.pod_ip,
        "podIPs": [{"ip": state.pod_ip}],
        "hostIP": state.host_ip,
        "hostIPs": [{"ip": state.host_ip}],
        "startTime": state.start_time,
        "conditions": [
            _condition(state, "PodReadyToStartContainers", not over, ""),
            _condition(state, "Initialized", state.initialized, "ContainersNotInitialized"),
            _condition(state, "ContainersReady", running, unready),
            _condition(state, "Ready", running and not gated, "ReadinessGatesNotReady" if running else unready),
        ],
        "containerStatuses": [item.wire() for item in state.containers],
    }
    if state.init:
        body["initContainerStatuses"] = [item.wire() for item in state.init]
    if state.reason:
        body.update(reason=state.reason, message=state.message)
    return body


def _condition(state: PodState, kind: str, holds: bool, reason: str) -> Object:
    value = "True" if holds else "False"
    before = state.transitions.get(kind)
    if before is None or before[0] != value:
        before = state.transitions[kind] = (value, clock.now())
    # An empty reason is written too: a patch leaves out nothing that it does not name.
    return {"type": kind, "status": value, "lastTransitionTime": before[1], "reason": None if holds else reason or None}
