"""One job, brought one step closer to what its spec says. The steps stand in their order.

Nothing in memory is truth: a reconcile starts from the cache and from status, and whatever it does next it has first
written to status. Killed at any line, the next run converges: generation and incarnations are persisted before anybody
is told of them, pods have names that are functions of what is persisted, and every action may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from meshwright.api.conditions import READY, SUSPENDED, is_true
from meshwright.api.job import parse_status
from meshwright_operator import logs
from meshwright_operator.actions import Actions, ForeignObjectError, PodsRefusedError
from meshwright_operator.cache import Cache, JobKey
from meshwright_operator.chronicle import Chronicle
from meshwright_operator.clock import seconds_since, utc_now
from meshwright_operator.cluster import ApiError, Cluster, jobs_path
from meshwright_operator.coordinator.board import Board
from meshwright_operator.coordinator.server import Coordinator
from meshwright_operator.decide import decision, lifecycle, undecided
from meshwright_operator.decide.draft import Draft
from meshwright_operator.decide.mesh import document
from meshwright_operator.decide.observed import Observed, Refusal, WorkerState
from meshwright_operator.decide.placement import RETRY_PLACEMENT_SECONDS
from meshwright_operator.decide.ranks import leader, placed_elsewhere
from meshwright_operator.decide.recovery import SPEC_CHANGED
from meshwright_operator.edits import Edits
from meshwright_operator.events import WARNING, EventRecorder, Note
from meshwright_operator.job_metrics import JobsCollector
from meshwright_operator.manifests.pods import PodContext
from meshwright_operator.metrics import OperatorMetrics
from meshwright_operator.placing import Placer
from meshwright_operator.room import Room
from meshwright_operator.status_writer import StaleError, StatusRefusedError, StatusWriter
from meshwright_operator.tokens import Tokens
from meshwright_operator.understanding import RefusedError, managed_here, suspended_by_user, understand
from meshwright_operator.workqueue import WorkQueue

Object = dict[str, Any]


class Reconciler:
    """Everything one reconcile needs, and what is remembered between two of them for people only."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        queue: WorkQueue[JobKey],
        coordinator: Coordinator,
        tokens: Tokens,
        events: EventRecorder,
        metrics: OperatorMetrics,
        jobs: JobsCollector,
        placer: Placer,
        coordinator_url: Callable[[], str],
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._queue = queue
        self._coordinator = coordinator
        self._tokens = tokens
        self._events = events
        self._metrics = metrics
        self._jobs = jobs
        self._placer = placer
        self._coordinator_url = coordinator_url
        self._now = now
        self._actions = Actions(cluster, cache, metrics)
        self._writer = StatusWriter(cluster, cache, queue)
        self._room = Room(placer)
        self._edits = Edits(placer)
        self._refusals: dict[str, Refusal] = {}
        self._uids: dict[JobKey, str] = {}
        self._chronicles: dict[str, Chronicle] = {}
        self._untold: dict[str, str] = {}
        """What was told by an event alone, by uid: the status could not be written."""

    async def __call__(self, key: JobKey) -> None:
        """Reconciles one job; what it raises makes the queue try again later."""
        started = time.monotonic()
        result = "error"
        generation = self._cache.jobs.get(key, {}).get("metadata", {}).get("generation")
        try:
            with logs.about(job=str(key), generation=generation):
                await self._reconcile(key)
            result = "ok"
        except StaleError:
            result = "stale"
            self._queue.add(key)
        except Exception as error:
            self._metrics.reconcile_errors.labels(type(error).__name__).inc()
            await self._tell(key, error)
            raise
        finally:
            self._metrics.reconcile_seconds.labels(result).observe(time.monotonic() - started)

    async def _reconcile(self, key: JobKey) -> None:
        # 1. What is there? Another object of the same name is another job.
        job = self._cache.jobs.get(key)
        uid = job["metadata"]["uid"] if job is not None else ""
        if self._uids.get(key, uid) != uid:
            await self._forget(key)
        if job is None or job["metadata"].get("deletionTimestamp") or not managed_here(job):
            return
        self._uids[key] = uid
        board = self._coordinator.board(uid)

        # 2. What does it mean?
        try:
            observed = self._understand(key, job, board)
            observed = await self._confirmed(key, job, board, observed)
            observed = await self._edits.admit(key, job, observed)
        except RefusedError as refusal:
            await self._refuse(key, job, refusal)
            return

        # 3. What is to be done?
        draft = decision.decide(observed)

        # 4. Do it: the status first, then everything that follows from it.
        if draft.place is not None:
            async with self._placer.lock:
                for other in await self._room.find(key, job, draft):
                    self._queue.add(other)
            try:
                await self._carry_out(key, job, board, draft)
            finally:
                self._placer.fulfilled(uid)
        else:
            if draft.mesh.pending_cause != SPEC_CHANGED:
                self._placer.line.leave(uid)
            if draft.move is not None:
                async with self._placer.lock:
                    await self._room.move(key, job, draft)
            if draft.map is not None:
                await self._room.map(draft)
            await self._carry_out(key, job, board, draft)

    def _understand(self, key: JobKey, job: Object, board: Board) -> Observed:
        refusal = self._refusals.get(job["metadata"]["uid"])
        return understand(key, job, self._cache, self._placer, board.agents(), self._now(), refusal)

    async def _confirmed(self, key: JobKey, job: Object, board: Board, observed: Observed) -> Observed:
        """The same, after every pod that seems to be missing was looked for on the server."""
        if lifecycle.finished(observed.status) or is_true(observed.status.conditions, SUSPENDED):
            return observed
        missing = [w for w in observed.workers if w.state is WorkerState.MISSING and w.incarnation >= 0]
        if not missing:
            return observed
        await asyncio.gather(
            *(self._actions.confirm_missing(key, observed.uid, w.index, w.incarnation) for w in missing)
        )
        return self._understand(key, job, board)

    async def _carry_out(self, key: JobKey, job: Object, board: Board, draft: Draft) -> None:
        observed = draft.observed
        await self._writer.write(key, job, draft.status, bool(draft.notes))
        # What was refused is told and persisted now; the next refusal is another one.
        if observed.refusal is not None:
            self._refusals.pop(observed.uid, None)
        self._placer.avoid(observed.uid, draft.avoid)
        await self._publish(board, draft)
        for note in [*draft.notes, *self._chronicle(observed.uid).follow(draft, time.monotonic())]:
            self._events.post(job, note)
        self._see(key, job, draft)
        if draft.delete_job:
            await self._cluster.delete(jobs_path(key.namespace, key.name), observed.uid)
            return
        try:
            # Gated pods need neither: so a gang stands sooner, and whatever is retried makes them before anything runs.
            if draft.ungate or (draft.create and placed_elsewhere(observed)):
                token = self._tokens.token(key.namespace, key.name, observed.uid)
                await self._actions.apply_children(key, observed.uid, token)
            if draft.create:
                await self._create(key, draft)
            await self._actions.ungate(draft.ungate)
        except PodsRefusedError as error:
            self._refusals[observed.uid] = Refusal(error.reason, error.message)
        await self._actions.delete(draft.delete)
        if draft.create or draft.ungate or draft.map or draft.status.mesh != observed.status.mesh:
            self._queue.add(key)
        if draft.requeue is not None:
            self._queue.add_after(key, max(0.05, draft.requeue))

    async def _create(self, key: JobKey, draft: Draft) -> None:
        observed = draft.observed
        assert draft.status.placement is not None
        context = PodContext(
            name=key.name,
            namespace=key.namespace,
            uid=observed.uid,
            spec=observed.spec,
            revision=observed.revision,
            coordinator_url=self._coordinator_url(),
        )
        entries = [entry for entry in draft.status.placement.workers if entry.worker in draft.create]
        await self._actions.create(context, entries)

    async def _publish(self, board: Board, draft: Draft) -> None:
        """Tells the agents what is persisted now."""
        observed, mesh = draft.observed, draft.mesh
        current = board.document
        if mesh.pending_cause or current is None or current.generation != mesh.generation:
            current = document(observed, mesh)
        incarnations = {pod.worker: pod.incarnation for pod in observed.strays}
        incarnations |= {worker.index: worker.incarnation for worker in observed.workers if worker.incarnation >= 0}
        over = lifecycle.finished(draft.status) or is_true(draft.status.conditions, SUSPENDED)
        closed = over and not observed.live_pods
        pods = {worker.index: worker.pod.uid for worker in observed.workers if worker.pod is not None}
        await board.publish(
            None if over else current, incarnations, generation=mesh.generation, closed=closed, pods=pods
        )

    async def _refuse(self, key: JobKey, job: Object, refusal: RefusedError) -> None:
        """Says why nothing can be done, once."""
        old = parse_status(job)
        generation = int(job["metadata"].get("generation", 0))
        if lifecycle.finished(old):
            status = undecided.unchanged(old, generation)
        elif refusal.waits:
            suspended = suspended_by_user(job)
            status = undecided.unplannable(old, generation, self._now(), refusal.message, suspended=suspended)
            self._queue.add_after(key, RETRY_PLACEMENT_SECONDS)
        else:
            status = undecided.rejected(old, generation, self._now(), refusal.reason, refusal.message)
        uid = job["metadata"]["uid"]
        note = Note("PlacementFailed" if refusal.waits else refusal.reason, refusal.message, WARNING)
        try:
            if await self._writer.write(key, job, status, False) and not lifecycle.finished(old):
                self._events.post(job, note)
        except StatusRefusedError:
            if self._untold.get(uid) != note.message:
                self._untold[uid] = note.message
                self._events.post(job, note)
            raise
        finally:
            self._jobs.record(key, uid).see(status, None, time.monotonic())

    async def _tell(self, key: JobKey, error: Exception) -> None:
        """Says on the job what kept it from being acted on, where its owner can do something about it."""
        job = self._cache.jobs.get(key)
        if job is None or (isinstance(error, ApiError) and error.code not in (400, 403, 422)):
            return
        if isinstance(error, StatusRefusedError) and job["metadata"]["uid"] in self._untold:
            return
        foreseen = isinstance(error, ApiError | ForeignObjectError)
        note = Note("ActionRefused", str(error), WARNING)
        if not foreseen:
            note = Note("ReconcileFailed", f"tried again and again: {type(error).__name__}: {error}", WARNING)
        with contextlib.suppress(Exception):
            self._events.post(job, note)

    async def _forget(self, key: JobKey) -> None:
        """Drops all that is remembered of a job that is gone."""
        uid = self._uids.pop(key, "")
        self._edits.forget(uid)
        self._chronicles.pop(uid, None)
        self._refusals.pop(uid, None)
        self._placer.forget(uid)
        self._writer.forget(uid)
        self._untold.pop(uid, None)
        self._jobs.forget(key)
        self._queue.forget(key)
        await self._coordinator.forget(uid)

    def _chronicle(self, uid: str) -> Chronicle:
        return self._chronicles.setdefault(uid, Chronicle())

    def _see(self, key: JobKey, job: Object, draft: Draft) -> None:
        observed = draft.observed
        heard = observed.agents.reports.get(leader(observed))
        current = heard is not None and heard.report.generation == observed.mesh.generation
        progress = heard.report.progress if heard is not None and current else None
        self._jobs.record(key, observed.uid).see(draft.status, progress, time.monotonic())
        started = is_true(draft.status.conditions, READY) and not is_true(observed.status.conditions, READY)
        if started and observed.mesh.generation == 1 and not lifecycle.finished(draft.status):
            created = job["metadata"].get("creationTimestamp")
            self._metrics.startup_seconds.observe(seconds_since(created, observed.now))
