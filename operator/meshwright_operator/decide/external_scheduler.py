"""What becomes of the job while another scheduler decides where its pods go, and once it has decided."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.api import conditions as names
from meshwright.api.names import pod_name
from meshwright.api.status import PlacementStatus, WorkerPlacement
from meshwright.planner.placement import Placement
from meshwright_operator.decide import lifecycle
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.gang import WAITS_FOR_SCHEDULER, Place
from meshwright_operator.decide.placement_outcome import new_incarnations, placement_text
from meshwright_operator.text import counted, with_warnings


def create_unbound_pods(decision: Decision, step: Place) -> None:
    """Pods without a node for the workers that have none: where they go, and so what they run, is told later."""
    observed, status = decision.observed, decision.status
    incarnations = new_incarnations(decision, step.workers)
    new = {worker.index for worker in step.workers}
    known = {entry.worker: entry for entry in (status.placement.workers if status.placement else [])}
    workers = [
        known[worker.index]
        if worker.index in known and worker.index not in new
        else _unbound_worker(observed.name, worker.index, incarnations[worker.index])
        for worker in observed.workers
    ]
    layout = observed.plan.layout
    status.placement = PlacementStatus(
        workers=workers, tensor=layout.tensor, pipeline=layout.pipeline, data=layout.data
    )
    decision.create += sorted(new)
    lifecycle.begin(status, observed.now)
    pods = counted(len(new), "pod")
    text = f"scheduler {observed.spec.workers.scheduler_name} is to find nodes for {pods}"
    decision.condition(names.PLACED, False, WAITS_FOR_SCHEDULER, text)
    decision.add_event(WAITS_FOR_SCHEDULER, text)
    decision.starting(f"making {pods}")


def ranks_mapped(decision: Decision, placement: Placement, slots: Mapping[int, int]) -> None:
    """Takes the map of ranks onto the nodes that the other scheduler gave; nobody is told of ranks before that.

    Args:
        decision: the decision so far.
        placement: where the plan's workers are.
        slots: pod's worker index -> worker of the plan.
    """
    observed, status = decision.observed, decision.status
    if not observed.mesh.generation:
        status.plan = placement.plan.to_status()
        status.plan.revision = observed.revision
    incarnations = {worker.index: worker.incarnation for worker in observed.workers}
    status.placement = placement.to_status(observed.name, incarnations, slots)
    text = placement_text(status.placement)
    decision.condition(names.PLACED, True, "Placed", with_warnings(text, placement.notes))
    decision.add_event("RanksMapped", f"scheduler {observed.spec.workers.scheduler_name} placed {text}")
    decision.starting("ranks are mapped onto the nodes")


def _unbound_worker(job: str, worker: int, incarnation: int) -> WorkerPlacement:
    return WorkerPlacement(
        worker=worker, incarnation=incarnation, pod=pod_name(job, worker, incarnation), node="", ranks=""
    )
