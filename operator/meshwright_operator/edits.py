"""Whether an edit that restarts a running gang may begin: not before a trial placement has shown that it fits.

The trial counts the gang's own pods as gone, since they go first. When it fits, the job stands in the line at once, so
that what its pods give back is not another job's before the new ones are made. When it does not fit the gang goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.planner.errors import DoesNotFitError
from meshwright_operator.cache import JobKey, Object
from meshwright_operator.clock import format_time, seconds_since
from meshwright_operator.decide.held import Held
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.placement import RETRY_PLACEMENT_SECONDS
from meshwright_operator.line import Waiting
from meshwright_operator.placing import Placer, TurnError

DOES_NOT_FIT = "EditDoesNotFit"


@dataclass(frozen=True, slots=True)
class _Trial:
    revision: str
    at: str
    problem: str


class Edits:
    """Remembers, for people's and the API server's sake only, when an edit was last tried in vain."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._trials: dict[str, _Trial] = {}

    async def admit(self, key: JobKey, job: Object, observed: Observed) -> Observed:
        """The job as it is to be acted on: with its edit, or as it runs while there is no room for that.

        Raises:
            ApiError: the pods could not be listed.
        """
        running = observed.fallback
        if running is None or observed.spec.suspend or all(pod.deleting for pod in running.live_pods):
            self._trials.pop(observed.uid, None)
            return observed
        problem = await self._problem(key, job, observed)
        if not problem:
            return observed
        return replace(running, held=Held(DOES_NOT_FIT, f"the edit does not fit: {problem}", waits=True))

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._trials.pop(uid, None)

    async def _problem(self, key: JobKey, job: Object, observed: Observed) -> str:
        last = self._trials.get(observed.uid)
        fresh = last is not None and seconds_since(last.at, observed.now) < RETRY_PLACEMENT_SECONDS
        if last is not None and fresh and last.revision == observed.revision:
            return last.problem
        wish = Waiting(
            key=key,
            uid=observed.uid,
            plan=observed.plan,
            spec=observed.spec,
            created=str(job["metadata"].get("creationTimestamp") or ""),
            since=observed.now,
            asked=observed.now,
            restarts=True,
        )
        async with self._placer.lock:
            try:
                await self._placer.place(wish)
            except (DoesNotFitError, TurnError) as error:
                self._trials[observed.uid] = _Trial(observed.revision, format_time(observed.now), str(error))
                return str(error)
            self._placer.line.join(wish)
        self._trials.pop(observed.uid, None)
        return ""
