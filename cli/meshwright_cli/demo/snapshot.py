"""A snapshot of the job: status, pods and events, parsed from raw objects. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.api import conditions
from meshwright.api.labels import LABEL_WORKER
from meshwright.api.parsing import parse_status
from meshwright.api.status import ParallelTrainingJobStatus


@dataclass(frozen=True, slots=True)
class PodView:
    """The main properties of a worker pod."""

    worker: int
    name: str
    node: str
    """Empty until the pod has a node."""
    state: str
    address: str
    """IP address; empty until the kubelet reports one."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Progress from rank 0's metrics. They are newer than the status, which is written every 10 s."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class EventView:
    """An event about the job."""

    uid: str
    time: str
    """RFC 3339, as in the event."""
    warning: bool
    reason: str
    note: str

    @property
    def clock(self) -> str:
        """Hours, minutes and seconds (UTC)."""
        return self.time[11:19]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The job at one time."""

    name: str
    uid: str
    status: ParallelTrainingJobStatus
    pods: Sequence[PodView]
    events: Sequence[EventView]
    sample: Sample | None = None

    @property
    def state(self) -> str:
        """The reason of the Ready condition: what `kubectl get` shows as STATUS."""
        return conditions.state(self.status.conditions)

    @property
    def message(self) -> str:
        """The message of the Ready condition."""
        return conditions.message(self.status.conditions)

    def holds(self, condition: str) -> bool:
        """Whether a condition is True."""
        return conditions.is_true(self.status.conditions, condition)

    @property
    def generation(self) -> int:
        """Mesh generation; 0 before the first."""
        return self.status.mesh.generation if self.status.mesh else 0

    @property
    def replicas(self) -> int:
        """Replicas in effect; 0 before the first generation."""
        return self.status.replicas

    @property
    def wanted_replicas(self) -> int:
        """Replicas with which an elastic job runs if there are enough nodes; 0 for other jobs."""
        return self.status.elastic.wanted_replicas if self.status.elastic else 0

    @property
    def step(self) -> int:
        """Last completed step, from rank 0's metrics if available, because they are newer."""
        return self.sample.step if self.sample else self.status.step or 0

    @property
    def loss(self) -> float | None:
        """Loss of the last completed step."""
        if self.sample:
            return self.sample.loss
        return float(self.status.loss) if self.status.loss else None

    @property
    def total_steps(self) -> int:
        """Number of steps of the run; 0 while unknown."""
        return self.status.total_steps or 0


def pod_view(pod: Mapping[str, Any]) -> PodView:
    """A pod of the job, from its raw object."""
    metadata, status = pod["metadata"], pod.get("status", {})
    return PodView(
        worker=int(metadata.get("labels", {}).get(LABEL_WORKER, -1)),
        name=metadata["name"],
        node=pod.get("spec", {}).get("nodeName", ""),
        state=pod_state(pod),
        address=status.get("podIP", ""),
    )


def pod_state(pod: Mapping[str, Any]) -> str:
    """The status that `kubectl get pods` shows."""
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating"
    for container in pod.get("status", {}).get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting") or container.get("state", {}).get("terminated")
        if waiting and waiting.get("reason"):
            return str(waiting["reason"])
    if pod.get("spec", {}).get("schedulingGates"):
        return "SchedulingGated"
    return str(pod.get("status", {}).get("phase", "Pending"))


def event_view(event: Mapping[str, Any]) -> EventView:
    """An event from an object of the core group, which has the events of both APIs."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return EventView(
        uid=event["metadata"].get("uid", event["metadata"]["name"]),
        time=next((time for time in times if time), event["metadata"].get("creationTimestamp", "")),
        warning=event.get("type") == "Warning",
        reason=event.get("reason", ""),
        note=event.get("message", ""),
    )


def snapshot(
    job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> Snapshot:
    """A snapshot from raw objects, with pods by worker, and the events about this object by time."""
    uid = job["metadata"]["uid"]
    mine = [event_view(event) for event in events if (event.get("involvedObject") or {}).get("uid") == uid]
    return Snapshot(
        name=job["metadata"]["name"],
        uid=uid,
        status=parse_status(job),
        pods=sorted((pod_view(pod) for pod in pods), key=lambda pod: (pod.worker, pod.name)),
        events=sorted(mine, key=lambda event: event.time),
    )
