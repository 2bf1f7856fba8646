"""Nodes that are left to one job: its spare nodes while it runs, and the nodes chosen for it after a long wait.

A waiting job is passed by for `RESERVE_SECONDS`. After that it reserves nodes, so that smaller jobs behind it cannot
delay it without limit. It reserves only nodes that it would use: those where the least would have to end. They stay
the same until the job starts, so that they become free one after the other. A job that would not fit even if all other
jobs ended reserves nothing, and of the jobs of one namespace only the first in the queue reserves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory, Node
from meshwright.planner.cost_model import Calibration, cost_model_for
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import Placement
from meshwright.planner.placement.capacity import GangShape, name_at, why_too_small
from meshwright.planner.placement.fit_error import fits
from meshwright.planner.placement.group_levels import base_level
from meshwright.planner.placement.stable_placement import spans_further
from meshwright.planner.plan import Plan
from meshwright.planner.plan_and_place import place_best, place_plan
from meshwright.planner.topology.levels import DOMAIN
from meshwright_operator.decide.gang_actions import Size
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.scheduling.job_queue import PlacementRequest
from meshwright_operator.scheduling.policy import Bounds, Policy

RESERVE_SECONDS = 120.0
"""How long a job is passed by before it reserves nodes."""


def choose_nodes(
    request: PlacementRequest,
    without_jobs: Inventory,
    busy: Mapping[str, int],
    calibration: Calibration,
    previous: Iterable[str] = (),
) -> tuple[str, ...]:
    """The nodes to reserve for a job that does not fit now; empty if it would not fit without other jobs either.

    Args:
        request: The job.
        without_jobs: The nodes as if all jobs had ended, without those that the job cannot get.
        busy: Node -> GPUs that jobs use there now.
        calibration: The calibrated constants of the cluster's GPUs.
        previous: The nodes that are reserved for it so far. They stay if it still fits on them.
    """
    request = request.smallest
    kept = set(request.assigned_nodes.values())
    names = list(previous)
    if names and not request.assigned_nodes and _fits_on(request, without_jobs, names):
        return tuple(names)
    plan = request.plan
    candidates = without_jobs
    if not request.assigned_nodes:
        for plan in request.plans:
            names = _least_busy(plan, without_jobs, busy)
            if names:
                candidates = replace(without_jobs, nodes={name: without_jobs.nodes[name] for name in names})
                break
        else:
            return ()
    try:
        placement = placement_for(replace(request, plan=plan, other_plans=()), candidates, calibration)
    except DoesNotFitError:
        return ()
    return tuple(sorted(set(placement.nodes.values()) - kept))


def placement_for(request: PlacementRequest, inventory: Inventory, calibration: Calibration) -> Placement:
    """The placement of the job: with the best of its plans, and with low network cost to the nodes it had before.

    Raises:
        DoesNotFitError: The job does not fit.
    """
    if request.sizes:
        return _largest_that_fits(request, inventory, calibration)
    cost_model = cost_model_for(request.spec, request.plan.architecture, inventory, calibration)
    if request.other_plans:
        return place_best(request.plans, inventory, cost_model)
    return place_plan(request.plan, inventory, cost_model, request.assigned_nodes, request.previous)


def _largest_that_fits(request: PlacementRequest, inventory: Inventory, calibration: Calibration) -> Placement:
    """The placement of the first size that fits."""
    problem: DoesNotFitError | None = None
    for number, size in enumerate(request.sizes, start=1):
        further = spans_further(size.plan, inventory, request.previous)
        if number < len(request.sizes) and not further and not fits(size.plan, inventory, size.kept):
            continue  # Only the smallest size explains why it does not fit, which takes longer than to find out.
        spec = _spec_of_size(request.spec, size)
        cost_model = cost_model_for(spec, size.plan.architecture, inventory, calibration)
        try:
            return place_plan(size.plan, inventory, cost_model, size.kept, request.previous)
        except DoesNotFitError as error:
            problem = error
    assert problem is not None
    raise problem


def _spec_of_size(spec: ParallelTrainingJobSpec, size: Size) -> ParallelTrainingJobSpec:
    """The spec with the replicas and the batch of a size."""
    changes: dict[str, object] = {"replicas": size.replicas}
    if spec.training is not None and size.plan.global_batch_size is not None:
        changes["training"] = spec.training.model_copy(update={"global_batch_size": size.plan.global_batch_size})
    return spec.model_copy(update=changes)


def _fits_on(request: PlacementRequest, inventory: Inventory, names: Iterable[str]) -> bool:
    nodes = [inventory.nodes[name] for name in names if name in inventory.nodes]
    return any(_enough(plan, nodes, inventory) for plan in request.plans)


def _enough(plan: Plan, nodes: Sequence[Node], inventory: Inventory) -> list[str]:
    """The first of the nodes on which all of the plan's workers fit; empty if they do not fit on all."""
    used = _enough_blocks(plan, nodes)
    if plan.topology is None or not used:
        return used

    def fits_on(count: int) -> bool:
        return fits(plan, replace(inventory, nodes={node.name: node for node in nodes[:count]}))

    # More nodes never fit less.
    count = bisect_left(range(len(nodes) + 1), True, key=fits_on)
    return [node.name for node in nodes[:count]] if count <= len(nodes) else []


def _enough_blocks(plan: Plan, nodes: Iterable[Node]) -> list[str]:
    """As `_enough`, if only the level counts that a tensor-parallel group must not leave."""
    shape, level = GangShape(plan), base_level(plan)
    free: defaultdict[str, int] = defaultdict(int)
    blocks, used = 0, []
    for node in nodes:
        workers = 0 if node.unusable or why_too_small(plan, node) else node.free.fits(plan.worker_request)
        if not workers:
            continue
        domain = name_at(node, level)
        blocks += (free[domain] + workers) // shape.block_workers - free[domain] // shape.block_workers
        free[domain] += workers
        used.append(node.name)
        if blocks >= shape.blocks:
            return used
    return []


def _least_busy(plan: Plan, inventory: Inventory, busy: Mapping[str, int]) -> list[str]:
    """Nodes on which the plan fits and that have the fewest GPUs in use by jobs, domain by domain."""
    domains: defaultdict[str, int] = defaultdict(int)
    for name, node in inventory.nodes.items():
        domains[node.place.at(DOMAIN)] += busy.get(name, 0)
    nodes = sorted(
        inventory.nodes.values(),
        key=lambda node: (domains[node.place.at(DOMAIN)], node.place.at(DOMAIN), busy.get(node.name, 0), node.name),
    )
    return _enough(plan, nodes, inventory)


class ReservedSpares(NamedTuple):
    """Spare nodes of one job. No other job gets them while the job has pods.

    They are in its `status.placement.spares`, so a restarted operator reserves the same nodes.
    """

    uid: str
    why: str
    nodes: tuple[str, ...]

    @classmethod
    def by(cls, key: JobKey, uid: str, nodes: Iterable[str]) -> ReservedSpares:
        """The spare nodes of the job with this key."""
        return cls(uid, f"spare node of job {key}", tuple(nodes))


def reserved_spares(cache: Cache, policy: Policy) -> list[ReservedSpares]:
    """The spare nodes of every job with pods, at most as many as its spec requests and `spares_allowed`."""
    spares = []
    for key, job in cache.jobs.items():
        count, nodes = _get_path(job, "spec", "recovery", "spareNodes"), _get_path(job, "status", "placement", "spares")
        if not isinstance(count, int) or not isinstance(nodes, list) or count < 1 or not nodes:
            continue
        uid = str(job["metadata"].get("uid", ""))
        pods = [pod for pod in cache.pods(key, uid) if not pod.terminal]
        if pods:
            workers = _get_path(job, "status", "placement", "workers")
            size = len(workers) if isinstance(workers, list) else len(pods)
            count = spares_allowed(count, size, policy.of(key.namespace))
            spares.append(ReservedSpares.by(key, uid, map(str, nodes[:count])))
    return spares


def spares_allowed(requested: int, workers: int, bounds: Bounds) -> int:
    """How many spare nodes a job gets: at most one for each of its workers, and what the policy allows."""
    allowed = min(requested, max(1, workers))
    return allowed if bounds.max_spare_nodes is None else min(allowed, bounds.max_spare_nodes)


def reserved_for_others(reserved: Iterable[ReservedSpares], uid: str) -> Mapping[str, str]:
    """Node -> why the job `uid` cannot use it."""
    return {node: one.why for one in reserved if one.uid != uid for node in one.nodes}


def _get_path(obj: object, *path: str) -> object:
    """The value at this path; None if it is missing or the object is malformed."""
    for name in path:
        obj = obj.get(name) if isinstance(obj, Mapping) else None
    return obj
