"""Which replicas elastic jobs must give up for a job of higher priority that waits. Pure functions.

Only whole replicas above `elastic.minReplicas` are taken, those of the lowest priority first, and of the job that has
most replicas above its minimum. Nothing is taken unless all of it together lets the waiting job start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.api.objects import KubeObject
from meshwright.api.parsing import InvalidSpecError
from meshwright.api.status import in_rank_order
from meshwright.planner.cluster.pod_resources import Resources
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.parsed_jobs import ParsedJobs


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """An elastic job that runs."""

    key: JobKey
    uid: str
    priority: int
    """Its priority, as far as the policy allows it."""
    replicas: int
    min_replicas: int
    nodes: Sequence[Mapping[str, Resources]] = ()
    """Replica -> node -> what is free there without the replica. Those at the end are given up first."""

    workers: Sequence[str] = ()
    """Nodes of the workers, in the order of their ranks."""

    def using(self, amounts: Mapping[str, Resources]) -> Holder:
        """The same with `nodes`, if all its pods together use these amounts (by node)."""
        counts = Counter(self.workers)
        per_replica = len(self.workers) // self.replicas
        per_worker = self.replicas // len(self.workers)
        nodes: list[dict[str, Resources]] = []
        for replica in range(self.replicas):
            if per_replica:
                own = self.workers[replica * per_replica : (replica + 1) * per_replica]
            else:  # a worker of several replicas ends with the first of them
                own = self.workers[replica // per_worker : replica // per_worker + (replica % per_worker == 0)]
            used: dict[str, Resources] = {}
            for node in own:
                used[node] = used.get(node, Resources()) + _share(amounts.get(node, Resources()), counts[node])
            nodes.append(used)
        return replace(self, nodes=nodes)


@dataclass(frozen=True, slots=True)
class Victim:
    """An elastic job that has to shrink."""

    key: JobKey
    uid: str
    replicas: int
    """The number of replicas that it keeps."""


def choose_victims(
    holders: Sequence[Holder], priority: int, fits: Callable[[Mapping[str, Resources]], bool]
) -> tuple[Victim, ...]:
    """The jobs to shrink so that a job of this priority fits; empty if that is not possible.

    Args:
        holders: The elastic jobs.
        priority: The priority of the job that waits.
        fits: Whether the job would fit if these amounts (by node) were free.
    """
    taken: list[Holder] = []
    for holder in _in_order([holder for holder in holders if holder.priority < priority]):
        taken.append(holder)
        if fits(_freed(taken)):
            return _needed(taken, fits)
    return ()


def _in_order(holders: Sequence[Holder]) -> list[Holder]:
    """The holder of every replica that may be taken, the first to take first."""
    left = {holder.uid: holder.replicas for holder in holders}
    order: list[Holder] = []
    while True:
        able = [holder for holder in holders if left[holder.uid] > max(1, holder.min_replicas)]
        if not able:
            return order
        holder = min(able, key=lambda one: (one.priority, -(left[one.uid] - one.min_replicas), one.key))
        left[holder.uid] -= 1
        order.append(holder)


def _freed(taken: Sequence[Holder]) -> dict[str, Resources]:
    """What is free once these replicas have ended. A job that is listed twice gives up two replicas."""
    freed: dict[str, Resources] = {}
    left: dict[str, int] = {}
    for holder in taken:
        replica = left[holder.uid] = left.get(holder.uid, holder.replicas) - 1
        for node, amount in holder.nodes[replica].items():
            freed[node] = freed.get(node, Resources()) + amount
    return freed


def _needed(taken: Sequence[Holder], fits: Callable[[Mapping[str, Resources]], bool]) -> tuple[Victim, ...]:
    """The victims, without jobs whose replicas turn out not to be needed."""
    kept = list(taken)
    for holder in dict.fromkeys(taken):
        without = [one for one in kept if one.uid != holder.uid]
        if without and fits(_freed(without)):
            kept = without
    counts: dict[str, int] = {}
    for holder in kept:
        counts[holder.uid] = counts.get(holder.uid, 0) + 1
    by_uid = {holder.uid: holder for holder in kept}
    return tuple(Victim(by_uid[uid].key, uid, by_uid[uid].replicas - count) for uid, count in sorted(counts.items()))


def holder_of(key: JobKey, job: KubeObject, parsed: ParsedJobs, priority: Callable[[int], int]) -> Holder | None:
    """The job as a holder of replicas. None if it is not elastic, has no workers, or runs below its smallest size.

    Args:
        key: The job's key.
        job: Its object.
        parsed: Parses it.
        priority: The priority that the policy allows for a priority.
    """
    if not isinstance(job.get("spec"), Mapping) or not job["spec"].get("elastic"):
        return None
    try:
        spec, status = parsed.spec(job), parsed.status(job)
    except InvalidSpecError:
        return None
    entries = in_rank_order(status.placement.workers) if status.placement is not None else []
    replicas = status.plan.data if status.plan is not None else 0
    replanned = status.plan is not None and status.plan.replanned
    if spec.elastic is None or not entries or not replicas or replanned:
        return None
    if len(entries) % replicas and replicas % len(entries):
        return None  # a worker would have parts of several replicas
    workers = [entry.node for entry in entries]
    least = spec.elastic.min_replicas
    return Holder(key, job["metadata"]["uid"], priority(spec.priority), replicas, least, workers=workers)


def _share(amount: Resources, parts: int) -> Resources:
    return Resources(
        amount.gpus // parts, amount.cpu_milli // parts, amount.memory_bytes // parts, amount.pods // parts
    )
