"""Admission of edits that restart a running gang: a trial placement must show that the edit fits.

The trial counts the resources of the gang's own pods as free, because they are deleted first. When the edit fits, the
job is queued at once, so that no other job can take the GPUs that its pods release. If it does not fit, the gang keeps
running.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.api.objects import KubeObject
from meshwright.planner.plan import Plan
from meshwright_operator.decide.conditions import BlockedEdit
from meshwright_operator.decide.mesh_generation import uses_external_scheduler
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.placement_outcome import RETRY_PLACEMENT_SECONDS
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.scheduling.job_queue import PlacementRequest
from meshwright_operator.scheduling.scheduler import JobScheduler
from meshwright_operator.timestamps import format_time, seconds_since

DOES_NOT_FIT = "EditDoesNotFit"


@dataclass(frozen=True, slots=True)
class _Trial:
    revision: str
    at: str
    problem: str


class EditAdmission:
    """Admits edits that fit. Remembers failed trials for some seconds, so that they are not repeated too often."""

    def __init__(self, scheduler: JobScheduler) -> None:
        self._scheduler = scheduler
        self._trials: dict[str, _Trial] = {}

    async def admit(self, key: JobKey, job: KubeObject, observed: Observed) -> Observed:
        """The job with its edit, or with its applied spec if the edit does not fit.

        Raises:
            ApiError: Foreign pods could not be listed.
        """
        running = observed.fallback
        if running is None or observed.spec.suspend or uses_external_scheduler(observed):
            self._trials.pop(observed.uid, None)
            return observed
        if all(pod.deleting for pod in running.live_pods):
            self._trials.pop(observed.uid, None)
            return observed
        result = await self._try_placement(key, job, observed)
        if isinstance(result, Plan):
            return replace(observed, plan=result)
        return replace(running, blocked_edit=BlockedEdit(DOES_NOT_FIT, result, retryable=True))

    def forget(self, uid: str) -> None:
        """Drops the state of a deleted job."""
        self._trials.pop(uid, None)

    async def _try_placement(self, key: JobKey, job: KubeObject, observed: Observed) -> Plan | str:
        """The plan with which the edit fits, or the reason why it does not."""
        last = self._trials.get(observed.uid)
        fresh = last is not None and seconds_since(last.at, observed.now) < RETRY_PLACEMENT_SECONDS
        if last is not None and fresh and last.revision == observed.revision:
            return last.problem
        request = PlacementRequest.of(key, job, observed, since=observed.now, restarts=True)
        result = await self._scheduler.try_edit(request)
        if isinstance(result, str):
            self._trials[observed.uid] = _Trial(observed.revision, format_time(observed.now), result)
        else:
            self._trials.pop(observed.uid, None)
        return result
