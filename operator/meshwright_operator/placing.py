"""Placing one job at a time: the one lock over all jobs, what every pod holds, the planner's choice.

What a job was given is promised to it until its pods are made, so that no two jobs get the same GPUs: from then on the
pods themselves, gated but pinned, hold the room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.inventory import Inventory
from meshwright.planner.placement import Placement, with_spares
from meshwright.planner.pricing import Calibration
from meshwright_operator.cache import Cache
from meshwright_operator.census import Census
from meshwright_operator.claims import Claim, ask_for, held
from meshwright_operator.cluster import Cluster
from meshwright_operator.freeing import advice, holders
from meshwright_operator.inventories import Inventories, wishes_of
from meshwright_operator.line import Line, Waiting, enough, nodes_for, placement_for, turn, without
from meshwright_operator.metrics import OperatorMetrics
from meshwright_operator.spares import Kept, kept_free, off_limits

AVOID_SECONDS = 900.0
"""How long a job keeps off a node that did not take its pod: what was in the way may be gone by then."""


class TurnError(Exception):
    """There is room, but a job ahead in the line fits it too and goes first."""

    def __init__(self, ahead: Waiting) -> None:
        super().__init__(f"there is room, but job {ahead.key} is ahead in the line and fits it too")
        self.ahead = ahead.key


class Placer:
    """Finds nodes for workers, and keeps the line of jobs for which there are none."""

    def __init__(self, cluster: Cluster, cache: Cache, metrics: OperatorMetrics, namespaces: Sequence[str]) -> None:
        self._cache = cache
        self._census = Census(cluster, cache, namespaces)
        self._inventories = Inventories(cache)
        self._metrics = metrics
        self.lock = asyncio.Lock()
        """Held while a job is placed."""
        self.line = Line()
        self.calibration = Calibration()
        """What running jobs taught about this cluster's GPUs; plans are made with it."""
        self.warnings: tuple[str, ...] = ()
        """What was strange about the nodes and pods that the last placement saw; read it with the lock held."""
        self._avoided: dict[str, dict[str, tuple[float, str]]] = {}
        self._promised: dict[str, list[Claim]] = {}
        self._spared: dict[str, Kept] = {}
        """Spares of those that were promised something: their pods do not hold them yet."""

    def nodes(self, spec: ParallelTrainingJobSpec) -> Inventory:
        """The nodes as the job sees them, as if nothing ran on them: enough to plan."""
        return self._inventories.empty(spec)

    def refusals(self, spec: ParallelTrainingJobSpec, names: Iterable[str]) -> Mapping[str, str]:
        """Of these nodes, those that take no pod of the job (any more), and why."""
        nodes = self._inventories.empty(spec).nodes
        found = (nodes[name] for name in sorted(set(names)) if name in nodes)
        return {node.name: node.unusable for node in found if node.unusable and node.capacity.gpus}

    async def place(self, wish: Waiting) -> Placement:
        """A node for every worker; those in `wish.keep` stay. Call it with the lock held.

        Raises:
            DoesNotFitError: there is no room now; the text says what is short and what would have to end.
            TurnError: there is, but a job ahead in the line gets it.
            ApiError: the pods of others could not be listed.
        """
        started = time.monotonic()
        result = "error"
        try:
            claims = await self._census.claims()
            claims += [claim for promised in self._promised.values() for claim in promised]
            ahead = self.line.ahead_of(wish)
            avoided = {waiting.uid: self.avoided(waiting.uid) for waiting in (wish, *ahead)}
            empty = {waiting.uid: self._inventories.empty(waiting.spec) for waiting in (wish, *ahead)}
            view = _View(avoided, empty, claims, [*kept_free(self._cache), *self._spared.values()])
            result = "no_room"
            try:
                placement = await asyncio.to_thread(view.place, wish, ahead)
            finally:
                self.warnings = view.warnings
            result = "placed"
            self._metrics.placement_cost.observe(placement.cost)
            return placement
        finally:
            self._metrics.placement_attempts.labels(result).inc()
            self._metrics.placement_seconds.observe(time.monotonic() - started)

    def promise(self, wish: Waiting, placement: Placement, workers: Iterable[int]) -> None:
        """Keeps for the job what these workers were given, until `fulfilled`. Call it with the lock held."""
        ask = ask_for(wish.plan.worker_request, wish.spec.workers.gpu_resource)
        name, namespace = wish.key.name, wish.key.namespace
        self._spared[wish.uid] = Kept.by(wish.key, wish.uid, placement.spares)
        self._promised[wish.uid] = [
            Claim(f"{name}-w{worker}", namespace, placement.nodes[worker], ask, name, wish.uid) for worker in workers
        ]

    def fulfilled(self, uid: str) -> None:
        """The job's pods are made and hold their room themselves, or they will be placed anew."""
        self._promised.pop(uid, None)
        self._spared.pop(uid, None)

    async def fits_elsewhere(self, wish: Waiting) -> bool:
        """Whether the workers that are not in `wish.keep` find other nodes, without taking anybody's turn."""
        try:
            await self.place(wish)
        except (DoesNotFitError, TurnError):
            return False
        return True

    def avoid(self, uid: str, nodes: Mapping[str, str]) -> None:
        """Keeps this job (its uid) off these nodes (name -> why) for a while."""
        if not nodes:
            return
        until = time.monotonic() + AVOID_SECONDS
        self._avoided.setdefault(uid, {}).update({name: (until, why) for name, why in nodes.items()})

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self.line.leave(uid)
        self._avoided.pop(uid, None)
        self.fulfilled(uid)

    def avoided(self, uid: str) -> dict[str, str]:
        """Node -> why this job keeps off it now."""
        now = time.monotonic()
        kept = {name: entry for name, entry in self._avoided.get(uid, {}).items() if entry[0] > now}
        if uid in self._avoided:
            self._avoided[uid] = kept
        return {name: why for name, (_, why) in kept.items()}


class _View:
    """Nodes and pods at one moment, as each job that is asked about sees them. Runs in a thread: it may take long."""

    def __init__(
        self,
        avoided: Mapping[str, Mapping[str, str]],
        empty: Mapping[str, Inventory],
        claims: Sequence[Claim],
        kept: Sequence[Kept],
    ) -> None:
        self._kept = kept
        self._avoided = avoided
        self._empty = empty
        self._claims = claims
        self._known: dict[tuple[object, ...], Inventory] = {}
        self.warnings: tuple[str, ...] = ()
        """What was strange, as the job that was placed sees it."""

    def place(self, wish: Waiting, ahead: Sequence[Waiting]) -> Placement:
        """Nodes for the job's workers, unless they are somebody's ahead.

        Raises:
            DoesNotFitError, TurnError: as `Placer.place`.
        """
        if wish.restarts:
            # They go first, and the room is then anybody's: a job ahead would take it.
            self._claims = [claim for claim in self._claims if claim.job_uid != wish.uid]
        left = turn(ahead, wish.asked, self._free, self._whole)
        own = self._free(wish)
        self.warnings = own.warnings
        try:
            rest = without(own, left.reserved)
            return with_spares(placement_for(wish, rest), rest, wish.spec.recovery.spare_nodes)
        except DoesNotFitError as error:
            if left.yield_to is not None and nodes_for(wish, own):
                raise TurnError(left.yield_to) from None
            found = holders(self._claims, wish.spec.workers.gpu_resource, wish.uid)
            hint = advice(found, own, lambda freed: any(enough(plan, freed) for plan in wish.plans))
            line = f"{len(ahead)} {'job is' if len(ahead) == 1 else 'jobs are'} ahead in the line" if ahead else ""
            error.args = ("; ".join(part for part in (str(error), hint, line) if part),)
            raise

    def _free(self, waiting: Waiting) -> Inventory:
        holding = waiting.uid if waiting.holds else ""
        found = self._inventory(waiting, "free", holding)
        return without(found, {**off_limits(self._kept, waiting.uid), **self._avoided[waiting.uid]})

    def _whole(self, waiting: Waiting) -> Inventory:
        return self._inventory(waiting, "whole", "")

    def _inventory(self, waiting: Waiting, kind: str, uid: str) -> Inventory:
        """The nodes with what pods hold on them: of all but the job `uid`, or (`whole`) of those of no job."""
        key = (kind, uid, wishes_of(waiting.spec))
        if key not in self._known:
            if kind == "whole":
                counted = [claim for claim in self._claims if not claim.job_uid]
            else:
                counted = [claim for claim in self._claims if not uid or claim.job_uid != uid]
            used, strange = held(counted, waiting.spec.workers.gpu_resource)
            self._known[key] = self._empty[waiting.uid].holding(used, strange)
        return self._known[key]
