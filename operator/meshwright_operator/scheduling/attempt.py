"""One attempt to place a job on what is free now. Runs in a thread, with the view of the cluster that all reuse."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory, Node
from meshwright.planner.cluster.pod_resources import Resources
from meshwright.planner.cost_model import Calibration
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import Placement, with_spares
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.scheduling.capacity_hint import Amounts, capacity_hint, occupants
from meshwright_operator.scheduling.cluster_view import ClusterView, FreeNodes
from meshwright_operator.scheduling.job_queue import PlacementRequest
from meshwright_operator.scheduling.preemption import Holder, Victim, choose_victims
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
    without_pods_of: str = ""
    """uid of a job whose pods do not count, because they would be deleted first; empty for none."""
    holders: Sequence[Holder] = ()
    """Elastic jobs from which replicas may be taken if the job does not fit; empty if it must not take any."""
    victims: Sequence[Victim] = ()
    """Those that shrink for it already."""
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
    """The elastic jobs that have to shrink so that the job fits."""


def run_attempt(attempt: Attempt, view: ClusterView) -> Outcome:
    """Places the job, or explains why it does not fit and chooses the nodes to reserve for it."""
    request = attempt.request
    resource = request.spec.workers.gpu_resource
    free = view.free_nodes(node_requirements(request.spec), attempt.empty, resource)
    freed: Amounts = dict(view.used_by_job(request.uid, resource)) if request.reuses_own_pods else {}
    if attempt.without_pods_of not in ("", request.uid):
        freed |= _sum(freed, view.used_by_job(attempt.without_pods_of, resource))
    changed = free.excluding(attempt.kept_off, free.without(freed))
    rest = free.excluding(attempt.claims, changed)
    if may_fit(request, free, rest) or attempt.explain:
        inventory = free.inventory(rest)
        try:
            placement = placement_for(request, inventory, attempt.calibration)
            placement = with_spares(placement, inventory, attempt.spares)
            return Outcome(placement, warnings=inventory.warnings)
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
        outcome = replace(outcome, victims=_victims(attempt, view, free, rest))
    if attempt.reserves:
        outcome = replace(outcome, reserved=_chosen(attempt, free, rest))
    return outcome


def _victims(attempt: Attempt, view: ClusterView, free: FreeNodes, rest: dict[str, Node]) -> tuple[Victim, ...]:
    """The elastic jobs that have to shrink so that the job fits at its smallest size.

    Pods that are ending count as gone: a job that has shrunk for this one would otherwise shrink again.
    """
    request, resource = attempt.request.smallest, attempt.request.spec.workers.gpu_resource
    others = [holder for holder in attempt.holders if holder.uid != request.uid]
    holders = [holder.using(view.used_by_job(holder.uid, resource)) for holder in others]
    leaving: dict[str, Resources] = {}
    for holder in others:
        leaving = _sum(leaving, holder.leaving(view.used_by_job(holder.uid, resource)))

    def fits(taken: Mapping[str, Resources]) -> bool:
        amounts = {**leaving, **_sum(leaving, taken)}
        changed = {
            name: replace(node, free=node.free + amount)
            for name, amount in amounts.items()
            if (node := rest.get(name) or free.nodes.get(name)) is not None and not node.unusable
        }
        if not request.reuses_own_pods:
            return free.has_capacity(request.plan, {**rest, **changed})
        try:
            placement_for(request, free.inventory({**rest, **changed}), attempt.calibration)
        except DoesNotFitError:
            return False
        return True

    if leaving and fits({}):
        return tuple(attempt.victims)
    return choose_victims(holders, attempt.priority, fits)


def may_fit(request: PlacementRequest, free: FreeNodes, changed: Mapping[str, Node]) -> bool:
    """Whether the job may fit. Exact for a whole gang; a gang that keeps pods has to be placed to know."""
    return bool(request.assigned_nodes or any(size.kept for size in request.sizes)) or any(
        free.has_capacity(plan, changed) for plan in request.plans
    )


def node_requirements(spec: ParallelTrainingJobSpec) -> Hashable:
    """All requirements of a spec on nodes. Jobs with the same requirements have the same free nodes."""
    workers = spec.workers
    tolerations = tuple(toleration.model_dump_json() for toleration in workers.tolerations)
    return workers.gpu_resource, tuple(sorted(workers.node_selector.items())), tolerations


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
        name: replace(node, free=node.capacity - (free.use.by_node.get(name, _NOTHING) - jobs.get(name, _NOTHING)))
        for name, node in {**free.nodes, **rest}.items()
    }
    busy = {name: amount.gpus for name, amount in jobs.items()}
    without_jobs = replace(attempt.empty, nodes=nodes)
    return choose_nodes(attempt.request, without_jobs, busy, attempt.calibration, attempt.reserved)


def _sum(first: Amounts, second: Mapping[str, Resources]) -> Amounts:
    return {name: first.get(name, _NOTHING) + amount for name, amount in second.items()}


_NOTHING = Resources()
