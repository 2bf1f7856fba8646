"""Workers that start beside an elastic job when its generation ends before they are ready. Pure functions.

With `elastic.onLoss: Shrink` and `recovery.onReplicaLoss: Continue`, the ranks that are left continue without them, and
these workers keep starting: other pods would be ready later. Otherwise their growth ends with the generation.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.api import conditions as names
from meshwright.api.status import PlacementStatus
from meshwright.planner.plan import Plan
from meshwright_operator.decide import resize, sizing
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.gang_actions import Size
from meshwright_operator.decide.observed import LIVE, Observed, PodState, Worker
from meshwright_operator.decide.size_status import MOVING, apply_loss, change_text
from meshwright_operator.text import counted


def continue_without_lost(decision: Decision) -> bool:
    """Continues with the replicas that are complete while others start. Returns whether it does, or soon will."""
    observed = decision.observed
    lost = _lost(observed)
    if not lost or not _may_keep(decision):
        return False
    sizes = sizing.smaller_sizes(observed, [worker for worker in observed.workers if worker not in lost])
    following = _following(observed, sizes[0]) if sizes else None
    if following is None:
        return False
    ending = sum(worker.state is PodState.ENDING for worker in observed.workers)
    if ending:
        # Until then its ranks save a checkpoint with the others.
        decision.starting(f"Waiting for {counted(ending, 'pod')} to terminate")
        decision.requeue_within(resize.ENDING_SECONDS)
        return True
    (size, (plan, placement)) = sizes[0], following
    assert observed.status.placement is not None
    apply_loss(decision, size.plan, resize.shrunk(observed.status.placement, size), placement)
    used = {entry.worker for entry in placement.workers}
    count = sum(worker.index in used for worker in observed.joining)
    starting = counted(count, "worker")
    moves = plan.layout == size.plan.layout
    purpose = "replace those on draining nodes" if moves else change_text(replace(observed, plan=size.plan), plan)
    decision.condition(names.RESCALING, True, MOVING if moves else "Growing", f"Starting {starting} to {purpose}")
    start = f"{starting} {'starts' if count == 1 else 'start'}"
    decision.starting(f"Continuing with {counted(size.replicas, 'replica')} while {start}")
    return True


def keep(decision: Decision) -> bool:
    """Whether the workers that start stay beside a job that has lost none of its own: only its ranks start anew."""
    observed = decision.observed
    if _lost(observed) or not _may_keep(decision):
        return False
    decision.ungate += [worker.pod for worker in observed.joining if worker.pod is not None and worker.pod.gated]
    return True


def without_kept(decision: Decision) -> Observed:
    """The job without the workers that keep starting beside it, for which its next generation does not wait."""
    elastic = decision.status.elastic
    kept = decision.observed.joining and elastic is not None and elastic.next_placement is not None
    return replace(decision.observed, joining=()) if kept else decision.observed


def _may_keep(decision: Decision) -> bool:
    observed, following = decision.observed, sizing.state(decision.observed).next_placement
    if following is None or observed.status.placement is None or not sizing.shrinks_on_loss(observed):
        return False
    return resize.plan_of(observed, following) is not None and resize.usable(decision)


def _lost(observed: Observed) -> list[Worker]:
    return [worker for worker in observed.workers if worker.state not in LIVE or worker.node_down]


def _following(observed: Observed, size: Size) -> tuple[Plan, PlacementStatus] | None:
    """The largest size that the workers of `size` have with those that start, and its placement.

    None if none of those that start has a place in it: then they are of no use.
    """
    before = sizing.state(observed).next_placement
    plan = resize.plan_of(observed, before) if before is not None else None
    if before is None or plan is None:
        return None
    joining = {worker.index for worker in observed.joining}
    named = {entry.worker for entry in before.workers} & (size.plan_workers.keys() | joining)
    stay = [worker for worker in (*observed.workers, *observed.joining) if worker.index in named]
    larger = replace(observed, plan=plan, workers=stay, status=resize.with_placement(observed, before))
    for smaller in sorted((*observed.size_plans, observed.plan), key=lambda one: -one.layout.world_size):
        if smaller.replanned or smaller.layout.world_size < size.plan.layout.world_size:
            continue
        found = sizing.size_for(larger, smaller, stay)
        if not found.new_workers and joining & found.plan_workers.keys():
            return smaller, resize.shrunk(before, found)
    return None
