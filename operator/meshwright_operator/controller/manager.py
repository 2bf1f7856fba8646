"""The operator's main sequence.

Every replica serves health, reads the coordinator's key and certificate, lists everything and watches. The one that
holds the lease also reconciles and serves agents. The others are on standby: their caches are up to date, so they are
ready, and take over within the duration of the lease. A replica that has not listed everything yet does not compete for
the lease: one on standby can lead at once. A replica that stops hands over: it finishes its reconciles, answers the
open polls, and releases the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from kubernetes.aio.client import Configuration

from meshwright.profiles.document import Profiles
from meshwright_operator.administrator_files import fabric_file, policy_file, profiles_file
from meshwright_operator.controller.http_server import health_application, serve_application
from meshwright_operator.controller.job_devices import JobDevices
from meshwright_operator.controller.job_profiles import JobProfiles
from meshwright_operator.controller.job_reporter import JobReporter
from meshwright_operator.controller.observe import JobObserver
from meshwright_operator.controller.pod_contexts import PodContexts
from meshwright_operator.controller.reconciler import Reconciler
from meshwright_operator.controller.stall_monitor import StallMonitor
from meshwright_operator.controller.status_patch import PROGRESS_SECONDS, StatusWriter
from meshwright_operator.coordinator.access import CoordinatorAccess
from meshwright_operator.coordinator.leadership_gate import LeadershipGate
from meshwright_operator.coordinator.server import Coordinator
from meshwright_operator.coordinator.tokens import Tokens
from meshwright_operator.decide.observed import BindingLimits
from meshwright_operator.devices.inventory import DeviceInventory
from meshwright_operator.documents import DocumentFile
from meshwright_operator.feature_gates import DYNAMIC_RESOURCES, KUEUE_QUEUES, PLAN_CALIBRATION
from meshwright_operator.http.limits import HEALTH_LIMITS
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.config import load_configuration
from meshwright_operator.kube.fence import Fence
from meshwright_operator.kube.first_contact import wait_for_cluster
from meshwright_operator.kube.informer import Informer
from meshwright_operator.kube.job_watch import watch_jobs
from meshwright_operator.kube.leader_election import LeaderElector
from meshwright_operator.kube.paths import jobs_path
from meshwright_operator.kube.progress_budget import ProgressBudget
from meshwright_operator.kube.reconcile_limit import ReconcileLimit
from meshwright_operator.kube.recorder import EventRecorder
from meshwright_operator.kube.resync import Resync
from meshwright_operator.kube.watch_liveness import WatchLiveness
from meshwright_operator.kube.watches import EventHandlers, watched_collections
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.metrics.cluster_metrics import ClusterMetrics
from meshwright_operator.metrics.job_metrics import JobMetrics
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.planning.planning_service import PlanningService
from meshwright_operator.queues.kueue import Kueue, queue_of
from meshwright_operator.queues.kueue_watch import KueueWatch
from meshwright_operator.scheduling.calibration import CalibrationLoop
from meshwright_operator.scheduling.inventories import Inventories
from meshwright_operator.scheduling.scheduler import JobScheduler
from meshwright_operator.settings import Settings

DEVICES_SECONDS = 10.0
"""How long a start waits for the devices behind Dynamic Resource Allocation."""
STALE_PERIODS = 2.0
"""A watch is stale after this many idle times without data. After one idle time it reconnects."""

log = logging.getLogger(__name__)


async def run(
    settings: Settings,
    stop: asyncio.Event,
    on_ready: Callable[[], None] = lambda: None,
    on_failure: Callable[[], None] = lambda: None,
    handle_signals: Callable[[], None] = lambda: None,
) -> None:
    """Runs until `stop` is set.

    Args:
        settings: The settings of the process.
        stop: Set it for a clean exit: running reconciles finish, polls are answered, events are posted, and the lease
            is released.
        on_ready: Called when the watches are connected, whether this process leads or is on standby.
        on_failure: Called when a part fails for good, before the other parts have ended.
        handle_signals: Installs the process's handlers of signals again. The library that watches jobs replaces them.

    Raises:
        KubeConfigError: No configuration of the cluster can be read.
        KeyFileError: The key file cannot be used.
        CredentialsError: The operator's Secret, or a certificate file, cannot be used.
        DocumentError: The administrator's policy, fabric or profiles cannot be read, or are invalid.
        ListenError: An address cannot be used.
        ClusterError: The API server cannot be reached, or does not know the kind of jobs.
        BaseExceptionGroup: A part failed for good, such as the lease or a watch. The process must exit.
    """
    manager = await Manager.build(settings, on_failure)
    leading = asyncio.create_task(manager.serve_and_lead(on_ready, handle_signals), name="operator")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({leading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if leading.done():
            leading.result()
        else:
            log.info("stopping")
            await manager.drain()
    finally:
        stopping.cancel()
        try:
            # Its parts end in order. `asyncio.run` would cancel the tasks of kopf all at once, which then wait for each
            # other for ever.
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)
        finally:
            await manager.close()


class Manager:
    """Creates all parts of the operator and runs them."""

    def __init__(
        self, settings: Settings, configuration: Configuration, metrics: OperatorMetrics, on_failure: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._on_failure = on_failure
        self._configuration = configuration
        self._metrics = metrics
        fence = Fence()
        limit = ReconcileLimit(settings.workers)
        self._client = cluster = KubeClient(configuration, metrics, fence, on_create=limit.observe)
        self._liveness = WatchLiveness(metrics, STALE_PERIODS * settings.watch_idle_seconds)
        self._cache = Cache()
        self._queue: WorkQueue[JobKey] = WorkQueue(metrics, expected_errors=(ApiError,), limit=limit)
        metrics.queue_depth(lambda: len(self._queue))
        # On standby, nothing is reconciled.
        self._queue.pause()
        tokens = Tokens()
        self._coordinator = Coordinator(self._cache, tokens, metrics, self._notify)
        self._events = EventRecorder(cluster, settings.identity, metrics)
        self._elector = LeaderElector(
            cluster, fence, settings.lease_namespace, settings.lease_name, settings.identity, settings.lease_seconds
        )
        self._resync = Resync(cluster, self._cache, self._queue, metrics, settings.namespaces, settings.resync_seconds)
        self._access = CoordinatorAccess(settings, configuration, tokens, self._coordinator, metrics)
        self._gate = LeadershipGate(lambda: self._elector.other_leads)
        self._elected = asyncio.Event()
        self._elected_at = 0.0
        self._listed = asyncio.Event()
        inventories = Inventories(self._cache)
        self._scheduler = scheduler = JobScheduler(
            cluster, self._cache, metrics, settings.namespaces, self._queue.add, inventories
        )
        self._planner = PlanningService(inventories, lambda: scheduler.calibration, metrics, self._queue.add)
        self._stalls = StallMonitor(metrics)
        self._profiles = JobProfiles(tokens.seal)
        self._device_inventory = DeviceInventory(cluster, self._cache, self._devices_changed)
        self._documents = self._new_documents()
        self._calibration_loop = CalibrationLoop(self._cache, scheduler)
        self._kueue_watch = self._new_kueue_watch()
        self._reconcile = self._new_reconciler(tokens, inventories)

    def _new_documents(self) -> tuple[DocumentFile[Any], ...]:
        """The administrator's documents, and who uses them."""
        settings, scheduler = self._settings, self._scheduler
        return (
            policy_file(settings.policy_file, self._metrics, scheduler.set_policy),
            fabric_file(settings.fabric_file, self._metrics, scheduler.set_fabric),
            profiles_file(settings.profiles_file, self._metrics, self._use_profiles),
        )

    def _new_kueue_watch(self) -> KueueWatch:
        """The watch of Workloads, which is off without the gate."""
        settings = self._settings
        watch = KueueWatch(
            self._client, self._liveness, settings.namespaces, settings.watch_idle_seconds, self._workload_changed
        )
        if not settings.feature_gates.enabled(KUEUE_QUEUES):
            watch.turn_off()
        return watch

    def _new_reporter(self) -> JobReporter:
        """What writes status and events, and the metrics of jobs."""
        jobs = JobMetrics()
        self._metrics.registry.register(jobs)
        gpus = ClusterMetrics(self._scheduler.gpu_capacities)
        self._metrics.registry.register(gpus)
        self._metrics.before_scrape.append(gpus.refresh)
        budget = ProgressBudget(self._settings.progress_writes_per_second)
        writer = StatusWriter(self._client, self._cache, self._queue, budget=budget)
        return JobReporter(writer, self._events, self._metrics, jobs)

    def _new_reconciler(self, tokens: Tokens, inventories: Inventories) -> Reconciler:
        """What reconciles a job."""
        settings = self._settings
        observer = JobObserver(
            self._cache,
            self._scheduler,
            self._planner,
            BindingLimits(settings.unbound_seconds, settings.partly_bound_seconds),
            self._profiles,
            JobDevices(self._client, self._device_inventory),
        )
        pod_contexts = PodContexts(
            tokens,
            inventories,
            coordinator_url=lambda: self._access.url,
            trust=lambda: self._access.trust,
            network_policies=settings.job_network_policies,
            agent_image=settings.agent_image,
        )
        kueue = Kueue(self._client, self._cache, self._kueue_watch)
        return Reconciler(
            self._client,
            self._queue,
            self._coordinator,
            observer,
            pod_contexts,
            self._new_reporter(),
            self._metrics,
            kueue=kueue,
        )

    @classmethod
    async def build(cls, settings: Settings, on_failure: Callable[[], None]) -> Manager:
        """Create the operator for these settings, without starting it."""
        metrics = OperatorMetrics()
        configuration = await load_configuration(settings.kubeconfig)
        manager = cls(settings, configuration, metrics, on_failure)
        try:
            for document in manager._documents:
                document.load()
        except BaseException:
            await manager.close()
            raise
        return manager

    async def drain(self) -> None:
        """Hand over: finish running and queued reconciles, answer open polls, and release the lease.

        Delayed reconciles are left to the next leader.
        """
        if not await self._queue.drain(self._settings.drain_seconds):
            log.warning(
                "reconciles still running after the drain period", extra={"seconds": self._settings.drain_seconds}
            )
        self._gate.close()
        await self._release()

    async def close(self) -> None:
        """Releases the lease, ends processes and closes connections. What fails does not keep the rest from closing."""
        async with contextlib.AsyncExitStack() as closing:
            for close in (self._client.close, self._access.close, self._planner.close, self._release):
                closing.push_async_callback(close)  # the last one is called first
            self._queue.close()

    async def _release(self) -> None:
        if self._elected.is_set():
            await self._events.flush(1.0)
            await self._elector.release()
            self._metrics.leader.set(0)

    async def serve_and_lead(self, on_ready: Callable[[], None], handle_signals: Callable[[], None]) -> None:
        """Serves health, watches, and leads whenever this process holds the lease, until cancelled."""
        application = health_application(self._metrics, self._resync.makes_progress, self._not_ready)
        health = serve_application(
            application,
            self._settings.metrics_listen,
            limits=HEALTH_LIMITS,
            flag="--metrics-listen",
            closed=lambda reason: self._metrics.closed_connections.labels("health", reason).inc(),
        )
        async with health:
            await wait_for_cluster(self._client, self._configuration.host, self._resync.record_progress)
            await self._run_parts(on_ready, handle_signals)

    async def _run_parts(self, on_ready: Callable[[], None], handle_signals: Callable[[], None]) -> None:
        async with (
            self._stalls.running(),
            self._serve_agents(),
            asyncio.TaskGroup() as group,
        ):
            self._start(group, self._access.run(), name="certificates")
            self._start(group, self._elect(), name="lease")
            self._start(group, self._lead(), name="lead")
            self._start(group, self._watch(on_ready, handle_signals), name="watch")
            # On standby too: the first reconcile as the leader must be bounded by the policy of that moment.
            for document in self._documents:
                self._start(group, document.run(), name=document.what)

    @asynccontextmanager
    async def _serve_agents(self) -> AsyncIterator[None]:
        # On standby, too: a replica must complete TLS handshakes before it can turn agents away.
        await self._access.prepare(self._resync.record_progress)
        application = self._coordinator.application()
        application.middlewares.append(self._gate.middleware)
        serving = serve_application(
            application,
            self._settings.coordinator_listen,
            limits=self._settings.connection_limits,
            flag="--coordinator-listen",
            closed=lambda reason: self._metrics.closed_connections.labels("coordinator", reason).inc(),
            tls=self._access.context,
        )
        async with serving as port:
            self._access.serving(port)
            yield

    async def _elect(self) -> None:
        await self._listed.wait()
        await self._elector.acquire()
        # A process that nobody led before since it began to list lists only once.
        self._elected_at = 0.0 if self._elector.led_alone else time.monotonic()
        self._metrics.leader.set(1)
        self._elected.set()
        await self._elector.renew_until_lost()

    async def _lead(self) -> None:
        await self._elected.wait()
        # Agents may poll and report at once. Only a reconcile, which comes later, decides anything. Agents of jobs that
        # are not in the cache wait for the listing: a watch may be behind.
        self._gate.open()
        log.info("serving", extra={"coordinator": self._access.url, "jobs": len(self._cache.jobs)})
        self._queue.resume()
        # Watches may be a moment behind what the last leader wrote: a listing contains all of it.
        await self._resync.ensure_listed_since(self._elected_at)
        self._coordinator.synced = True
        async with asyncio.TaskGroup() as group:
            self._start(group, self._client.keep_connections(), name="connections")
            self._start(group, self._scheduler.prepare(), name="foreign pods")
            self._start(group, self._events.run(), name="events")
            self._start(group, self._planner.run(), name="planner")
            self._start(group, self._queue.run_many(self._settings.workers, self._reconcile), name="workers")
            gates = self._settings.feature_gates
            if gates.enabled(PLAN_CALIBRATION):
                self._start(group, self._calibration_loop.run(), name="learning")
            if gates.enabled(KUEUE_QUEUES):
                self._start(group, self._kueue_watch.run(), name="Kueue")

    async def _watch(self, on_ready: Callable[[], None], handle_signals: Callable[[], None]) -> None:
        await self._elector.look()
        if self._elector.found_free:
            self._planner.prestart()  # while everything is listed: this process will probably lead
        await self._resync.ensure_listed_since(0.0)
        counts_devices = self._settings.feature_gates.enabled(DYNAMIC_RESOURCES)
        if counts_devices:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DEVICES_SECONDS):
                    await self._device_inventory.load()
        self._listed.set()
        handlers = EventHandlers(self._cache, self._queue, self._metrics)
        namespaces = self._settings.namespaces
        watched = watched_collections(handlers, self._resync, namespaces)
        jobs = [jobs_path(namespace) for namespace in namespaces or (None,)]
        self._liveness.track([*jobs, *(collection.path for collection in watched)])
        idle = self._settings.watch_idle_seconds
        informers = [Informer(self._client, collection, self._liveness, idle) for collection in watched]
        async with asyncio.TaskGroup() as group:
            self._start(group, self._resync.run(), name="resync")
            if counts_devices:
                self._start(group, self._device_inventory.run(self._liveness, idle), name="devices")
            for informer, collection in zip(informers, watched, strict=True):
                self._start(group, informer.run(), name=f"watch of {collection.path}")
            for informer in informers:
                await informer.connected.wait()
            # When kopf stops, it cancels every task that was started after it. By then, all of them must stop anyway.
            watching = watch_jobs(
                handlers.job, self._configuration, namespaces, self._liveness, idle, on_ready, handle_signals
            )
            self._start(group, watching, name="watch of jobs")

    def _start(self, group: asyncio.TaskGroup, part: Coroutine[Any, Any, None], name: str) -> None:
        """Run a part in a group. The group's other parts may take long to end after it has failed."""
        group.create_task(part, name=name).add_done_callback(self._ended)

    def _ended(self, part: asyncio.Task[None]) -> None:
        if not part.cancelled() and part.exception() is not None:
            self._on_failure()

    def _devices_changed(self) -> None:
        """Reconcile the jobs that other nodes may help. The placer wakes those that wait for free nodes."""
        for key in self._cache.jobs_awaiting_layout():
            self._queue.add(key)

    def _use_profiles(self, profiles: Profiles) -> None:
        """Use these profiles for pods that start from now on, and reconcile the jobs that may wait for one."""
        self._profiles.use(profiles)
        for key in self._cache.jobs:
            self._queue.add(key)

    def _not_ready(self) -> str:
        if not self._access.prepared:
            return "waiting for the operator's Secret"
        if not self._listed.is_set():
            return "waiting for the first listing"
        if not self._resync.is_fresh():
            return "the last full listing is too old"
        stale = self._liveness.stale()
        return f"no data from watches: {', '.join(stale)}" if stale else ""

    def _workload_changed(self, changed: JobKey | None) -> None:
        """The Workload of a job changed, or those of all jobs may have."""
        keys = [key for key, job in self._cache.jobs.items() if queue_of(job)] if changed is None else [changed]
        for key in keys:
            self._queue.add(key)

    def _notify(self, key: JobKey, urgent: bool) -> None:
        if urgent:
            self._queue.add(key)
        else:
            self._queue.add_after(key, PROGRESS_SECONDS)
