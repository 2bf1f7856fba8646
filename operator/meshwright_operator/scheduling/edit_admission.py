"""Admission of edits that restart a running gang: a trial placement must show that the edit fits.

The trial counts the resources of the gang's own pods as free, because they are deleted first. When the edit fits, the
job is queued at once, so that no other job can take the GPUs that its pods release. If it does not fit, the gang keeps
running, and the placer tries the edit again whenever capacity became free.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.api.objects import KubeObject
from meshwright.planner.plan import Plan
from meshwright_operator.decide import sizing
from meshwright_operator.decide.conditions import BlockedEdit
from meshwright_operator.decide.mesh_generation import uses_external_scheduler
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.placement_outcome import NotGranted
from meshwright_operator.decide.waiting_edit import has_waited
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.scheduling.job_queue import PlacementRequest
from meshwright_operator.scheduling.scheduler import JobScheduler
from meshwright_operator.text import sentences

DOES_NOT_FIT = "EditDoesNotFit"


class EditAdmission:
    """Admits edits that fit."""

    def __init__(self, scheduler: JobScheduler) -> None:
        self._scheduler = scheduler

    async def admit(self, key: JobKey, job: KubeObject, observed: Observed) -> Observed:
        """The job with its edit, or with its applied spec if the edit does not fit.

        Raises:
            ApiError: Foreign pods could not be listed.
        """
        running = observed.fallback
        if (
            running is None
            or observed.spec.suspend
            or uses_external_scheduler(observed)
            or all(pod.deleting for pod in running.live_pods)
        ):
            self._scheduler.withdraw_edit(observed.uid)
            return observed
        sizes = sizing.sizes_of_edit(observed)
        request = PlacementRequest.of(key, job, observed, since=observed.now, restarts=True, sizes=sizes)
        result = await self._scheduler.try_edit(request)
        if isinstance(result, Plan):
            return sizing.with_plan(observed, result)
        reason = result.reason or DOES_NOT_FIT
        # The placer wakes the job when the edit fits.
        blocked = BlockedEdit(reason, _message(result), retryable=True, retry_seconds=result.retry_seconds)
        return replace(running, blocked_edit=blocked, waiting_edit=has_waited(running, observed))


def _message(answer: NotGranted) -> str:
    if answer.waits_for_turn:
        return sentences("The edit waits for its turn", answer.message)
    return f"The edit does not fit: {answer.message}"
