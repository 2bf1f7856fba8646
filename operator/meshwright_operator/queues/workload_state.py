"""What a Workload of Kueue says: its conditions, what was admitted, and how its status changes. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from meshwright.api.objects import KubeObject
from meshwright.api.workers import Toleration
from meshwright_operator.decide.admission import Admission, Domain
from meshwright_operator.queues.workload_manifest import (
    GPUS_PER_REPLICA,
    GROUP,
    POD_SET,
    PREFERRED,
    REQUIRED,
    UNCONSTRAINED,
)
from meshwright_operator.text import sentences
from meshwright_operator.timestamps import format_time

ADMITTED, EVICTED, FINISHED, PODS_READY, QUOTA_RESERVED, REQUEUED = (
    "Admitted",
    "Evicted",
    "Finished",
    "PodsReady",
    "QuotaReserved",
    "Requeued",
)
REQUEUED_AT_ONCE = ("Preempted", "NodeFailures")
"""Reasons of an eviction after which the Workload is in its queue again at once. Kueue itself ends every other wait."""
MESSAGE_LIMIT = 1024


def condition(workload: Mapping[str, Any], kind: str) -> KubeObject:
    """The condition of this type, or an empty object."""
    found = (workload.get("status") or {}).get("conditions") or ()
    return next((dict(one) for one in found if one.get("type") == kind), {})


def is_true(workload: Mapping[str, Any], kind: str) -> bool:
    """Whether the condition of this type is True."""
    return condition(workload, kind).get("status") == "True"


def is_reserved(workload: Mapping[str, Any]) -> bool:
    """Whether quota is reserved for it."""
    return is_true(workload, QUOTA_RESERVED)


def may_run(workload: Mapping[str, Any]) -> bool:
    """Whether the job may have pods."""
    ends = is_true(workload, EVICTED) or is_true(workload, FINISHED)
    deleted = bool(workload["metadata"].get("deletionTimestamp"))
    active = (workload.get("spec") or {}).get("active", True)
    return is_true(workload, ADMITTED) and bool(active) and not ends and not deleted


def waiting_message(workload: Mapping[str, Any], queue: str) -> str:
    """Why the job does not run: what Kueue says, as sentences without a period."""
    if is_true(workload, FINISHED):
        said = condition(workload, FINISHED).get("message", "")
        return sentences(f"Kueue has finished the Workload {workload['metadata']['name']}", said)
    reserved = condition(workload, QUOTA_RESERVED)
    evicted = condition(workload, EVICTED)
    if is_reserved(workload) and evicted.get("status") == "True":
        return sentences(f"Kueue has evicted the job ({evicted.get('reason', '')})", str(evicted.get("message", "")))
    if is_reserved(workload):
        said = str(condition(workload, ADMITTED).get("message", ""))
        return sentences(f"Queue {queue} has quota for the job, and its admission checks are not complete", said)
    if not (workload.get("spec") or {}).get("active", True):
        return f"The Workload {workload['metadata']['name']} is not active"
    return sentences(f"Waiting for queue {queue}", str(reserved.get("message", "")))


def admission_of(
    workload: Mapping[str, Any],
    queue: str,
    flavors: Mapping[str, KubeObject],
    nodes: Mapping[str, KubeObject],
    gpus_per_worker: int,
) -> Admission:
    """What Kueue says about a job.

    Args:
        workload: Its Workload.
        queue: The name of its queue.
        flavors: The resource flavors that were assigned to it, by name.
        nodes: All nodes, by name.
        gpus_per_worker: GPUs of one worker.
    """
    if not may_run(workload):
        evicted = is_true(workload, EVICTED) and is_reserved(workload)
        return Admission(admitted=False, evicted=evicted, message=waiting_message(workload, queue))
    assignment = assignment_of(workload)
    selector: dict[str, str] = {}
    tolerations: list[Toleration] = []
    for name in flavors_of(workload):
        spec = (flavors.get(name) or {}).get("spec") or {}
        selector |= spec.get("nodeLabels") or {}
        tolerations += parse_tolerations(spec.get("tolerations") or ())
    pod_labels: dict[str, str] = {}
    pod_annotations: dict[str, str] = {}
    for update in _updates(workload):
        selector |= update.get("nodeSelector") or {}
        tolerations += parse_tolerations(update.get("tolerations") or ())
        # By such an annotation an autoscaler knows for which pods it has made nodes. Unused ones it removes again.
        pod_labels |= update.get("labels") or {}
        pod_annotations |= update.get("annotations") or {}
    domains = tuple(domains_of(assignment.get("topologyAssignment") or {}, nodes))
    count = int(assignment.get("count") or 0)
    part = _replicas(workload, count, gpus_per_worker)
    known = {f"{GROUP}/podset": POD_SET} if domains else {}
    asked = [name for name in (REQUIRED, PREFERRED) if _asks(workload, name)]
    marks = {f"{GROUP}/workload": str(workload["metadata"]["name"]), **({} if asked else {UNCONSTRAINED: "true"})}
    return Admission(
        admitted=True,
        workers=count if part is not None else None,
        replicas=part,
        node_labels=selector,
        tolerations=tuple(tolerations),
        domains=domains,
        pod_labels=pod_labels | known,
        pod_annotations=pod_annotations | (marks if domains else {}),
    )


def pod_set_of(workload: Mapping[str, Any]) -> KubeObject:
    """The job's only pod set."""
    found = (workload.get("spec") or {}).get("podSets") or ()
    return next((dict(one) for one in found), {})


def reclaimed(workload: Mapping[str, Any]) -> int:
    """The number of admitted pods whose quota is given back already."""
    found = (workload.get("status") or {}).get("reclaimablePods") or ()
    return sum(int(one.get("count") or 0) for one in found)


def assignment_of(workload: Mapping[str, Any]) -> KubeObject:
    """What was admitted for the job's only pod set."""
    admitted = ((workload.get("status") or {}).get("admission") or {}).get("podSetAssignments") or ()
    return next((dict(one) for one in admitted), {})


def flavors_of(workload: Mapping[str, Any]) -> list[str]:
    """The resource flavors that were assigned."""
    return sorted(set((assignment_of(workload).get("flavors") or {}).values()))


def parse_tolerations(wire: Iterable[Mapping[str, Any]]) -> Iterator[Toleration]:
    """Tolerations of another object. What a job could not have is left out."""
    for entry in wire:
        try:
            yield Toleration.model_validate(dict(entry))
        except ValidationError:
            continue


def domains_of(assignment: Mapping[str, Any], nodes: Mapping[str, KubeObject]) -> Iterator[Domain]:
    """The domains of a topology assignment, with their nodes."""
    levels = [str(level) for level in assignment.get("levels") or ()]
    for values, count in _assigned(assignment):
        names = frozenset(name for name, node in nodes.items() if _is_in(node, levels, values))
        yield Domain("/".join(values), names, count)


def _is_in(node: Mapping[str, Any], levels: Sequence[str], values: Sequence[str]) -> bool:
    labels = node["metadata"].get("labels") or {}
    return all(labels.get(level) == value for level, value in zip(levels, values, strict=True))


def _assigned(assignment: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], int]]:
    """(label values, pods) of each domain, in both forms of the API: `domains` of v1beta1 and `slices` of v1beta2."""
    for domain in assignment.get("domains") or ():
        yield tuple(str(value) for value in domain["values"]), int(domain["count"])
    for part in assignment.get("slices") or ():
        size = int(part["domainCount"])
        columns = [_column(level, size) for level in part["valuesPerLevel"]]
        counts = part["podCounts"]
        universal = counts.get("universal")
        pods = [int(universal)] * size if universal is not None else [int(one) for one in counts["individual"]]
        yield from zip(zip(*columns, strict=True), pods, strict=True)


def _column(level: Mapping[str, Any], size: int) -> list[str]:
    """The values of one level in a slice."""
    if level.get("universal") is not None:
        return [str(level["universal"])] * size
    each = level["individual"]
    return [f"{each.get('prefix') or ''}{root}{each.get('suffix') or ''}" for root in each["roots"]]


def _asks(workload: Mapping[str, Any], annotation: str) -> bool:
    """Whether the pod set asks for a topology in this way."""
    field = {REQUIRED: "required", PREFERRED: "preferred"}[annotation]
    return bool((pod_set_of(workload).get("topologyRequest") or {}).get(field))


def _updates(workload: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What admission checks require of the pods."""
    for check in (workload.get("status") or {}).get("admissionChecks") or ():
        yield from check.get("podSetUpdates") or ()


def _replicas(workload: Mapping[str, Any], count: int, gpus_per_worker: int) -> int | None:
    """The number of replicas for which the admitted workers are enough. None for a job that is not elastic."""
    annotation = (workload["metadata"].get("annotations") or {}).get(GPUS_PER_REPLICA, "")
    if pod_set_of(workload).get("minCount") is None or not annotation.isdigit() or not int(annotation):
        return None
    return max(1, count * gpus_per_worker // int(annotation))


# Changes of the status.


def with_conditions(workload: Mapping[str, Any], *new: KubeObject) -> list[KubeObject]:
    """The conditions with `new` ones in place of those of their types. Times move only when the status changes."""
    found = {str(one["type"]): dict(one) for one in (workload.get("status") or {}).get("conditions") or ()}
    for one in new:
        old = found.get(str(one["type"]), {})
        same = old.get("status") == one["status"]
        found[str(one["type"])] = {**one, **({"lastTransitionTime": old["lastTransitionTime"]} if same else {})}
    return list(found.values())


def new_condition(
    workload: Mapping[str, Any], kind: str, value: bool, reason: str, message: str, now: datetime
) -> KubeObject:
    """A condition of the Workload."""
    return {
        "type": kind,
        "status": str(value),
        "reason": reason,
        "message": message[:MESSAGE_LIMIT],
        "lastTransitionTime": format_time(now),
        "observedGeneration": int(workload["metadata"].get("generation") or 0),
    }


def released(workload: Mapping[str, Any], now: datetime) -> KubeObject:
    """The status in which an evicted job has given its quota back, as a merge patch."""
    evicted = condition(workload, EVICTED)
    reason, message = str(evicted.get("reason", "")), str(evicted.get("message", ""))
    conditions = [
        new_condition(workload, QUOTA_RESERVED, False, "Pending", message, now),
        new_condition(workload, REQUEUED, reason in REQUEUED_AT_ONCE, reason or "Evicted", message, now),
    ]
    if is_true(workload, ADMITTED):
        text = "The workload has no reservation"
        conditions.append(new_condition(workload, ADMITTED, False, "NoReservation", text, now))
    return {"admission": None, "conditions": with_conditions(workload, *conditions)}


def pods_ready(workload: Mapping[str, Any], ready: bool, now: datetime) -> KubeObject | None:
    """The condition `PodsReady` that follows. None if it stays."""
    old = condition(workload, PODS_READY)
    recovers = old.get("reason") in ("WaitForRecovery", "Recovered")
    if ready:
        reason, text = ("Recovered" if recovers else "Started"), "All ranks train"
    elif old.get("status") == "True" or old.get("reason") == "WaitForRecovery":
        reason, text = "WaitForRecovery", "Not all ranks train"
    else:
        reason, text = "WaitForStart", "Not all ranks train"
    if (old.get("status"), old.get("reason")) == (str(ready), reason):
        return None
    return new_condition(workload, PODS_READY, ready, reason, text, now)
