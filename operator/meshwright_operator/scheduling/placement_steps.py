"""Asking for room on behalf of one job: the line, the placement, and what either does to the decision."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from meshwright.api import conditions as names
from meshwright.api.conditions import find
from meshwright.planner.cost_model import cost_model_for
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.plan_and_place import map_plan_ranks
from meshwright_operator.decide import external_scheduler
from meshwright_operator.decide import placement_outcome as decisions
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.placement_outcome import RETRY_PLACEMENT_SECONDS
from meshwright_operator.decide.restart_policy import SPEC_CHANGED
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.scheduling.job_queue import PlacementRequest
from meshwright_operator.scheduling.placement_request import placement_request_of
from meshwright_operator.scheduling.scheduler import JobScheduler, WaitsForTurnError
from meshwright_operator.text import with_warnings
from meshwright_operator.timestamps import parse_time

Object = dict[str, Any]

WAKE_COUNT = 4
"""How many of the line look again once somebody got a place: those behind wait for them in any case."""


class PlacementSteps:
    """Finds room for decisions that ask for it. Call `find` and `move` with the placer's lock held."""

    def __init__(self, scheduler: JobScheduler) -> None:
        self._scheduler = scheduler

    async def find(self, key: JobKey, job: Object, decision: Decision) -> list[JobKey]:
        """Places the workers of `decision.place`, or says why not; the jobs that should look again now.

        Raises:
            ApiError: the pods could not be listed.
        """
        assert decision.place is not None
        request = self._request(key, job, decision, decision.place.assigned_nodes)
        job_queue = self._scheduler.job_queue
        try:
            found = await self._scheduler.place(request)
        except DoesNotFitError as error:
            job_queue.add(request)
            message = with_warnings(str(error), self._scheduler.warnings)
            decisions.not_placed(decision, message, error.blocked_by_kept_workers)
            return []
        except WaitsForTurnError as error:
            job_queue.add(request)
            decisions.not_placed(decision, str(error), blocked_by_kept_workers=False, waits_for_turn=True)
            return [error.ahead]
        job_queue.remove(request.uid)
        decisions.placed(decision, found, self._scheduler.warnings)
        self._scheduler.assume(request, found, decision.create)
        return job_queue.head(WAKE_COUNT)

    async def move(self, key: JobKey, job: Object, decision: Decision) -> None:
        """Lets the workers of `decision.move` leave their nodes if there is room for them elsewhere.

        Raises:
            ApiError: the pods could not be listed.
        """
        assert decision.move is not None
        request = self._request(key, job, decision, decision.move.assigned_nodes)
        if await self._scheduler.fits_elsewhere(request):
            decisions.moved(decision)

    async def map_ranks(self, decision: Decision) -> None:
        """Maps ranks onto the nodes that another scheduler gave. Needs no lock: nobody's room changes."""
        assert decision.map_ranks is not None
        observed = decision.observed
        inventory, plan = self._scheduler.nodes(observed.spec), observed.plan
        cost_model = cost_model_for(observed.spec, plan.architecture, inventory, self._scheduler.calibration)
        try:
            found, slots = await asyncio.to_thread(
                map_plan_ranks, plan, inventory, cost_model, decision.map_ranks.pods, decision.map_ranks.assigned_slots
            )
        except ValueError as error:  # a node that was given is gone again: its pod goes next
            decision.starting(str(error))
            decision.map_ranks = None
            decision.requeue_within(RETRY_PLACEMENT_SECONDS)
            return
        external_scheduler.ranks_mapped(decision, found, slots)

    def _request(
        self, key: JobKey, job: Object, decision: Decision, assigned_nodes: Mapping[int, str]
    ) -> PlacementRequest:
        observed = decision.observed
        placed = find(observed.status.conditions, names.PLACED)
        since = parse_time(placed.last_transition_time) if placed is not None and placed.status == "False" else None
        restarts = decision.mesh.pending_cause == SPEC_CHANGED.name
        calibration = self._scheduler.calibration
        return placement_request_of(
            key,
            job,
            observed,
            calibration,
            since=since or observed.now,
            restarts=restarts,
            assigned_nodes=assigned_nodes,
        )
