"""Reconciles one job: observe, decide, write the status, then act.

A reconcile starts from the cache and the job's status, and writes each decision to status before it acts on it. So it
can be killed at any line, and the next one converges: generation and incarnations are persisted before agents or pods
get them, pod names are functions of the persisted status, and every action is idempotent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial

from meshwright.api.conditions import SUSPENDED, is_true
from meshwright.api.objects import KubeObject
from meshwright.api.parsing import InvalidSpecError
from meshwright.api.status import WorkerPlacement
from meshwright_operator import logging_config
from meshwright_operator.controller.claim_check import ClaimCheck
from meshwright_operator.controller.job_reporter import JobReporter
from meshwright_operator.controller.missing_pods import Incarnation
from meshwright_operator.controller.observe import (
    PLANNING,
    JobObserver,
    JobRejectedError,
    managed_here,
    sent_elsewhere,
    suspended_by_user,
)
from meshwright_operator.controller.pod_contexts import PodContexts
from meshwright_operator.controller.pod_control import PodControl, PodsRejectedError
from meshwright_operator.controller.pod_events import PodEvents
from meshwright_operator.controller.policy_check import check_agent_image, check_policy
from meshwright_operator.controller.stale_retries import StaleRetries
from meshwright_operator.controller.status_patch import ConflictError
from meshwright_operator.coordinator.agent_registry import AgentRegistry
from meshwright_operator.coordinator.server import Coordinator
from meshwright_operator.decide import (
    checkpoint_request,
    decide_job,
    goodput,
    in_memory,
    lifecycle,
    placement_outcome,
    preempted_job,
    resize,
)
from meshwright_operator.decide.admission import Admission
from meshwright_operator.decide.agents import Agents
from meshwright_operator.decide.checkpoint_health import failure_history
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.mesh_generation import document
from meshwright_operator.decide.missing_claims import MissingClaim, wait_for_claims
from meshwright_operator.decide.observed import Observed, PodState, Rejection, has_started
from meshwright_operator.decide.placement_outcome import WAITING_RETRY_SECONDS
from meshwright_operator.decide.preflight import CHECK_FAILED
from meshwright_operator.decide.profile_use import record_profile
from meshwright_operator.decide.restart_policy import SPEC_CHANGED
from meshwright_operator.decide.stuck_pods import seconds_until_stuck
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import KubeClient
from meshwright_operator.kube.job_event import WARNING, JobEvent
from meshwright_operator.kube.paths import jobs_path
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.manifests.worker_pod import PodContext
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.planning.planner import PlanPendingError
from meshwright_operator.queues.kueue import Kueue, QueueUnknownError, demand_of, queue_of
from meshwright_operator.queues.workload_manifest import Demand
from meshwright_operator.scheduling.edit_admission import EditAdmission
from meshwright_operator.scheduling.job_queue import PlacementRequest
from meshwright_operator.scheduling.placer import Later
from meshwright_operator.text import capitalized
from meshwright_operator.timestamps import utc_now

NO_LAYOUT_RETRY_SECONDS = 600.0
"""Time after which a job for which no layout fits is planned again, if no change of a node has woken it."""
QUEUE_UNKNOWN_SECONDS = 0.5
"""Time after which a job is looked at again whose queue is not known yet."""
ORPHAN_FINALIZER = "orphan"
"""The API server's finalizer of `kubectl delete --cascade=orphan`."""


class Reconciler:
    """Reconciles jobs. What it stores between two reconciles only affects events, messages and metrics."""

    def __init__(
        self,
        cluster: KubeClient,
        queue: WorkQueue[JobKey],
        coordinator: Coordinator,
        observer: JobObserver,
        pod_contexts: PodContexts,
        reporter: JobReporter,
        metrics: OperatorMetrics,
        now: Callable[[], datetime] = utc_now,
        kueue: Kueue | None = None,
    ) -> None:
        self._client = cluster
        self._queue = queue
        self._coordinator = coordinator
        self._observer = observer
        self._cache, self._scheduler, self._planner = observer.cache, observer.scheduler, observer.planner
        self._devices, self._deletions = observer.devices, observer.deletions
        self._pod_contexts = pod_contexts
        self._reporter = reporter
        self._metrics = metrics
        self._now = now
        self._kueue = kueue
        self._pod_control = PodControl(cluster, self._cache, metrics)
        self._claims = ClaimCheck(cluster)
        self._pod_events = PodEvents(cluster, queue.add)
        self._edit_admission = EditAdmission(self._scheduler)
        self._stale_retries = StaleRetries()
        self._rejections: dict[str, Rejection] = {}
        self._uids: dict[JobKey, str] = {}

    async def __call__(self, key: JobKey) -> None:
        """Reconcile one job. If this raises, the queue retries the job with backoff."""
        started = time.monotonic()
        result = "error"
        generation = self._cache.jobs.get(key, {}).get("metadata", {}).get("generation")
        try:
            with logging_config.log_context(job=str(key), generation=generation):
                await self._reconcile(key)
            result = "ok"
        except ConflictError:
            result = "stale"
            self._queue.add_after(key, self._stale_retries.delay(key))
        except Exception as error:
            self._metrics.reconcile_errors.labels(type(error).__name__).inc()
            if (job := self._cache.jobs.get(key)) is not None:
                self._reporter.report_error(job, error)
            raise
        finally:
            self._metrics.reconcile_seconds.labels(result).observe(time.monotonic() - started)

    async def _reconcile(self, key: JobKey) -> None:
        # 1. Read the job. An object with the same name and another uid is another job.
        job = self._cache.jobs.get(key)
        uid = job["metadata"]["uid"] if job is not None else ""
        if self._uids.get(key, uid) != uid:
            await self._forget(key)
        if job is None or not managed_here(job):
            self._leave_queue(uid)
            if job is not None and self._kueue is not None and sent_elsewhere(job) and queue_of(job):
                await self._hand_over(key, job, self._kueue)
            return
        self._uids[key] = uid
        registry = self._coordinator.registry(uid)
        if job["metadata"].get("deletionTimestamp"):
            await self._terminate(key, job, registry)
            return

        # 2. Observe.
        observed = await self._admitted(key, job, registry)
        if observed is None:
            return

        observed, again = await self._pod_events.explain(key, observed)
        if again is not None:
            self._queue.add_after(key, again)

        # 3. Decide.
        draft = decide_job.decide(observed)
        self._avoid_nodes(key, draft)

        # 4. Place if needed, write the status, then act.
        await self._carry_out(key, job, registry, draft)

    def _avoid_nodes(self, key: JobKey, draft: Decision) -> None:
        """Pass the nodes on to the scheduler that the job must not use, or not for a while."""
        observed = draft.observed
        if observed.generation != observed.status.observed_generation:  # the finding may be allowed now
            self._scheduler.forget_avoided(observed.uid, CHECK_FAILED)
        self._scheduler.avoid(observed.uid, draft.avoid, draft.avoid_seconds)
        unreachable = {}
        if self._devices is not None and observed.spec.workers.resource_claims:
            unreachable = self._devices.unreachable(key.namespace, observed.spec, self._cache.nodes)
        self._scheduler.set_blocked(observed.uid, {**unreachable, **draft.blocked_nodes})

    async def _carry_out(self, key: JobKey, job: KubeObject, registry: AgentRegistry, draft: Decision) -> None:
        """Carry out a decision. If the job needs nodes first, it waits for the scheduler's answer."""
        if draft.place is not None and (missing := await self._missing_claims(key, draft.observed)):
            wait_for_claims(draft, missing, key.namespace)
        if draft.place is not None:
            async with self._scheduler.grant(PlacementRequest.of_decision(key, job, draft, draft.place)) as grant:
                if isinstance(grant, Later):
                    self._queue.add_after(key, WAITING_RETRY_SECONDS)
                    return
                for other in grant.wake:
                    self._queue.add(other)
                placement_outcome.apply_grant(draft, grant)
                await self._execute(key, job, registry, draft)
            return
        await self._carry_out_without_nodes(key, job, registry, draft)

    async def _missing_claims(self, key: JobKey, observed: Observed) -> list[MissingClaim]:
        """The claims that a job names, and that do not exist."""
        missing = await self._claims.missing(key.namespace, observed.spec)
        if self._devices is None:
            return missing
        return missing + await self._devices.missing(key.namespace, observed.spec, len(observed.workers))

    async def _carry_out_without_nodes(
        self, key: JobKey, job: KubeObject, registry: AgentRegistry, draft: Decision
    ) -> None:
        """Carries out a decision that needs no nodes before the status is written, or only tries whether some fit."""
        observed = draft.observed
        restarts = draft.mesh.pending_cause == SPEC_CHANGED.name
        if not restarts or observed.spec.suspend or lifecycle.finished(draft.status):
            self._scheduler.withdraw(observed.uid)
        if draft.grow is not None:
            async with self._scheduler.grow(PlacementRequest.of_decision(key, job, draft, draft.grow)) as growth:
                resize.apply_growth(draft, growth)
                await self._execute(key, job, registry, draft)
            return
        self._scheduler.withdraw_growth(observed.uid)
        if draft.move is not None:
            request = PlacementRequest.of_decision(key, job, draft, draft.move)
            if await self._scheduler.fits_elsewhere(request):
                placement_outcome.apply_move(draft)
            else:
                resize.leave_draining_nodes(draft)
        if draft.map_ranks is not None:
            placement_outcome.apply_mapping(draft, await self._scheduler.map_ranks(observed, draft.map_ranks))
        await self._execute(key, job, registry, draft)

    async def _admitted(self, key: JobKey, job: KubeObject, registry: AgentRegistry) -> Observed | None:
        """The job as observed, with its edit if that fits. None, which is reported, if it cannot run yet."""
        uid = job["metadata"]["uid"]
        try:
            await self._prepare_inventory(job)
            admission = await self._kueue.admission(job) if self._kueue is not None else None
            observed = self._observe(key, job, registry, admission)
            observed = await self._confirm_missing_pods(key, job, registry, observed)
            check_agent_image(observed, self._pod_contexts.agent_image)
            observed = check_policy(observed, key.namespace, self._scheduler.bounds(key.namespace))
            if self._kueue is not None:
                observed = await self._kueue.follow(key, job, observed, partial(self._reporter.post, job))
            if observed.admission is not None and preempted_job.reason_to_stop(observed) is not None:
                return observed  # it gets no nodes, so that nobody has to find out whether an edit fits
            return await self._edit_admission.admit(key, job, observed)
        except QueueUnknownError:
            self._queue.add_after(key, QUEUE_UNKNOWN_SECONDS)
            return None
        except JobRejectedError as rejection:
            self._leave_queue(uid)
            await self._stop_rejected(key, job)
            await self._reporter.report_rejected(key, job, rejection, live_pods=self._live_pods(key, uid))
            if rejection.retryable and not lifecycle.finished(self._cache.parsed.status(job)):
                # The event of this status reconciles the job again, with the nodes that changed meanwhile.
                self._queue.add_after(key, NO_LAYOUT_RETRY_SECONDS)
            return None
        except PlanPendingError as pending:
            await self._report_pending(key, job, pending)
            return None

    async def _hand_over(self, key: JobKey, job: KubeObject, kueue: Kueue) -> None:
        """Make the Workload of a job that MultiKueue sends to another cluster. Its status is that cluster's."""

        def demand() -> Demand:
            bare = {**job, "status": {}}
            plain = JobObserver(self._cache, self._scheduler, self._planner)
            return demand_of(job, plain.observe(key, bare, Agents(), self._now()))

        try:
            await kueue.hand_over(key, job, demand)
        except (QueueUnknownError, PlanPendingError):
            self._queue.add_after(key, QUEUE_UNKNOWN_SECONDS)
        except JobRejectedError as rejection:
            self._reporter.post(job, JobEvent(rejection.reason, rejection.message, WARNING))
            self._queue.add_after(key, NO_LAYOUT_RETRY_SECONDS)

    def _observe(self, key: JobKey, job: KubeObject, registry: AgentRegistry, admission: Admission | None) -> Observed:
        rejection = self._rejections.get(job["metadata"]["uid"])
        return self._observer.observe(key, job, registry.agents(), self._now(), rejection, admission)

    async def _report_pending(self, key: JobKey, job: KubeObject, pending: PlanPendingError) -> None:
        """Report that planning takes long. The planner adds the key to the queue. A running job keeps its status."""
        if pending.slow and not has_started(self._cache.parsed.status(job)):
            rejection = JobRejectedError("Planning", capitalized(PLANNING), retryable=True)
            uid = job["metadata"]["uid"]
            await self._reporter.report_rejected(key, job, rejection, live_pods=self._live_pods(key, uid))

    async def _stop_rejected(self, key: JobKey, job: KubeObject) -> None:
        """Delete the pods of a job without a usable spec that is suspended or has finished. That needs no plan.

        A started job usually has its applied spec. There is none if the spec is too large for the status.
        """
        if suspended_by_user(job) or lifecycle.finished(self._cache.parsed.status(job)):
            live = self._live_pods(key, job["metadata"]["uid"])
            await self._pod_control.delete([pod for pod in live if not pod.deleting])

    def _live_pods(self, key: JobKey, uid: str) -> list[Pod]:
        pods = self._deletions.as_seen(self._cache.pods(key, uid), self._now())
        return [pod for pod in pods if not pod.terminal]

    async def _prepare_inventory(self, job: KubeObject) -> None:
        """Read changed nodes, which takes long in a large cluster, and the job's claims, before it is observed."""
        with contextlib.suppress(InvalidSpecError):
            spec = self._cache.parsed.spec(job)
            if self._devices is not None and spec.workers.resource_claims:
                await self._devices.prepare(job["metadata"]["namespace"], spec)
                spec = self._devices.joined(job["metadata"]["namespace"], spec)
            inventories = self._pod_contexts.inventories
            if inventories.need_preparation:
                await inventories.prepare(spec)

    async def _confirm_missing_pods(
        self, key: JobKey, job: KubeObject, registry: AgentRegistry, observed: Observed
    ) -> Observed:
        """Ask the API server for pods that are missing from the cache, and observe the job again."""
        if lifecycle.finished(observed.status) or is_true(observed.status.conditions, SUSPENDED):
            return observed
        missing = [
            Incarnation(w.index, w.incarnation)
            for w in observed.workers
            if w.state is PodState.MISSING and w.incarnation >= 0
        ]
        unconfirmed = self._pod_control.missing.unconfirmed(observed.uid, missing)
        if not unconfirmed:
            return observed
        await self._pod_control.missing.confirm(key, observed.uid, unconfirmed)
        return self._observe(key, job, registry, observed.admission)

    async def _execute(self, key: JobKey, job: KubeObject, registry: AgentRegistry, draft: Decision) -> None:
        goodput.update_goodput(draft, job["metadata"].get("creationTimestamp"))
        if not draft.create:
            await self._write_and_act(key, job, registry, draft)
            return
        record_profile(draft)
        context, secret = self._pod_contexts.of(key, job, draft)
        async with self._pod_control.shared_objects(context, secret) as shared:
            await self._write_and_act(key, job, registry, draft, (context, shared))

    async def _write_and_act(
        self,
        key: JobKey,
        job: KubeObject,
        registry: AgentRegistry,
        draft: Decision,
        creation: tuple[PodContext, Awaitable[None]] | None = None,
    ) -> None:
        """Write the status, and then act. `creation` has what new pods need, which may still be being created."""
        observed = draft.observed
        await self._reporter.write_status(key, job, draft)
        # Status now contains the rejection, so a later one is a new rejection.
        if observed.rejection is not None:
            self._rejections.pop(observed.uid, None)
        await self._publish(registry, draft)
        self._reporter.report(key, job, draft)
        if draft.delete_job:
            await self._delete_job(key, observed)
            return
        refused = 0
        try:
            if creation is not None:
                await self._pod_control.create(*creation, _entries_to_create(draft))
            refused = await self._pod_control.ungate(draft.ungate)
        except PodsRejectedError as error:
            self._rejections[observed.uid] = Rejection(error.reason, error.message)
        await self._pod_control.delete(draft.delete)
        if self._kueue is not None:
            await self._kueue.settle(key.namespace, draft)
        if not observed.live_pods and not draft.create and _rests(draft):
            await self._pod_control.groups.remove(key, observed.uid, observed.spec)
        if refused:
            self._queue.add_after(key, self._stale_retries.delay(key))
        else:
            self._stale_retries.reset(key)
            if draft.create or draft.ungate or draft.map_ranks or draft.status.mesh != observed.status.mesh:
                self._queue.add(key)
        if draft.requeue_after is not None:
            self._queue.add_after(key, max(0.05, draft.requeue_after))

    async def _delete_job(self, key: JobKey, observed: Observed) -> None:
        """Delete a job whose time to live is over, unless somebody has edited it since: maybe to keep it."""
        job = self._cache.jobs.get(key)
        metadata = job["metadata"] if job is not None else {}
        if (metadata.get("uid"), metadata.get("generation")) != (observed.uid, observed.generation):
            return  # the edit reconciles the job again
        version = str(metadata["resourceVersion"])
        if await self._client.delete(jobs_path(key.namespace, key.name), observed.uid, version) is None:
            await self._reporter.refresh(key)
            self._queue.add_after(key, self._stale_retries.delay(key))

    async def _publish(self, registry: AgentRegistry, draft: Decision) -> None:
        """Publish the persisted generation to the agents."""
        observed, mesh = draft.observed, draft.mesh
        current = registry.document
        if mesh.pending_cause or current is None or current.generation != mesh.generation:
            current = document(observed, mesh, draft.status.last_failure, failure_history(observed, draft.status))
        incarnations = {pod.worker: pod.incarnation for pod in observed.excess_pods}
        workers = [*observed.workers, *observed.joining]
        incarnations |= {worker.index: worker.incarnation for worker in workers if worker.incarnation >= 0}
        over = lifecycle.finished(draft.status) or is_true(draft.status.conditions, SUSPENDED)
        closed = over and not observed.live_pods
        pods = {worker.index: worker.pod.uid for worker in workers if worker.pod is not None}
        await registry.publish(
            None if over else current,
            incarnations,
            generation=mesh.generation,
            closed=closed,
            pods=pods,
            pause=not over and in_memory.pauses(observed, mesh.pending_cause),
            leave=not over and in_memory.leaves(observed, mesh),
            checkpoint_request=checkpoint_request.request_to_send(observed, draft.status.checkpoint_request),
        )

    def _leave_queue(self, uid: str) -> None:
        """Withdraw the requests of a job that cannot be placed now."""
        self._scheduler.withdraw(uid)
        self._scheduler.withdraw_edit(uid)

    async def _terminate(self, key: JobKey, job: KubeObject, registry: AgentRegistry) -> None:
        """Delete the pods of a job that is being deleted: its finalizers may keep the object for any length of time.

        The deletion is persisted in the object, so the pods are deleted before the status is written.
        """
        finalizers = [name for name in job["metadata"].get("finalizers") or () if isinstance(name, str)]
        if ORPHAN_FINALIZER in finalizers:
            return  # the user keeps the pods
        uid = job["metadata"]["uid"]
        self._scheduler.forget(uid)
        pods = self._deletions.as_seen(self._cache.pods(key, uid), self._now())
        live = [pod for pod in pods if not pod.terminal]
        incarnations = {pod.worker: pod.incarnation for pod in sorted(live, key=lambda pod: pod.incarnation)}
        await registry.publish(None, incarnations, generation=registry.generation, closed=not live)
        await self._pod_control.delete([pod for pod in pods if not pod.deleting])
        await self._reporter.report_terminating(key, job, live_pods=live, finalizers=finalizers)
        if left := [seconds for pod in live if (seconds := seconds_until_stuck(pod, self._now()))]:
            self._queue.add_after(key, min(left))

    async def _forget(self, key: JobKey) -> None:
        """Drop the state of a deleted job."""
        uid = self._uids.pop(key, "")
        self._rejections.pop(uid, None)
        self._scheduler.forget(uid)
        self._pod_control.missing.forget(uid)
        self._pod_control.groups.forget(uid)
        self._stale_retries.reset(key)
        self._planner.forget(key)
        self._reporter.forget(key, uid)
        self._queue.forget(key)
        await self._coordinator.forget(uid)


def _rests(draft: Decision) -> bool:
    """Whether the job gets no pods until something else changes."""
    waits = draft.observed.admission is not None and not draft.observed.admission.admitted
    return waits or lifecycle.finished(draft.status) or is_true(draft.status.conditions, SUSPENDED)


def _entries_to_create(draft: Decision) -> list[WorkerPlacement]:
    """The placement of the workers whose pods a decision creates."""
    following = draft.status.elastic.next_placement if draft.status.elastic is not None else None
    assert draft.status.placement is not None
    placed = {entry.worker: entry for entry in following.workers} if following is not None else {}
    placed |= {entry.worker: entry for entry in draft.status.placement.workers}
    return [placed[worker] for worker in draft.create if worker in placed]
