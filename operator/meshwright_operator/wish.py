"""What a job asks of the placer, from what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from meshwright.planner.placement import Before
from meshwright.planner.pricing import Calibration
from meshwright_operator.cache import JobKey, Object
from meshwright_operator.decide.observed import Observed
from meshwright_operator.line import Waiting


def wish_of(
    key: JobKey,
    job: Object,
    observed: Observed,
    calibration: Calibration,
    *,
    since: datetime,
    restarts: bool,
    keep: Mapping[int, str] | None = None,
) -> Waiting:
    """The job's wish for nodes.

    Args:
        key: the job.
        job: its object.
        observed: the job as it is to run.
        calibration: what was learnt about the cluster's GPUs.
        since: since when it waits.
        restarts: whether its own pods give way to the new ones.
        keep: workers that stay.
    """
    return Waiting(
        key=key,
        uid=observed.uid,
        plan=observed.plan,
        others=observed.other_plans,
        spec=observed.spec,
        created=str(job["metadata"].get("creationTimestamp") or ""),
        since=since,
        asked=observed.now,
        keep=keep or {},
        restarts=restarts,
        calibration=calibration,
        before=Before.of_status(observed.status.placement),
    )
