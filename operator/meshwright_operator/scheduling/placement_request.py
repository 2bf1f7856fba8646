"""What a job asks of the placer, from what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from meshwright.planner.cost_model import Calibration
from meshwright.planner.placement import PreviousPlacement
from meshwright_operator.decide.observed import Observed
from meshwright_operator.kube.cache import JobKey, Object
from meshwright_operator.scheduling.job_queue import PlacementRequest


def placement_request_of(
    key: JobKey,
    job: Object,
    observed: Observed,
    calibration: Calibration,
    *,
    since: datetime,
    restarts: bool,
    assigned_nodes: Mapping[int, str] | None = None,
) -> PlacementRequest:
    """The job's wish for nodes.

    Args:
        key: the job.
        job: its object.
        observed: the job as it is to run.
        calibration: what was learnt about the cluster's GPUs.
        since: since when it waits.
        restarts: whether its own pods give way to the new ones.
        assigned_nodes: workers that stay.
    """
    return PlacementRequest(
        key=key,
        uid=observed.uid,
        plan=observed.plan,
        other_plans=observed.other_plans,
        spec=observed.spec,
        created=str(job["metadata"].get("creationTimestamp") or ""),
        since=since,
        requested_at=observed.now,
        assigned_nodes=assigned_nodes or {},
        restarts=restarts,
        calibration=calibration,
        previous=PreviousPlacement.of_status(observed.status.placement),
    )
