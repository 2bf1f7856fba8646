"""Which ranks each worker runs.

Of a job that the operator places, those of its index. Where another scheduler decides (`workers.schedulerName`) that is
known only once all pods are bound, and stands in `status.placement`: pods are alike until then.
"""

from __future__ import annotations

from meshwright.api.rank_ranges import parse_ranks
from meshwright_operator.decide.observed import Observed


def uses_external_scheduler(observed: Observed) -> bool:
    """Whether another scheduler decides where the job's pods go."""
    return observed.spec.workers.scheduler_name is not None


def slots(observed: Observed) -> dict[int, int]:
    """Worker -> which of the plan's workers it is; those that are not known yet are left out."""
    if not uses_external_scheduler(observed):
        return {worker.index: worker.index for worker in observed.workers}
    placement = observed.status.placement
    entries = {entry.worker: entry for entry in placement.workers} if placement is not None else {}
    first = {ranks.start: slot for slot, ranks in enumerate(observed.plan.workers)}
    found: dict[int, int] = {}
    for worker in observed.workers:
        entry = entries.get(worker.index)
        if entry is None or (entry.incarnation, entry.node) != (worker.incarnation, worker.node):
            continue
        ranks = parse_ranks(entry.ranks)
        slot = first.get(ranks.start) if ranks is not None else None
        if slot is not None and slot not in found.values():
            found[worker.index] = slot
    return found


def rank_zero_worker(observed: Observed) -> int:
    """The worker that runs rank 0."""
    return next((worker for worker, slot in slots(observed).items() if slot == 0), 0)
