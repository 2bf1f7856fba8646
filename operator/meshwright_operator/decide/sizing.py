"""Which size an elastic job should have, and which worker then runs which ranks. Pure functions.

The wanted size is `spec.replicas`, or `elastic.maxReplicas` with `fill`. A job runs with fewer replicas while nodes are
missing: it shrinks by the replicas that lost workers, and grows when nodes are free. Workers that stay keep their pods
and nodes, and their ranks if the coordinates still exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from meshwright.api.elastic import ElasticSpec
from meshwright.api.status import ElasticStatus
from meshwright.planner.placement.resize import workers_on_resize
from meshwright.planner.plan import Plan
from meshwright.rules.elastic import continues_on_loss, spec_of_plan, wanted_replicas
from meshwright_operator.decide.gang_actions import Size
from meshwright_operator.decide.mesh_generation import plan_workers
from meshwright_operator.decide.observed import LIVE, Observed, Worker, has_started
from meshwright_operator.timestamps import parse_time, seconds_since

FIRST_RETRY_SECONDS = 60.0
LONGEST_RETRY_SECONDS = 1800.0


def elastic_of(observed: Observed) -> ElasticSpec:
    """`spec.elastic` of an elastic job."""
    assert observed.elastic is not None
    assert observed.elastic.elastic is not None
    return observed.elastic.elastic


def state(observed: Observed) -> ElasticStatus:
    """`status.elastic`, or what it is before the job has started."""
    return observed.status.elastic or ElasticStatus()


def moves(observed: Observed) -> bool:
    """Whether the workers that join replace others on draining nodes: the job keeps its size."""
    following = state(observed).next_placement
    if following is None:
        return False
    layout = observed.plan.layout
    degrees = (following.tensor, following.pipeline, following.data)
    return degrees == (layout.tensor, layout.pipeline, layout.data)


def leaving(observed: Observed) -> list[Worker]:
    """The workers that end once the joining ones are ready."""
    following = state(observed).next_placement
    after = {entry.worker for entry in following.workers} if following is not None else set()
    return [worker for worker in observed.workers if worker.index not in after]


def current_size(observed: Observed) -> int:
    """The number of replicas in effect."""
    return observed.plan.layout.data


def wanted(observed: Observed) -> int:
    """The number of replicas with which the job runs if there are enough nodes. With `gpus`, that of the full plan."""
    assert observed.elastic is not None
    if observed.elastic.gpus is not None and observed.full_plan is not None:
        return observed.full_plan.data
    return wanted_replicas(observed.elastic)


def wanted_text(plan: Plan) -> str:
    """That a plan has the wanted size."""
    return f"{plan.layout.data} {'is' if plan.layout.data == 1 else 'are'} wanted"


def is_larger(plan: Plan, observed: Observed) -> bool:
    """Whether a plan has more ranks than the one in effect."""
    return plan.layout.world_size > observed.plan.layout.world_size


def smaller_plan(observed: Observed) -> Plan | None:
    """The plan to which the job has to shrink now, because its size is above the wanted one. None otherwise."""
    plans, own = observed.size_plans, observed.plan
    if not plans or plans[0].replanned or plans[0].layout == own.layout or is_larger(plans[0], observed):
        return None
    same_size = plans[0].layout.world_size == own.layout.world_size
    return plans[0] if own.replanned or not same_size else None


def size_for(observed: Observed, plan: Plan, stay: Iterable[Worker]) -> Size:
    """The job with this plan, if these workers stay. Workers that are missing get the lowest free indices.

    What is left of a tensor-parallel group does not stay. Its pods end, so that no new pod may have one of their
    indices: two pods of a worker must not live at once.
    """
    ranks_of = plan_workers(observed)
    running = {worker.index: ranks_of[worker.index] for worker in stay if worker.index in ranks_of}
    kept = workers_on_resize(observed.plan, plan, running)
    nodes = {worker.index: worker.node for worker in observed.workers}
    live = {worker.index for worker in observed.workers if worker.state in LIVE}
    missing = sorted(set(range(len(plan.workers))) - set(kept.values()))
    same = {plan_worker: worker for worker, plan_worker in ranks_of.items() if worker not in kept.keys() | live}
    assigned = dict(kept)
    for plan_worker in missing:  # a lost worker is replaced under its own index
        if (index := same.get(plan_worker)) is not None:
            assigned[index] = plan_worker
    used = assigned.keys() | live
    free = iter(index for index in range(len(plan.workers) + len(used)) if index not in used)
    for plan_worker in missing:
        if plan_worker not in assigned.values():
            assigned[next(free)] = plan_worker
    return Size(
        plan,
        dict(sorted(assigned.items())),
        {plan_worker: nodes[worker] for worker, plan_worker in kept.items()},
    )


def size_in_place(observed: Observed, plan: Plan, stay: Iterable[Worker], *, beside: bool = False) -> Size:
    """The job in its layout, in which these workers stay with their ranks, and the others get new pods.

    With `beside`, all of its pods live while the new ones start: these get indices that no pod has.
    """
    worker_of = {plan_worker: worker for worker, plan_worker in plan_workers(observed).items()}
    nodes = {worker.index: worker.node for worker in stay}
    used = {*(worker.index for worker in observed.workers), *(pod.worker for pod in observed.excess_pods)}
    free = iter(index for index in range(len(plan.workers) + len(used)) if index not in used)
    assigned, kept = dict[int, int](), dict[int, str]()
    for plan_worker in range(len(plan.workers)):
        worker = worker_of.get(plan_worker)
        if worker in nodes:
            kept[plan_worker] = nodes[worker]
        elif worker is None or beside:
            worker = next(free)
        assigned[worker] = plan_worker
    return Size(plan, dict(sorted(assigned.items())), kept)


def sizes_to_place(observed: Observed) -> tuple[Size, ...]:
    """The sizes to try while no generation runs, the preferred one first.

    A job that lost some workers first waits for nodes to replace them, for `elastic.replacementSeconds`. With
    `elastic.onLoss: Shrink` or `recovery.onReplicaLoss: Continue` it continues without them if it can.
    """
    live = [worker for worker in observed.workers if worker.state in LIVE]
    if shrinks_on_loss(observed) and (sizes := smaller_sizes(observed, live)):
        return sizes
    plans = list(observed.size_plans) or [observed.plan]
    own = observed.plan.layout.world_size
    if live and own <= plans[0].layout.world_size:
        waited = seconds_since(observed.mesh.pending_since, observed.now)
        if waited < elastic_of(observed).replacement_seconds:
            plans = [plan for plan in plans if plan.layout.world_size == own] or [observed.plan]
        else:
            # Workers that wait for others are not worth more than those that train: no growth yet.
            plans = [plan for plan in plans if plan.layout.world_size <= own]
    found = [size_for(observed, plan, live) for plan in plans]
    # What is left of a tensor-parallel group stays if the rest of it fits beside it.
    same = [plan for plan in plans if live and plan.layout == observed.plan.layout]
    in_place = (size_in_place(observed, plan, live) for plan in same)
    return (*(size for size in in_place if size not in found), *found)


def shrinks_on_loss(observed: Observed) -> bool:
    """Whether a loss of workers makes the job continue at once with fewer replicas."""
    assert observed.elastic is not None
    return observed.mesh.generation > 0 and continues_on_loss(observed.elastic)


def smaller_sizes(observed: Observed, live: list[Worker]) -> tuple[Size, ...]:
    """The smaller sizes for which these workers are enough, the largest first."""
    own = observed.plan.layout.world_size
    plans = [plan for plan in observed.size_plans if plan.layout.world_size < own and not plan.replanned]
    sizes = [size_for(observed, plan, live) for plan in plans]
    return tuple(size for size in sizes if not size.new_workers)


def sizes_of_edit(observed: Observed) -> tuple[Size, ...]:
    """The sizes with which an edited elastic job may start again, the preferred one first. None of its pods stays."""
    return tuple(
        Size(plan, {worker: worker for worker in range(len(plan.workers))}, {}) for plan in observed.size_plans
    )


def with_plan(observed: Observed, plan: Plan) -> Observed:
    """The job with the plan that it gets."""
    if observed.elastic is None:
        return replace(observed, plan=plan)
    return replace(observed, plan=plan, spec=spec_of_plan(observed.elastic, plan.to_status()))


def sizes_to_grow(observed: Observed) -> tuple[Size, ...]:
    """The sizes to which a job that trains may grow now, the largest first. Empty if it must wait, or has its size."""
    own, elastic = current_size(observed), elastic_of(observed)
    plans = [plan for plan in observed.size_plans if is_larger(plan, observed)]
    beyond = observed.elastic is not None and own >= observed.elastic.replicas and not observed.plan.replanned
    if elastic.fill and beyond:
        plans = [plan for plan in plans if (plan.layout.data - own) * 100 >= elastic.min_gain_percent * own]
    if not plans or seconds_until_growth(observed) > 0:
        return ()
    return tuple(size_for(observed, plan, observed.workers) for plan in plans)


def seconds_until_growth(observed: Observed) -> float:
    """Seconds until a job that trains may grow; 0 if it may now, as after an edit that wants more replicas."""
    elastic = state(observed)
    if 0 < elastic.wanted_replicas < wanted(observed):
        return 0.0
    resized = parse_time(elastic.resized_time)
    pause = timedelta(seconds=elastic_of(observed).pause_seconds)
    return _seconds_left(observed, parse_time(elastic.retry_time), resized + pause if resized is not None else None)


def seconds_until_retry(observed: Observed) -> float:
    """Seconds until workers may start beside the job again after an attempt that failed."""
    return _seconds_left(observed, parse_time(state(observed).retry_time))


def _seconds_left(observed: Observed, *ends: datetime | None) -> float:
    """Seconds until the last of these times."""
    now = observed.now
    left = max(((end - now).total_seconds() for end in ends if end is not None), default=0.0)
    # A clock that was set back must not delay growth by more than the longest pause.
    longest = max(LONGEST_RETRY_SECONDS, elastic_of(observed).pause_seconds)
    return left if 0.0 < left <= longest else 0.0


def retry_pause(attempts: int) -> float:
    """Seconds between failed attempt `attempts` to grow, the first being 1, and the next: 60, 120 ... 1800."""
    return min(FIRST_RETRY_SECONDS * 2.0 ** min(max(attempts - 1, 0), 16), LONGEST_RETRY_SECONDS)


def next_incarnation(observed: Observed, incarnations: Mapping[int, int]) -> int:
    """An incarnation that no pod of the job ever had."""
    joining = [worker.incarnation for worker in observed.joining]
    before = [state(observed).incarnation] if has_started(observed.status) else []
    return max([*before, *incarnations.values(), *joining], default=-1) + 1
