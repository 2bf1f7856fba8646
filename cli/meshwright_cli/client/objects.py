"""What the client returns: jobs, worker pods, events and log lines, parsed from raw objects. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from meshwright.api import conditions
from meshwright.api.labels import LABEL_INCARNATION, LABEL_WORKER, MANAGER
from meshwright.api.objects import KubeObject
from meshwright.api.parsing import parse_known_fields, parse_status
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import ParallelTrainingJobStatus, parse_ranks
from meshwright.printable import printable
from meshwright_cli.client.html import job_page

NOT_REPORTED = "No operator has reported on this job yet. If that stays so, `meshwright doctor` says why"
OTHER_MANAGER = (
    "Waits for the controller `{0}`, which has not reported: with `spec.managedBy`, the operator ignores the job"
)


class Job:
    """A ParallelTrainingJob as it was when it was read.

    `raw` is the object of the API server, and everything else is parsed from it. In a notebook, a job shows itself as a
    table.
    """

    def __init__(self, raw: KubeObject) -> None:
        self.raw = raw

    def __repr__(self) -> str:
        return f"Job({self.namespace}/{self.name}: {self.state})"

    def _repr_html_(self) -> str:
        return job_page(f"{self.namespace}/{self.name}", self.message, self.status)

    @property
    def name(self) -> str:
        """`metadata.name`."""
        return str(self.raw["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """`metadata.namespace`."""
        return str(self.raw["metadata"].get("namespace") or "")

    @property
    def uid(self) -> str:
        """`metadata.uid`."""
        return str(self.raw["metadata"].get("uid") or "")

    @property
    def revision(self) -> str:
        """`metadata.resourceVersion`."""
        return str(self.raw["metadata"].get("resourceVersion") or "")

    @property
    def created(self) -> datetime | None:
        """`metadata.creationTimestamp`."""
        return parse_time(self.raw["metadata"].get("creationTimestamp"))

    @property
    def deleting(self) -> bool:
        """Whether the job is being deleted."""
        return bool(self.raw["metadata"].get("deletionTimestamp"))

    @cached_property
    def spec(self) -> ParallelTrainingJobSpec:
        """`spec`. Fields that this version does not know are left out.

        Raises:
            ValueError: a known field is invalid.
        """
        return parse_known_fields(ParallelTrainingJobSpec, self.raw.get("spec"))

    @cached_property
    def status(self) -> ParallelTrainingJobStatus:
        """`status`, without its invalid parts."""
        return parse_status(self.raw)

    @property
    def state(self) -> str:
        """The state in one word: the reason of the condition `Ready`, as `kubectl get` shows it."""
        return conditions.state(self.status.conditions)

    @property
    def message(self) -> str:
        """The message of the condition `Ready`. Before the operator has written a condition: what to do about that."""
        if self.status.conditions:
            return printable(conditions.message(self.status.conditions))
        manager = (self.raw.get("spec") or {}).get("managedBy") or MANAGER
        return NOT_REPORTED if manager == MANAGER else printable(OTHER_MANAGER.format(manager))

    def is_true(self, condition: str) -> bool:
        """Whether a condition is True."""
        return conditions.is_true(self.status.conditions, condition)

    @property
    def complete(self) -> bool:
        """Whether the job has completed."""
        return self.is_true(conditions.COMPLETE)

    @property
    def failed(self) -> bool:
        """Whether the job has failed for good."""
        return self.is_true(conditions.FAILED)

    @property
    def finished(self) -> bool:
        """Whether the job has completed or failed."""
        return self.complete or self.failed

    @property
    def observed(self) -> bool:
        """Whether the operator has acted on the current spec."""
        return self.status.observed_generation >= int(self.raw["metadata"].get("generation") or 0)


@dataclass(frozen=True, slots=True)
class WorkerPod:
    """A worker pod of a job."""

    name: str
    worker: int
    incarnation: int
    node: str
    """Empty until the pod has a node."""
    state: str
    """As `kubectl get pods` shows it."""
    ready: bool
    container_started: bool
    """Whether its container runs or has run, so that there is a log."""
    restarts: int
    """Restarts of its container, so that there is a previous log."""

    @classmethod
    def of(cls, pod: Mapping[str, Any]) -> WorkerPod:
        """Read a raw pod."""
        metadata, status = pod["metadata"], pod.get("status") or {}
        labels = metadata.get("labels") or {}
        containers = status.get("containerStatuses") or []
        return cls(
            name=metadata["name"],
            worker=_number(labels.get(LABEL_WORKER)),
            incarnation=_number(labels.get(LABEL_INCARNATION)),
            node=(pod.get("spec") or {}).get("nodeName") or "",
            state=pod_state(pod),
            ready=bool(containers) and all(container.get("ready") for container in containers),
            container_started=any("waiting" not in (container.get("state") or {}) for container in containers),
            restarts=sum(int(container.get("restartCount") or 0) for container in containers),
        )


def _number(text: Any) -> int:
    return int(text) if str(text).isdecimal() else -1


def pod_state(pod: Mapping[str, Any]) -> str:
    """The status that `kubectl get pods` shows."""
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating"
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        state = container.get("state") or {}
        waiting = state.get("waiting") or state.get("terminated")
        if waiting and waiting.get("reason"):
            return str(waiting["reason"])
    if (pod.get("spec") or {}).get("schedulingGates"):
        return "SchedulingGated"
    return str((pod.get("status") or {}).get("phase") or "Pending")


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event about a job or one of its pods."""

    uid: str
    time: datetime | None
    warning: bool
    reason: str
    message: str
    count: int
    about: str
    """Kind and name of the object, such as `Pod lm-w0-0`. For an event about the job itself, empty."""

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> JobEvent:
        """Read a raw event of the core group, which has the events of both APIs."""
        series = event.get("series") or {}
        metadata, about = event["metadata"], event.get("involvedObject") or {}
        times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
        own = about.get("kind") == "ParallelTrainingJob"
        return cls(
            uid=str(metadata.get("uid") or metadata["name"]),
            time=parse_time(next((time for time in times if time), metadata.get("creationTimestamp"))),
            warning=event.get("type") == "Warning",
            reason=printable(str(event.get("reason") or "")),
            message=printable(str(event.get("message") or "")),
            count=int(series.get("count") or event.get("count") or 1),
            about="" if own else f"{about.get('kind', '')} {about.get('name', '')}".strip(),
        )


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a worker pod's log."""

    pod: str
    worker: int
    rank: int | None
    """The rank that it is about; None for a line of the agent about the entire pod."""
    text: str
    """The line without the prefix `[rank N]`."""
    agent: bool = False
    """Whether the agent wrote it, and not the rank."""

    @classmethod
    def of(cls, pod: WorkerPod, line: str) -> LogLine:
        """Read a line of a pod's log."""
        if line.startswith("[rank "):
            number, bracket, text = line[len("[rank ") :].partition("] ")
            if bracket and number.isdecimal():
                return cls(pod.name, pod.worker, int(number), text)
        about = re.search(r" rank=(\d+)(?: |$)", line)
        return cls(pod.name, pod.worker, int(about[1]) if about else None, line, agent=True)


def newest_pods(pods: Sequence[WorkerPod]) -> list[WorkerPod]:
    """The newest pod of each worker, by worker."""
    newest: dict[int, WorkerPod] = {}
    for pod in pods:
        if pod.worker not in newest or newest[pod.worker].incarnation < pod.incarnation:
            newest[pod.worker] = pod
    return [newest[worker] for worker in sorted(newest)]


def ranks_by_worker(status: ParallelTrainingJobStatus) -> dict[int, range]:
    """The ranks of each worker, from the placement in the status."""
    if status.placement is None:
        return {}
    read = ((entry.worker, parse_ranks(entry.ranks)) for entry in status.placement.workers)
    return {worker: ranks for worker, ranks in read if ranks is not None}


def parse_time(text: Any) -> datetime | None:
    """An RFC 3339 time, or None if it is missing or invalid."""
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
