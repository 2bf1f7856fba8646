"""The columns READY, STATUS and RESTARTS of a pod, as kube-apiserver's `printPod` computes them."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.api.objects import KubeObject, is_sidecar
from meshwright_local.apiserver.rest.ages import since
from meshwright_local.kube.resources import has_ended


def pod_ready(obj: KubeObject) -> str:
    """Return the READY column: containers and sidecars that are ready, of all."""
    total = len(obj["spec"]["containers"]) + len(_sidecars(obj))
    ready = [each for each in (*_statuses(obj), *_started_sidecars(obj)) if each.get("ready")]
    return f"{len(ready)}/{total}"


def pod_gates(obj: KubeObject) -> str:
    """Return the READINESS GATES column: gates that are open, of all."""
    gates = [gate["conditionType"] for gate in obj["spec"].get("readinessGates") or ()]
    conditions = (obj.get("status") or {}).get("conditions") or ()
    held = {item["type"] for item in conditions if item["status"] == "True"}
    return f"{sum(gate in held for gate in gates)}/{len(gates)}" if gates else "<none>"


def pod_restarts(obj: KubeObject) -> str:
    """Return the RESTARTS column: of containers and sidecars, or of init containers while they run."""
    sidecars = _sidecars(obj)
    inits = _init_statuses(obj)
    counted = inits if _initializing(obj) else [*(one for one in inits if one.get("name") in sidecars), *_statuses(obj)]
    count = sum(each.get("restartCount", 0) for each in counted)
    ends = [((each.get("lastState") or {}).get("terminated") or {}).get("finishedAt") for each in counted]
    last = max(filter(None, ends), default=None)
    return f"{count} ({since(last)} ago)" if count and last else str(count)


def pod_reason(obj: KubeObject) -> str:
    """Return the STATUS column."""
    status = obj.get("status") or {}
    reason = str(status.get("reason") or status.get("phase") or "Unknown")
    if obj["spec"].get("schedulingGates"):
        reason = "SchedulingGated"
    initializing = _initializing(obj)
    reason = initializing or _containers_reason(status, reason)
    if obj["metadata"].get("deletionTimestamp") and status.get("reason") == "NodeLost":
        return "Unknown"
    return "Terminating" if obj["metadata"].get("deletionTimestamp") and not has_ended(obj) else reason


def _initializing(obj: KubeObject) -> str:
    """Return what the first init container that is not done does; empty if the pod is initialized."""
    if _holds(obj, "Initialized"):
        return ""
    started = {each.get("name") for each in _started_sidecars(obj)}
    for index, container in enumerate(_init_statuses(obj)):
        state = container.get("state") or {}
        ended, waiting = state.get("terminated"), state.get("waiting") or {}
        if container.get("name") in started or (ended and not ended.get("exitCode")):
            continue
        text = _end(ended) if ended else waiting.get("reason")
        progress = f"{index}/{len(obj['spec'].get('initContainers') or ())}"
        return f"Init:{text if text not in (None, 'PodInitializing') else progress}"
    return ""


def _containers_reason(status: KubeObject, reason: str) -> str:
    """Return the state of the first container that waits or has ended; `reason` if all run."""
    failed, running = "", False
    for container in reversed(status.get("containerStatuses") or []):
        state = container.get("state") or {}
        ended = state.get("terminated")
        if waiting := (state.get("waiting") or {}).get("reason"):
            reason = waiting
        elif ended:
            reason = _end(ended)
            failed = reason if ended.get("exitCode") else failed
        elif container.get("ready") and state.get("running"):
            running = True
    if reason != "Completed":
        return reason
    if running and any(each.get("type") == "Ready" and each["status"] == "True" for each in _conditions(status)):
        return "Running"
    return failed or ("NotReady" if running else reason)


def _end(ended: KubeObject) -> str:
    code = f"Signal:{ended['signal']}" if ended.get("signal") else f"ExitCode:{ended.get('exitCode')}"
    return str(ended.get("reason") or code)


def _sidecars(obj: KubeObject) -> set[str]:
    return {each["name"] for each in obj["spec"].get("initContainers") or () if is_sidecar(each)}


def _started_sidecars(obj: KubeObject) -> list[KubeObject]:
    sidecars = _sidecars(obj)
    return [each for each in _init_statuses(obj) if each.get("name") in sidecars and each.get("started")]


def _init_statuses(obj: KubeObject) -> list[KubeObject]:
    return (obj.get("status") or {}).get("initContainerStatuses") or []


def _statuses(obj: KubeObject) -> list[KubeObject]:
    return (obj.get("status") or {}).get("containerStatuses") or []


def _conditions(status: KubeObject) -> Iterable[KubeObject]:
    return status.get("conditions") or ()


def _holds(obj: KubeObject, condition: str) -> bool:
    conditions = _conditions(obj.get("status") or {})
    return any(each.get("type") == condition and each.get("status") == "True" for each in conditions)
