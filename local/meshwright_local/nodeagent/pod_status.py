"""The status of a running pod, as its node reports it: phase, conditions, containers."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.api.objects import KubeObject
from meshwright_local.kube import timestamps
from meshwright_local.nodeagent.container import Container
from meshwright_local.nodeagent.restarts import may_restart_all
from meshwright_local.nodeagent.sandbox import Sandbox


@dataclass(slots=True)
class PodStatus:
    """What is known of a pod's life beside its containers, and the status that follows from both."""

    sandbox: Sandbox
    init: list[Container]
    sidecars: list[Container]
    """Those of `init` that run beside the containers."""
    containers: list[Container]
    start_time: str
    ephemeral: list[Container] = field(default_factory=list)
    over: bool = False
    initialized: bool = False
    restarting: bool = False
    """Whether all containers are being stopped, to begin again."""
    failure: tuple[str, str] | None = None
    """Reason and message of a pod that failed as a whole."""
    _transitions: dict[str, tuple[bool, str]] = field(default_factory=dict)

    def phase(self) -> str:
        """Return the phase: Pending, Running, Succeeded or Failed."""
        if self.over:
            ends = [container.terminated or {"exitCode": 137} for container in self.containers]
            ends += [one.terminated for one in self.init if one.terminated and one not in self.sidecars]
            return "Failed" if self.failure or any(end["exitCode"] for end in ends) else "Succeeded"
        return "Pending" if self._pending() else "Running"

    def _pending(self) -> bool:
        """Whether a container has not run yet, or init containers run (again)."""

        def new(container: Container) -> bool:
            return "waiting" in container.status["state"] and not container.status["lastState"]

        if any(new(one) or "running" in one.status["state"] for one in self.init if one not in self.sidecars):
            return True
        begun = all(one.begun.is_set() or one.terminated for one in self.sidecars)
        return not (begun or self.initialized) or any(new(one) for one in self.containers)

    def patch(self) -> KubeObject:
        """Return the pod status to report, as a strategic merge patch."""
        host, phase = self.sandbox.host.spec, self.phase()
        ready = not self.over and all(each.status["ready"] for each in (*self.containers, *self.sidecars))
        unready = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(phase, "ContainersNotReady")
        gates = self._closed_gates() if ready else ""
        conditions = [
            self._condition("PodReadyToStartContainers", not self.over),
            self._condition("Initialized", self.initialized, "ContainersNotInitialized"),
            self._condition("ContainersReady", ready, unready),
            self._condition("Ready", ready and not gates, "ReadinessGatesNotReady" if gates else unready, gates),
        ]
        if may_restart_all(container.spec for container in (*self.init, *self.containers)):
            conditions.append(self._restarting_condition())
        reason, message = self.failure or (None, None)
        return {
            "phase": phase,
            "reason": reason,
            "message": message,
            "startTime": self.start_time,
            # The merge key is the address: without this, an address of an earlier run of the pod would stay.
            **{"podIP": self.sandbox.ip, "podIPs": [{"$patch": "replace"}, {"ip": self.sandbox.ip}]},
            **{"hostIP": host.address, "hostIPs": [{"$patch": "replace"}, {"ip": host.address}]},
            "conditions": conditions,
            "containerStatuses": [dict(container.status) for container in self.containers],
            "initContainerStatuses": [dict(container.status) for container in self.init] or None,
            "ephemeralContainerStatuses": [{**one.status, "ready": False} for one in self.ephemeral] or None,
        }

    def _condition(self, kind: str, holds: bool, reason: str = "", message: str = "") -> KubeObject:
        # Write empty texts too: a patch does not remove fields that it does not name.
        texts = {"reason": None, "message": None} if holds else {"reason": reason or None, "message": message or None}
        return {"type": kind, "status": str(holds), "lastTransitionTime": self._since(kind, holds), **texts}

    def _since(self, kind: str, holds: bool) -> str:
        if self._transitions.get(kind, (None,))[0] != holds:
            self._transitions[kind] = (holds, timestamps.now())
        return self._transitions[kind][1]

    def _closed_gates(self) -> str:
        """Return what the pod's readiness gates wait for; conditions of others open them."""
        known = {
            item["type"]: item["status"] for item in (self.sandbox.pod.get("status") or {}).get("conditions") or ()
        }
        texts = []
        for name in (gate["conditionType"] for gate in self.sandbox.pod["spec"].get("readinessGates") or ()):
            if name not in known:
                texts.append(f'corresponding condition of pod readiness gate "{name}" does not exist.')
            elif known[name] != "True":
                texts.append(f'the status of pod readiness gate "{name}" is not "True", but {known[name]}')
        return ", ".join(texts)

    def _restarting_condition(self) -> KubeObject:
        kind, holds = "AllContainersRestarting", self.restarting
        texts: KubeObject = {"reason": None, "message": None}
        if holds:
            texts = {"reason": "RestartAllContainersStarted", "message": "container exited with restart policy rule"}
        return {"type": kind, "status": str(holds), "lastTransitionTime": self._since(kind, holds), **texts}
