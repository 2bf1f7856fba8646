"""One attempt to place a job on what is free now. Runs in a thread, with the view of the cluster that all reuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.planner.cluster.inventory import Inventory, Node
from meshwright.planner.cluster.pod_resources import Resources
from meshwright.planner.cost_model import Calibration
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import Placement, with_spares
from meshwright.planner.placement.stable_placement import spans_further
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.scheduling.assigned_domains import within_domains
from meshwright_operator.scheduling.capacity_hint import Amounts, capacity_hint, occupants
from meshwright_operator.scheduling.cluster_view import NOTHING, ClusterView, FreeNodes
from meshwright_operator.scheduling.inventories import NodeRequirements
from meshwright_operator.scheduling.job_queue import PlacementRequest
from meshwright_operator.scheduling.preemption import Fits, Holder, Victim, choose_victims, freed_by
from meshwright_operator.scheduling.reservations import choose_nodes, placement_for
from meshwright_operator.text import counted, sentences


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What an attempt depends on, collected on the event loop."""

    request: PlacementRequest
    empty: Inventory
    """The job's nodes without pods."""
    kept_off: Mapping[str, str]
    """Node -> why it is not for this job, whatever the queue: spares of other jobs, nodes that rejected its pods."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """Node -> why it is left to a job ahead in the queue."""
    blocked_by: JobKey | None = None
    """The first job ahead that fits now."""
    ahead: int = 0
    """How many jobs are ahead in the queue."""
    spares: int = 0
    """How many spare nodes the job gets."""
    reserves: bool = False
    """Whether nodes are reserved for the job if it does not fit."""
    reserved: tuple[str, ...] = ()
    """The nodes that are reserved for it so far."""
    without_pods_of: tuple[str, str] | None = None
    """Namespace and uid of a job whose pods do not count, because they would be deleted first; None for none."""
    holders: Sequence[Holder] = ()
    """Jobs that may have to shrink or to stop if the job does not fit; empty if it must not take anything."""
    victims: Sequence[Victim] = ()
    """Those that shrink or stop for it already."""
    priority: int = 0
    """The job's priority, as far as the policy allows it."""
    explain: bool = True
    """Whether the message of a failure is needed."""
    calibration: Calibration


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an attempt: a placement, or a message why there is none."""

    placement: Placement | None = None
    message: str = ""
    warnings: tuple[str, ...] = ()
    """Problems with nodes or pods that were ignored."""
    blocked_by_kept_workers: bool = False
    waits_for: JobKey | None = None
    """If it fits without the claims of those ahead: the first job ahead that fits too."""
    reserved: tuple[str, ...] = ()
    """The nodes to reserve for the job."""
    victims: tuple[Victim, ...] = ()
    """The jobs that have to shrink or to stop so that the job fits."""
    claimed: tuple[str, ...] = ()
    """The nodes on which it then runs."""


def run_attempt(attempt: Attempt, view: ClusterView) -> Outcome:
    """Places the job, or explains why it does not fit and chooses the nodes to reserve for it."""
    request = attempt.request
    resource = request.spec.workers.gpu_resource
    free = view.free_nodes(NodeRequirements.of(request.spec), attempt.empty, resource)
    own = request.key.namespace, request.uid
    freed: Amounts = dict(view.used_by_job(*own, resource)) if request.reuses_own_pods else {}
    if attempt.without_pods_of not in (None, own):
        freed |= _sum(freed, view.used_by_job(*attempt.without_pods_of, resource))
    changed = free.excluding(attempt.kept_off, free.without(freed))
    changed = within_domains(request, free.nodes, changed)
    rest = free.excluding(attempt.claims, changed)
    if may_fit(request, free, rest) or attempt.explain:
        inventory = free.inventory(rest)
        try:
            return Outcome(_placed(attempt, inventory), warnings=inventory.warnings)
        except DoesNotFitError as error:
            outcome = Outcome(
                message=str(error),
                warnings=inventory.warnings,
                blocked_by_kept_workers=error.blocked_by_kept_workers,
            )
    else:
        outcome = Outcome()
    if attempt.explain:
        outcome = _explained(attempt, view, free, changed, outcome)
    if attempt.holders:
        victims, claimed = _victims(attempt, view, free, rest)
        outcome = replace(outcome, victims=victims, claimed=claimed)
    if attempt.reserves:
        outcome = replace(outcome, reserved=_chosen(attempt, free, rest))
    return outcome


def _placed(attempt: Attempt, inventory: Inventory) -> Placement:
    """The placement with its spare nodes. A size beyond `replicas` (`elastic.fill`) must leave them free.

    Raises:
        DoesNotFitError: No size fits so.
    """
    request = attempt.request
    while True:
        placement = with_spares(placement_for(request, inventory, attempt.calibration), inventory, attempt.spares)
        replicas, most = placement.plan.layout.data, request.spares_beyond
        if most is None or replicas <= most or len(placement.spares) >= attempt.spares:
            return placement
        smaller = tuple(size for size in request.sizes if size.replicas < replicas)
        if not smaller:
            message = f"{counted(replicas, 'replica')} would use the nodes that `recovery.spareNodes` asks for"
            raise DoesNotFitError(message, unplaced_workers=0, replicas_that_fit=most)
        request = replace(request, plan=smaller[0].plan, sizes=smaller)


def _victims(
    attempt: Attempt, view: ClusterView, free: FreeNodes, rest: dict[str, Node]
) -> tuple[tuple[Victim, ...], tuple[str, ...]]:
    """The jobs that have to shrink or to stop so that the job fits at its smallest size.

    Pods that are ending count as gone: a job that has shrunk for this one would otherwise shrink again. Also returns
    the nodes that the job then gets besides those that it has: no job behind it may use them meanwhile.
    """
    request, resource = attempt.request.smallest, attempt.request.spec.workers.gpu_resource
    others = [one for one in attempt.holders if one.uid != request.uid]
    may_give = [one for one in others if one.against(attempt.priority) is not None]
    holders = [holder.using(view.used_by_job(holder.key.namespace, holder.uid, resource)) for holder in may_give]
    leaving: dict[str, Resources] = {}
    for holder in others:
        leaving |= _sum(leaving, holder.leaving(view.used_by_job(holder.key.namespace, holder.uid, resource)))
    spare_of = {node: f"spare node of job {one.key}" for one in holders for node in one.spares}
    with_taken = _WithTaken(request, attempt.calibration, free, rest, leaving, spare_of)
    victims: tuple[Victim, ...] = tuple(attempt.victims)
    freed: Mapping[str, Resources] = {}
    if not leaving or not with_taken.fits({}):
        victims, freed = _choose(attempt, holders, with_taken.fits)
    placement = with_taken.placed(freed) if victims else None
    if placement is None:
        return (), ()
    kept = set(request.kept_in(placement).values())
    return victims, tuple(sorted(set(placement.nodes.values()) - kept))


@dataclass(frozen=True, slots=True)
class _WithTaken:
    """A job on what is free and what is taken from other jobs (node -> amount)."""

    request: PlacementRequest
    calibration: Calibration
    free: FreeNodes
    rest: Mapping[str, Node]
    """The nodes that differ for this job."""
    leaving: Mapping[str, Resources]
    """What other jobs are giving up already."""
    spare_of: Mapping[str, str]
    """Spare node of a job that may have to stop -> why it is not usable as long as that job runs."""

    def fits(self, taken: Mapping[str, Resources]) -> bool:
        """Whether the job fits then."""
        if not self.request.reuses_own_pods:
            return self.free.has_capacity(self.request.plan, {**self.rest, **self._changed(taken)})
        return self.placed(taken) is not None

    def placed(self, taken: Mapping[str, Resources]) -> Placement | None:
        """The placement then. None if it does not fit."""
        inventory = self.free.inventory({**self.rest, **self._changed(taken)})
        try:
            return placement_for(self.request, inventory, self.calibration)
        except DoesNotFitError:
            return None

    def _changed(self, taken: Mapping[str, Resources]) -> dict[str, Node]:
        amounts = {**self.leaving, **_sum(self.leaving, taken)}
        found = {name: self.rest.get(name) or self.free.nodes.get(name) for name in amounts}
        nodes = [(name, self._without_spare(name, node)) for name, node in found.items() if node is not None]
        return {name: replace(node, free=node.free + amounts[name]) for name, node in nodes if not node.unusable}

    def _without_spare(self, name: str, node: Node) -> Node:
        is_spare = bool(node.unusable) and node.unusable == self.spare_of.get(name)
        return replace(node, unusable="") if is_spare else node


def _choose(
    attempt: Attempt, holders: Sequence[Holder], fits: Fits
) -> tuple[tuple[Victim, ...], Mapping[str, Resources]]:
    """The victims, with those that have shrunk or stopped already, and what the others will free (by node)."""
    victims = choose_victims(holders, attempt.priority, fits, attempt.victims)
    if not victims:
        return (), {}
    by_uid = {holder.uid: holder for holder in holders}
    done = [
        victim
        for victim in attempt.victims
        if (holder := by_uid.get(victim.uid)) is None
        or (holder.replicas <= victim.replicas if victim.replicas else not holder.gpus)
    ]
    shrinking = [by_uid[v.uid] for v in victims if v.replicas for _ in range(by_uid[v.uid].replicas - v.replicas)]
    freed = freed_by(shrinking, [by_uid[victim.uid] for victim in victims if not victim.replicas])
    chosen = {victim.uid for victim in victims}
    return (*victims, *(victim for victim in done if victim.uid not in chosen)), freed


def may_fit(request: PlacementRequest, free: FreeNodes, changed: Mapping[str, Node]) -> bool:
    """Whether the job may fit. Exact for a whole gang; a gang that keeps pods has to be placed to know, and so has one
    whose tensor-parallel groups spanned more than those of a new job may.
    """
    if request.assigned_nodes or any(size.kept for size in request.sizes):
        return True
    return any(
        free.has_capacity(plan, changed) or spans_further(plan, free.empty, request.previous) for plan in request.plans
    )


def _explained(
    attempt: Attempt, view: ClusterView, free: FreeNodes, changed: dict[str, Node], outcome: Outcome
) -> Outcome:
    """The outcome with a message that names the job ahead that gets the nodes, or what would have to end."""
    request = attempt.request
    if attempt.blocked_by is not None and _fits(attempt, free, changed):
        message = f"The job fits, but job {attempt.blocked_by} is ahead of it in the queue and fits too"
        return Outcome(message=message, waits_for=attempt.blocked_by)
    largest_first = occupants(view, request.spec.workers.gpu_resource, request.uid)

    def fits(amounts: Amounts) -> bool:
        nodes = {
            name: replace(node, free=node.free + amount)
            for name, amount in amounts.items()
            if (node := changed.get(name) or free.nodes.get(name)) is not None
        }
        return any(free.has_capacity(plan, {**changed, **nodes}) for plan in request.plans)

    hint = capacity_hint(largest_first, fits)
    count = attempt.ahead
    queued = f"{counted(count, 'job')} {'is' if count == 1 else 'are'} ahead in the queue" if count else ""
    return replace(outcome, message=sentences(outcome.message, hint, queued))


def _fits(attempt: Attempt, free: FreeNodes, changed: dict[str, Node]) -> bool:
    """Whether the job would be placed if no job ahead of it claimed nodes."""
    if not may_fit(attempt.request, free, changed):
        return False
    try:
        placement_for(attempt.request, free.inventory(changed), attempt.calibration)
    except DoesNotFitError:
        return False
    return True


def _chosen(attempt: Attempt, free: FreeNodes, rest: dict[str, Node]) -> tuple[str, ...]:
    """The nodes to reserve, chosen among those that the job would have if all jobs had ended."""
    jobs = free.use.jobs_by_node
    nodes = {
        name: replace(node, free=node.capacity - (free.use.by_node.get(name, NOTHING) - jobs.get(name, NOTHING)))
        for name, node in {**free.nodes, **rest}.items()
    }
    busy = {name: amount.gpus for name, amount in jobs.items()}
    without_jobs = replace(attempt.empty, nodes=nodes)
    return choose_nodes(attempt.request, without_jobs, busy, attempt.calibration, attempt.reserved)


def _sum(first: Mapping[str, Resources], second: Mapping[str, Resources]) -> Amounts:
    return {name: first.get(name, NOTHING) + amount for name, amount in second.items()}
