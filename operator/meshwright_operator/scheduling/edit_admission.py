"""Whether an edit that restarts a running gang may begin: not before a trial placement has shown that it fits.

The trial counts the gang's own pods as gone, since they go first. When it fits, the job stands in the line at once, so
that what its pods give back is not another job's before the new ones are made. When it does not fit the gang goes on.
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
    """Remembers, for people's and the API server's sake only, when an edit was last tried in vain."""

    def __init__(self, scheduler: JobScheduler) -> None:
        self._scheduler = scheduler
        self._trials: dict[str, _Trial] = {}

    async def admit(self, key: JobKey, job: KubeObject, observed: Observed) -> Observed:
        """The job as it is to be acted on: with its edit, or as it runs while there is no room for that.

        Raises:
            ApiError: the pods could not be listed.
        """
        running = observed.fallback
        if running is None or observed.spec.suspend or uses_external_scheduler(observed):
            self._trials.pop(observed.uid, None)
            return observed
        if all(pod.deleting for pod in running.live_pods):
            self._trials.pop(observed.uid, None)
            return observed
        found = await self._try_placement(key, job, observed)
        if isinstance(found, Plan):
            return replace(observed, plan=found)
        return replace(
            running, blocked_edit=BlockedEdit(DOES_NOT_FIT, f"the edit does not fit: {found}", retryable=True)
        )

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._trials.pop(uid, None)

    async def _try_placement(self, key: JobKey, job: KubeObject, observed: Observed) -> Plan | str:
        """The plan with which the edit fits, or why none does."""
        last = self._trials.get(observed.uid)
        fresh = last is not None and seconds_since(last.at, observed.now) < RETRY_PLACEMENT_SECONDS
        if last is not None and fresh and last.revision == observed.revision:
            return last.problem
        request = PlacementRequest.of(key, job, observed, since=observed.now, restarts=True)
        found = await self._scheduler.try_edit(request)
        if isinstance(found, str):
            self._trials[observed.uid] = _Trial(observed.revision, format_time(observed.now), found)
        else:
            self._trials.pop(observed.uid, None)
        return found
