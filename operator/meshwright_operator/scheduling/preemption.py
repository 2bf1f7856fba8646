"""Which replicas elastic jobs give up, and which preemptible jobs stop, for a job that waits. Pure functions.

First whole replicas above `elastic.minReplicas` are taken, those of the lowest priority first, and of the job that has
most replicas above its minimum. A job of the same priority gives up only what `elastic.fill` added to `spec.replicas`,
and nothing during its pause after a resize. If all of that is not enough, preemptible jobs of lower priority stop:
those of the lowest priority first, then the smallest that is enough, then the one that started last. Nothing is taken
unless all of it together lets the waiting job start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import groupby

from meshwright.api.objects import KubeObject
from meshwright.api.parsing import InvalidSpecError
from meshwright.api.status import in_rank_order
from meshwright.planner.cluster.pod_resources import Resources
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.parsed_jobs import ParsedJobs
from meshwright_operator.timestamps import parse_time

OLDEST_REQUEST_SECONDS = 600.0
"""A waiting job is tried again with its last request. It asks every two minutes, unless its reconciles fail."""


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """An elastic or preemptible job that runs."""

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
    preemptible: bool = False
    """Whether it may be stopped."""
    started: str = ""
    """When its ranks started last, in ISO 8601."""
    spares: Sequence[str] = ()
    """Its spare nodes, which other jobs may use once it has stopped."""
    used: Mapping[str, Resources] = field(default_factory=dict)
    """Node -> what all of its pods use there."""

    joining: Sequence[str] = ()
    """Nodes of the workers with which it will grow."""
    filled_from: int | None = None
    """With `elastic.fill`, the number of replicas that it keeps if a job of its own priority waits. None: all."""
    rests_until: datetime | None = None
    """End of its pause after a resize. Until then it gives up nothing to jobs of its own priority. None: it is over."""

    @property
    def gpus(self) -> int:
        """GPUs of all its pods."""
        return sum(amount.gpus for amount in self.used.values())

    def against(self, priority: int) -> Holder | None:
        """The same with what it keeps if a job of this priority waits. None if it gives up nothing."""
        if self.priority < priority:
            return self
        if self.priority > priority or self.filled_from is None or self.rests_until is not None:
            return None
        return replace(self, min_replicas=max(self.min_replicas, self.filled_from))

    def using(self, amounts: Mapping[str, Resources]) -> Holder:
        """The same with `nodes` and `used`, if all its pods together use these amounts (by node)."""
        counts = Counter(self.workers)
        leaving = self.leaving(amounts)
        staying_on = {node: amount - leaving.get(node, Resources()) for node, amount in amounts.items()}
        if self.replicas <= self.min_replicas:
            return replace(self, used=staying_on)
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
                staying = staying_on.get(node, Resources())
                used[node] = used.get(node, Resources()) + staying // counts[node]
            nodes.append(used)
        return replace(self, nodes=nodes, used=staying_on)

    def leaving(self, amounts: Mapping[str, Resources]) -> dict[str, Resources]:
        """Node -> what pods of it use that are not its workers any more, if all its pods together use these amounts."""
        counts = Counter((*self.workers, *self.joining))
        return {
            node: amount // amount.pods * (amount.pods - counts[node])
            for node, amount in amounts.items()
            if amount.pods > counts[node]
        }


@dataclass(frozen=True, slots=True)
class Victim:
    """An elastic job that has to shrink, or a job that has to stop."""

    key: JobKey
    uid: str
    replicas: int
    """The number of replicas that it keeps; 0 if it stops."""


Fits = Callable[[Mapping[str, Resources]], bool]


def choose_victims(
    holders: Sequence[Holder], priority: int, fits: Fits, chosen: Sequence[Victim] = ()
) -> tuple[Victim, ...]:
    """The jobs to shrink or to stop so that a job of this priority fits; empty if that is not possible.

    Args:
        holders: The elastic and the preemptible jobs.
        priority: The priority of the job that waits.
        fits: Whether the job would fit if these amounts (by node) were free. Spare nodes of a job that stops are among
            them, even if nothing becomes free there.
        chosen: The victims of an earlier choice. If they are enough, no other job becomes one.
    """
    giving = [one for holder in holders if (one := holder.against(priority)) is not None]
    if (again := _chosen_again(giving, chosen)) is not None and fits(freed_by(*again)):
        return _needed(*again, fits)
    taken: list[Holder] = []
    for holder in _in_order(giving):
        taken.append(holder)
        if fits(freed_by(taken)):
            return _needed(taken, [], fits)
    stopped = _to_stop([one for one in giving if one.preemptible and one.priority < priority and one.gpus], taken, fits)
    return _needed(taken, stopped, fits) if stopped else ()


def _chosen_again(holders: Sequence[Holder], chosen: Sequence[Victim]) -> tuple[list[Holder], list[Holder]] | None:
    """Those of an earlier choice that have not shrunk or stopped yet. None without any."""
    by_uid = {holder.uid: holder for holder in holders}
    found = [(by_uid[victim.uid], victim.replicas) for victim in chosen if victim.uid in by_uid]
    stopped = [holder for holder, left in found if not left and holder.preemptible and holder.gpus]
    taken = [holder for holder, left in found if left for _ in range(holder.replicas - max(left, holder.min_replicas))]
    return (taken, stopped) if taken or stopped else None


def _to_stop(candidates: Sequence[Holder], taken: Sequence[Holder], fits: Fits) -> list[Holder]:
    """The jobs to stop, besides the replicas that are taken; empty if that is not possible."""

    def enough(stopped: Sequence[Holder]) -> bool:
        return fits(freed_by(taken, stopped))

    if not candidates or not enough(candidates):
        return []
    stopped: list[Holder] = []
    latest_first = sorted(sorted(candidates, key=lambda one: one.key), key=lambda one: one.started, reverse=True)
    ordered = sorted(latest_first, key=lambda one: (one.priority, one.gpus))
    for _, group in groupby(ordered, key=lambda one: one.priority):
        smallest_first = list(group)
        if not enough([*stopped, *smallest_first]):
            stopped += smallest_first
            continue
        largest_first = sorted(smallest_first, key=lambda one: -one.gpus)
        count = next(n for n in range(1, len(largest_first) + 1) if enough([*stopped, *largest_first[:n]]))
        most = [*stopped, *largest_first[: count - 1]]
        rest = [one for one in smallest_first if one not in most]
        return [*most, next(one for one in rest if enough([*most, one]))]
    return stopped


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


def freed_by(taken: Sequence[Holder], stopped: Sequence[Holder] = ()) -> dict[str, Resources]:
    """What is free once these replicas and these jobs have ended. A job that is listed twice gives up two replicas."""
    freed: dict[str, Resources] = {}
    left: dict[str, int] = {}
    ended = {holder.uid for holder in stopped}
    for holder in stopped:
        for node in holder.spares:
            freed.setdefault(node, Resources())
        for node, amount in holder.used.items():
            freed[node] = freed.get(node, Resources()) + amount
    for holder in taken:
        if holder.uid in ended:
            continue
        replica = left[holder.uid] = left.get(holder.uid, holder.replicas) - 1
        for node, amount in holder.nodes[replica].items():
            freed[node] = freed.get(node, Resources()) + amount
    return freed


def _needed(taken: Sequence[Holder], stopped: Sequence[Holder], fits: Fits) -> tuple[Victim, ...]:
    """The victims, without jobs that turn out not to be needed."""
    ending = list(stopped)
    for holder in sorted(stopped, key=lambda one: (-one.priority, -one.gpus)):
        without = [one for one in ending if one.uid != holder.uid]
        if (without or taken) and fits(freed_by(taken, without)):
            ending = without
    ended = {holder.uid for holder in ending}
    kept = [holder for holder in taken if holder.uid not in ended]
    for holder in dict.fromkeys(kept):
        without = [one for one in kept if one.uid != holder.uid]
        if (without or ending) and fits(freed_by(without, ending)):
            kept = without
    counts: dict[str, int] = {}
    for holder in kept:
        counts[holder.uid] = counts.get(holder.uid, 0) + 1
    by_uid = {holder.uid: holder for holder in kept}
    shrunk = [Victim(by_uid[uid].key, uid, by_uid[uid].replicas - count) for uid, count in sorted(counts.items())]
    return (*shrunk, *(Victim(holder.key, holder.uid, 0) for holder in ending))


def holder_of(
    key: JobKey, job: KubeObject, parsed: ParsedJobs, priority: Callable[[int], int], now: datetime
) -> Holder | None:
    """The job as a holder of replicas. None if it is neither elastic nor preemptible, or has no workers.

    A job that runs below its smallest size gives up no replicas.

    Args:
        key: The job's key.
        job: Its object.
        parsed: Parses it.
        priority: The priority that the policy allows for a priority.
        now: The time of the request for which replicas are needed.
    """
    fields = job.get("spec")
    if not isinstance(fields, Mapping) or not (fields.get("elastic") or fields.get("preemptible")):
        return None
    try:
        spec, status = parsed.spec(job), parsed.status(job)
    except InvalidSpecError:
        return None
    entries = in_rank_order(status.placement.workers) if status.placement is not None else []
    replicas = status.plan.data if status.plan is not None else 0
    if status.placement is None or status.plan is None or not entries or not replicas:
        return None
    # Otherwise a worker would have parts of several replicas.
    divisible = not len(entries) % replicas or not replicas % len(entries)
    elastic = spec.elastic if divisible and not status.plan.replanned else None
    preemptible = spec.preemptible and spec.workers.scheduler_name is None
    if elastic is None and not preemptible:
        return None
    following = status.elastic.next_placement if status.elastic is not None else None
    resized = parse_time(status.elastic.resized_time) if status.elastic is not None else None
    return Holder(
        key,
        job["metadata"]["uid"],
        priority(spec.priority),
        replicas,
        elastic.min_replicas if elastic is not None else replicas,
        workers=[entry.node for entry in entries],
        joining=[entry.node for entry in following.workers] if following is not None else [],
        filled_from=spec.replicas if elastic is not None and elastic.fill else None,
        rests_until=_end_of_pause(resized, elastic.pause_seconds, now) if elastic is not None else None,
        preemptible=preemptible,
        started=(status.mesh.started_time if status.mesh is not None else None) or "",
        spares=status.placement.spares,
    )


def _end_of_pause(resized: datetime | None, seconds: float, now: datetime) -> datetime | None:
    """The end of a job's pause after a resize. None if it is over."""
    if resized is None:
        return None
    end = resized + timedelta(seconds=seconds)
    # After a clock was set back, the pause must not be longer, except by the age that a request may have.
    return end if 0.0 < (end - now).total_seconds() <= seconds + OLDEST_REQUEST_SECONDS else None
