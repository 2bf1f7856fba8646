"""Changes the size of an elastic job, and its nodes: shrinks it, and grows or moves it while it trains.

To shrink, the pods of the replicas that end are deleted; the ranks save a checkpoint, and the workers that stay form a
smaller generation. To grow, new workers start beside the job. Once all of them are ready, the ranks pause at a step,
save a checkpoint, and all workers form a larger generation. Workers on draining nodes move in the same way: others
start beside the job and replace them. If the generation ends before that, the next one uses the workers that start
beside the job, unless it would have to wait for them longer than for others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

from meshwright.api import conditions as names
from meshwright.api.conditions import is_true
from meshwright.api.objects import pod_name
from meshwright.api.status import ParallelTrainingJobStatus, PlacementStatus, format_ranks
from meshwright.planner.plan import Plan
from meshwright_operator.decide import in_memory, restart_policy, sizing
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.gang_actions import Place, Size, size_of
from meshwright_operator.decide.observed import ENDED, LIVE, Observed, PodState, Worker, has_started
from meshwright_operator.decide.placement_outcome import Granted, NotGranted
from meshwright_operator.decide.size_status import (
    MOVING,
    apply_move,
    apply_size,
    change_text,
    elastic_status,
    incarnations_of,
    layout_text,
    placement_text,
    record_incarnations,
    remember_full_plan,
    use_placement,
)
from meshwright_operator.kube.job_event import WARNING
from meshwright_operator.text import capitalized, counted, sentences
from meshwright_operator.timestamps import format_time

START_SECONDS = 600.0
"""Time in which the workers of a growth must be ready."""
ENDING_SECONDS = 15.0
"""Time after which a job that waits for pods to end looks again. The event of a pod that has ended wakes it earlier."""
SHRINK_SECONDS = 1.0
"""Time after which a job is reconciled again that has shrunk."""
PROBLEM_SECONDS = 120.0
"""Age at which a problem of one of their pods ends the growth."""


def update_size(decision: Decision) -> bool:
    """Writes the size to status, and shrinks the job if it is larger than wanted and enough of its workers stay.

    Returns whether it shrinks: its workers and pods follow from the new status.
    """
    observed = decision.observed
    if observed.elastic is None:
        end(decision, "`elastic` was removed")
        decision.status.elastic = None
        return False
    status = elastic_status(decision)
    new = not has_started(observed.status) or _revision(observed) != observed.revision
    if new and observed.elastic.training is not None:
        whole = [plan for plan in observed.size_plans if not plan.replanned]
        full = max(whole, key=lambda plan: plan.layout.data, default=observed.plan)
        status.micro_batches = full.strategy.micro_batches * full.strategy.data
    remember_full_plan(decision)
    wanted = sizing.wanted(observed)
    reached = sizing.current_size(observed) == wanted and not observed.plan.replanned
    if reached or wanted < status.wanted_replicas or not status.wanted_replicas:
        status.wanted_replicas = wanted  # a larger one only with the first attempt to grow, which does not wait
    plan = sizing.smaller_plan(observed)
    if plan is None or observed.status.placement is None or _run_ends(observed):
        return False
    size = sizing.size_for(observed, plan, [w for w in observed.workers if w.state in LIVE])
    if size.new_workers:
        return False
    reason = f"job {observed.taken_by}, which waits, comes first" if observed.taken_by else ""
    shrink(decision, size, reason or sizing.wanted_text(plan))
    # The event of the new status reconciles the job. This is for one that is lost.
    decision.requeue_within(SHRINK_SECONDS)
    return True


def _run_ends(observed: Observed) -> bool:
    """Whether workers have completed the run: they cannot join another mesh, and the others will complete it soon."""
    return not observed.mesh.pending_cause and any(worker.completed for worker in observed.workers)


def _revision(observed: Observed) -> str:
    return observed.status.plan.revision if observed.status.plan is not None else ""


def shrink(decision: Decision, size: Size, why: str) -> None:
    """Continues with the workers of a smaller size. The pods of the others are excess, and are deleted next."""
    assert decision.observed.status.placement is not None
    apply_size(decision, size.plan, shrunk(decision.observed.status.placement, size), why)


def shrunk(placement: PlacementStatus, size: Size) -> PlacementStatus:
    """The placement with the workers of a smaller size only, which get its ranks."""
    before = {entry.worker: entry for entry in placement.workers}
    ranks = size.plan.workers
    entries = [
        before[worker].model_copy(update={"ranks": format_ranks(ranks[plan_worker])})
        for worker, plan_worker in sorted(size.plan_workers.items())
    ]
    layout = size.plan.layout
    return placement.model_copy(
        update={
            "workers": entries,
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "data": layout.data,
            # Not known without the nodes' locations, until workers are placed again.
            "cost": "",
            "gap": "",
            "straddling_tensor_groups": 0,
            "straddling_replicas": 0,
        }
    )


def leave_draining_nodes(decision: Decision) -> None:
    """Continues without the replicas on draining nodes, if no other nodes are free for their workers."""
    observed = decision.observed
    if observed.elastic is None or observed.joining or observed.status.placement is None:
        return
    stay = [worker for worker in observed.workers if worker.state in LIVE and not worker.node_drain_reason]
    smaller = [plan for plan in observed.size_plans if plan.layout.data < sizing.current_size(observed)]
    for plan in (plan for plan in smaller if not plan.replanned):
        size = sizing.size_for(observed, plan, stay)
        if not size.new_workers:
            nodes = sorted({worker.node for worker in observed.workers if worker.node_drain_reason})
            more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
            which = f"{counted(len(nodes), 'node')} ({', '.join(nodes[:3])}{more})"
            shrink(decision, size, f"{which} must be left, and no other node is free for the workers there")
            return


def report_training(decision: Decision) -> None:
    """What an elastic job does while all its ranks train: it ends a resize, and grows if it may."""
    observed = decision.observed
    if observed.elastic is None or _run_ends(observed):
        return
    if observed.joining:
        if elastic_status(decision).next_placement is not None:  # it has not just ended
            _continue_growth(decision)
        return
    if decision.move is not None:
        return  # the workers leave their nodes first
    if is_true(observed.status.conditions, names.RESCALING):
        size = counted(sizing.current_size(observed), "replica")
        text = layout_text(observed.plan) if observed.plan.replanned else size
        decision.condition(names.RESCALING, False, "Rescaled", f"{text} in effect")
    sizes = sizing.sizes_to_grow(observed)
    if sizes and any(pod not in observed.stuck_pods for pod in observed.excess_pods):
        # A worker of the new size may have the index of one that ends: two pods of it must not live at once.
        decision.requeue_within(ENDING_SECONDS)
    elif sizes:
        decision.grow = Place((), {worker.index: worker.node for worker in observed.workers}, sizes)
    elif any(sizing.is_larger(plan, observed) for plan in observed.size_plans):
        decision.requeue_within(sizing.seconds_until_growth(observed) or None)


def apply_growth(decision: Decision, grant: Granted | NotGranted) -> None:
    """Begins a growth with the nodes that the scheduler granted: creates the pods of the new workers."""
    observed = decision.observed
    assert decision.grow is not None
    assert observed.elastic is not None
    elastic, moves = elastic_status(decision), decision.move is decision.grow
    if not moves:
        elastic.wanted_replicas = sizing.wanted(observed)
    if not isinstance(grant, Granted):
        if moves:
            leave_draining_nodes(decision)
        return
    size = size_of(decision.grow.sizes, grant.placement)
    assert size is not None
    placement = grant.placement.to_status(observed.name, incarnations_of(observed, size), size.plan_workers)
    record_incarnations(decision, placement)
    elastic.next_placement, elastic.growing_since = placement, format_time(observed.now)
    decision.create += list(size.new_workers)
    purpose = f"move {_leaving_text(decision)}" if moves else change_text(observed, size.plan)
    text = f"Starting {counted(len(size.new_workers), 'worker')} to {purpose}"
    reason = MOVING if moves else "Growing"
    decision.add_event(reason, sentences(text, capitalized(placement_text(placement))))
    decision.condition(names.RESCALING, True, reason, text)


def _leaving_text(decision: Decision) -> str:
    """Which workers leave which nodes after `decision`, as in `worker 1 off n5 (cordoned)`."""
    following = elastic_status(decision).next_placement
    after = {entry.worker for entry in following.workers} if following is not None else set()
    workers = [worker for worker in decision.observed.workers if worker.index not in after]
    moves = ", ".join(f"worker {w.index} off {w.node} ({w.node_drain_reason or 'drained'})" for w in workers[:3])
    return moves + (f" and {len(workers) - 3} more" if len(workers) > 3 else "")


def move_beside(decision: Decision, draining: Sequence[Worker]) -> None:
    """Asks for nodes for workers that replace those on draining nodes, and start beside the job.

    They take over the ranks of these workers, and the others keep theirs.
    """
    observed = decision.observed
    if observed.joining and sizing.moves(observed):
        return
    if observed.joining:
        abandon_growth(decision, "workers have to leave draining nodes", failed=False)
    if observed.excess_pods or observed.joining:
        decision.requeue_within(SHRINK_SECONDS)  # their nodes may be the ones to move to
        return
    if (seconds := sizing.seconds_until_retry(observed)) > 0:
        decision.requeue_within(seconds)
        return
    stay = [worker for worker in observed.workers if worker not in draining]
    size = sizing.size_in_place(observed, observed.plan, stay, beside=True)
    decision.move = decision.grow = Place((), {worker.index: worker.node for worker in stay}, (size,))


def _continue_growth(decision: Decision) -> None:
    """Starts the new workers together, and resizes the job once all of them are ready."""
    observed = decision.observed
    following, moves = sizing.state(observed).next_placement, sizing.moves(observed)
    assert following is not None
    plan, joining = plan_of(observed, following), observed.joining
    ended = [worker for worker in joining if worker.state in ENDED or worker.state is PodState.ENDING]
    if moves and not any(worker.node_drain_reason for worker in sizing.leaving(observed)):
        abandon_growth(decision, "their nodes do not drain any more", failed=False)
    elif plan is None:
        abandon_growth(decision, "the wanted size has changed", failed=False)
    elif ended:
        named = ", ".join(pod_name(observed.name, worker.index, worker.incarnation) for worker in ended[:3])
        abandon_growth(decision, f"pods have ended: {named}", failed=True)
    elif (problem := _problem(observed)) is not None:
        abandon_growth(decision, problem, failed=True)
    elif gated := [worker.pod for worker in joining if worker.pod is not None and worker.pod.gated]:
        decision.ungate += gated
    elif _ready(observed) and moves:
        apply_move(decision, following, _leaving_text(decision))
        return
    elif _ready(observed):
        apply_size(decision, plan, following, "the new workers are ready")
        return
    decision.requeue_within(15.0)


def take_over(decision: Decision) -> bool:
    """Continues with the workers that start beside the job, now that its generation has ended. Returns whether it does.

    They must be ready. In a move they need not, if only workers that they replace are lost: other pods would start
    later still. With `onLoss: Shrink` the job continues without them meanwhile.
    """
    observed = decision.observed
    take = _taking_over(decision) if usable(decision) else None
    if take is None:
        return False
    ending = sum(worker.state is PodState.ENDING for worker in observed.workers)
    if ending:
        # Until then its ranks save a checkpoint with the others.
        decision.starting(f"Waiting for {counted(ending, 'pod')} to terminate")
        decision.requeue_within(ENDING_SECONDS)
    else:
        take()
    return True


def _taking_over(decision: Decision) -> Callable[[], None] | None:
    """How the next generation uses the workers that start beside the job. None if it does not."""
    observed, following = decision.observed, sizing.state(decision.observed).next_placement
    plan = plan_of(observed, following) if following is not None else None
    if following is None or plan is None:
        return None
    lost = [worker for worker in observed.workers if worker.state not in LIVE or worker.node_down]
    holds = bool(observed.mesh.in_memory) and in_memory.goes_on(observed, decision.mesh.pending_cause)
    if holds and not lost:
        return None  # the ranks continue from their memory, in the same layout
    leaving = sizing.leaving(observed)
    if sizing.moves(observed):
        needed = any(worker in lost or worker.node_drain_reason for worker in leaving)
        all_start = lost and not sizing.shrinks_on_loss(observed) and all(worker in leaving for worker in lost)
        takes = needed and (_ready(observed) or all_start)
        return partial(_replace, decision, following, leaving, "Move") if takes else None
    live = [worker for worker in (*observed.workers, *observed.joining) if worker not in lost]
    larger = replace(observed, plan=plan, workers=live, status=with_placement(observed, following))
    size = sizing.size_for(larger, observed.plan, live)
    if lost and not size.new_workers and (_ready(observed) or not _continues_without(observed, lost)):
        return partial(_replace, decision, shrunk(following, size), lost, "Growth")
    if not _ready(observed):
        return None
    return None if holds else partial(apply_size, decision, plan, following, "the new workers are ready")


def _continues_without(observed: Observed, lost: Sequence[Worker]) -> bool:
    """Whether the job continues without workers that it has lost, or waits for pods that no scheduler has placed yet.

    Workers that start already are ready before these.
    """
    live = [worker for worker in observed.workers if worker not in lost]
    return not sizing.shrinks_on_loss(observed) or bool(sizing.smaller_sizes(observed, live))


def usable(decision: Decision) -> bool:
    """Whether the pods that start beside the job can be part of its next generation."""
    observed = decision.observed
    if restart_policy.cause_named(decision.mesh.pending_cause).replaces_gang:
        return False
    return _problem(observed) is None and all(
        worker.state in LIVE
        and not worker.node_down
        and not worker.node_rejection
        and not worker.node_drain_reason
        and worker.pod is not None
        and worker.pod.revision == observed.revision
        for worker in observed.joining
    )


def _replace(decision: Decision, placement: PlacementStatus, gone: Sequence[Worker], kind: str) -> None:
    """Continues in the same layout, in which workers that have started beside the job replace others."""
    use_placement(decision, placement)
    used = {entry.worker for entry in placement.workers}
    joined = [f"{worker.index} on {worker.node}" for worker in decision.observed.joining if worker.index in used]
    new, old = _listed("worker", joined), _listed("worker", [str(worker.index) for worker in gone])
    text = f"{capitalized(new)} {'replaces' if len(joined) == 1 else 'replace'} {old}"
    decision.add_event("WorkersReplaced", sentences(text, "The pods have started beside the job"))
    decision.condition(names.RESCALING, False, f"{kind}Ended", text)
    decision.starting(text)


def _listed(what: str, items: Sequence[str]) -> str:
    """Such as `workers 1, 2, 3 and 4 more`."""
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return f"{what}{'' if len(items) == 1 else 's'} {', '.join(items[:3])}{more}"


def with_placement(observed: Observed, placement: PlacementStatus) -> ParallelTrainingJobStatus:
    """The status of a job with this placement."""
    return observed.status.model_copy(update={"placement": placement})


def plan_of(observed: Observed, placement: PlacementStatus) -> Plan | None:
    """The plan of a placement, if the job may still have it."""
    return next((plan for plan in (*observed.size_plans, observed.plan) if _is_of(placement, plan)), None)


def _is_of(placement: PlacementStatus, plan: Plan) -> bool:
    """Whether a placement is of this plan."""
    layout = plan.layout
    degrees = (placement.tensor, placement.pipeline, placement.data)
    return degrees == (layout.tensor, layout.pipeline, layout.data) and len(plan.workers) == len(placement.workers)


def _ready(observed: Observed) -> bool:
    waiting = observed.agents.waiting_agents
    return all(
        worker.state is PodState.RUNNING
        and worker.pod is not None
        and worker.pod.address
        and worker.index in waiting
        and waiting[worker.index].incarnation == worker.incarnation
        and not waiting[worker.index].preparing
        for worker in observed.joining
    )


def _problem(observed: Observed) -> str | None:
    """Why the new workers will not be ready. None while they may be."""
    for pod in (worker.pod for worker in observed.joining):
        if pod is not None and pod.problem and observed.age(pod, 0.0) >= PROBLEM_SECONDS:
            return f"pod {pod.name}: {pod.problem}"
    if observed.audible_seconds(sizing.state(observed).growing_since) >= START_SECONDS:
        return f"they were not ready within {START_SECONDS:.0f} s"
    return None


def end(decision: Decision, why: str) -> None:
    """Ends whatever resize is under way, because the job keeps no pods: it is suspended, stopped or has finished."""
    if decision.status.elastic is not None and decision.status.elastic.next_placement is not None:
        abandon_growth(decision, why, failed=False)
    elif is_true(decision.status.conditions, names.RESCALING):
        decision.condition(names.RESCALING, False, "ResizeEnded", f"The job does not change its size, because {why}")


def forget_growth(decision: Decision) -> None:
    """Ends a growth whose pods are of an older revision. They are deleted with the other pods of it."""
    elastic = decision.status.elastic
    if elastic is not None and elastic.next_placement is not None:
        record_incarnations(decision, elastic.next_placement)
        elastic.next_placement, elastic.growing_since = None, None
        decision.condition(names.RESCALING, False, "GrowthEnded", "The job does not grow, because the spec has changed")


def abandon_growth(decision: Decision, why: str, *, failed: bool) -> None:
    """Ends a growth, and deletes its pods. After a failure, the job waits before it tries again."""
    observed, elastic = decision.observed, elastic_status(decision)
    what, kind = ("move workers", "Move") if sizing.moves(observed) else ("grow", "Growth")
    elastic.next_placement, elastic.growing_since = None, None
    decision.delete += [w.pod for w in observed.joining if w.pod is not None and not w.pod.deleting]
    if failed:
        elastic.attempts += 1
        pause = sizing.retry_pause(elastic.attempts)
        elastic.retry_time = format_time(observed.now + timedelta(seconds=pause))
        text = f"The job did not {what}, because {why}. Retrying at {elastic.retry_time}"
        decision.add_event(f"{kind}Failed", text, WARNING)
        decision.requeue_within(pause)
    else:
        text = f"The job does not {what}, because {why}"
        decision.add_event(f"{kind}Ended", text)
    decision.condition(names.RESCALING, False, f"{kind}Ended", text)
