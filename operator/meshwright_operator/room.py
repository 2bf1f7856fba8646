"""Asking for room on behalf of one job: the line, the placement, and what either does to the decision."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from meshwright.api import conditions as names
from meshwright.api.conditions import find
from meshwright.planner.choose import map_plan
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.pricing import pricer_for
from meshwright_operator.cache import JobKey
from meshwright_operator.clock import parse_time
from meshwright_operator.decide import handover
from meshwright_operator.decide import placement as decisions
from meshwright_operator.decide.draft import Draft
from meshwright_operator.decide.placement import RETRY_PLACEMENT_SECONDS
from meshwright_operator.decide.recovery import SPEC_CHANGED
from meshwright_operator.line import Waiting
from meshwright_operator.placing import Placer, TurnError
from meshwright_operator.wish import wish_of
from meshwright_operator.words import with_remarks

Object = dict[str, Any]

WOKEN = 4
"""How many of the line look again once somebody got a place: those behind wait for them in any case."""


class Room:
    """Finds room for decisions that ask for it. Call `find` and `move` with the placer's lock held."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer

    async def find(self, key: JobKey, job: Object, draft: Draft) -> list[JobKey]:
        """Places the workers of `draft.place`, or says why not; the jobs that should look again now.

        Raises:
            ApiError: the pods could not be listed.
        """
        assert draft.place is not None
        wish = self._wish(key, job, draft, draft.place.keep)
        line = self._placer.line
        try:
            found = await self._placer.place(wish)
        except DoesNotFitError as error:
            line.join(wish)
            message = with_remarks(str(error), self._placer.warnings)
            decisions.not_placed(draft, message, error.because_of_kept)
            return []
        except TurnError as error:
            line.join(wish)
            decisions.not_placed(draft, str(error), because_of_kept=False, yields=True)
            return [error.ahead]
        line.leave(wish.uid)
        decisions.placed(draft, found, self._placer.warnings)
        self._placer.promise(wish, found, draft.create)
        return line.next_up(WOKEN)

    async def move(self, key: JobKey, job: Object, draft: Draft) -> None:
        """Lets the workers of `draft.move` leave their nodes if there is room for them elsewhere.

        Raises:
            ApiError: the pods could not be listed.
        """
        assert draft.move is not None
        wish = self._wish(key, job, draft, draft.move.keep)
        if await self._placer.fits_elsewhere(wish):
            decisions.moved(draft)

    async def map(self, draft: Draft) -> None:
        """Maps ranks onto the nodes that another scheduler gave. Needs no lock: nobody's room changes."""
        assert draft.map is not None
        observed = draft.observed
        inventory, plan = self._placer.nodes(observed.spec), observed.plan
        pricer = pricer_for(observed.spec, plan.architecture, inventory, self._placer.calibration)
        try:
            found, slots = await asyncio.to_thread(map_plan, plan, inventory, pricer, draft.map.pods, draft.map.stay)
        except ValueError as error:  # a node that was given is gone again: its pod goes next
            draft.starting(str(error))
            draft.map = None
            draft.again_in(RETRY_PLACEMENT_SECONDS)
            return
        handover.mapped(draft, found, slots)

    def _wish(self, key: JobKey, job: Object, draft: Draft, keep: Mapping[int, str]) -> Waiting:
        observed = draft.observed
        placed = find(observed.status.conditions, names.PLACED)
        since = parse_time(placed.last_transition_time) if placed is not None and placed.status == "False" else None
        restarts = draft.mesh.pending_cause == SPEC_CHANGED
        calibration = self._placer.calibration
        return wish_of(key, job, observed, calibration, since=since or observed.now, restarts=restarts, keep=keep)
