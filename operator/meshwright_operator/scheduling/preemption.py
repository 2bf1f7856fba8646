"""Which replicas elastic jobs must give up for a job that waits. Pure functions.

Only whole replicas above `elastic.minReplicas` are taken, those of the lowest priority first, and of the job that has
most replicas above its minimum. Nothing is taken unless all of it together lets the waiting job start. A job of the
same priority gives up only what `elastic.fill` added to `spec.replicas`, and nothing during its pause after a resize.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from meshwright.api.objects import KubeObject
from meshwright.api.parsing import InvalidSpecError
from meshwright.api.status import in_rank_order
from meshwright.planner.cluster.pod_resources import Resources
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.parsed_jobs import ParsedJobs
from meshwright_operator.timestamps import parse_time


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
    joining: Sequence[str] = ()
    """Nodes of the workers with which it will grow."""
    filled_from: int | None = None
    """With `elastic.fill`, the number of replicas that it keeps if a job of its own priority waits. None: all."""
    rests_until: datetime | None = None
    """End of its pause after a resize. Until then it gives up nothing to jobs of its own priority. None: it is over."""

    def against(self, priority: int) -> Holder | None:
        """The same with what it keeps if a job of this priority waits. None if it gives up nothing."""
        if self.priority < priority:
            return self
        if self.priority > priority or self.filled_from is None or self.rests_until is not None:
            return None
        return replace(self, min_replicas=max(self.min_replicas, self.filled_from))

    def using(self, amounts: Mapping[str, Resources]) -> Holder:
        """The same with `nodes`, if all its pods together use these amounts (by node)."""
        counts = Counter(self.workers)
        leaving = self.leaving(amounts)
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
                staying = amounts.get(node, Resources()) - leaving.get(node, Resources())
                used[node] = used.get(node, Resources()) + _share(staying, counts[node])
            nodes.append(used)
        return replace(self, nodes=nodes)

    def leaving(self, amounts: Mapping[str, Resources]) -> dict[str, Resources]:
        """Node -> what pods of it use that are not its workers any more, if all its pods together use these amounts."""
        counts = Counter((*self.workers, *self.joining))
        return {
            node: _share(amount, amount.pods) * (amount.pods - counts[node])
            for node, amount in amounts.items()
            if amount.pods > counts[node]
        }


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
    giving = [one for holder in holders if (one := holder.against(priority)) is not None]
    for holder in _in_order(giving):
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


def holder_of(
    key: JobKey, job: KubeObject, parsed: ParsedJobs, priority: Callable[[int], int], now: datetime
) -> Holder | None:
    """The job as a holder of replicas. None if it is not elastic, has no workers, or runs below its smallest size.

    Args:
        key: The job's key.
        job: Its object.
        parsed: Parses it.
        priority: The priority that the policy allows for a priority.
        now: The time of the request for which replicas are needed.
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
    following = status.elastic.next_placement if status.elastic is not None else None
    resized = parse_time(status.elastic.resized_time) if status.elastic is not None else None
    return Holder(
        key,
        job["metadata"]["uid"],
        priority(spec.priority),
        replicas,
        spec.elastic.min_replicas,
        workers=workers,
        joining=[entry.node for entry in following.workers] if following is not None else [],
        filled_from=spec.replicas if spec.elastic.fill else None,
        rests_until=_end_of_pause(resized, spec.elastic.pause_seconds, now),
    )


def _end_of_pause(resized: datetime | None, seconds: float, now: datetime) -> datetime | None:
    """The end of a job's pause after a resize. None if it is over."""
    if resized is None:
        return None
    end = resized + timedelta(seconds=seconds)
    # After a clock was set back, the pause must not be longer.
    return end if 0.0 < (end - now).total_seconds() <= seconds else None


def _share(amount: Resources, parts: int) -> Resources:
    return Resources(
        amount.gpus // parts, amount.cpu_milli // parts, amount.memory_bytes // parts, amount.pods // parts
    )
