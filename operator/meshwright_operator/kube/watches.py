"""The watches that kopf runs. Every event updates the cache and queues its job's key.

kopf's other handlers are edge-triggered and write to the objects; `on.event` does neither. The handlers never fail,
never write, and return None (kopf would write any other value to the object's status). The handlers that kopf calls are
coroutines, because kopf runs plain functions in threads. `pod_informer` watches pods.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import kopf
from kopf import DiffBaseStorage, ProgressStorage
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from meshwright.api.labels import FIELD_MANAGER, GROUP, PLURAL, VERSION
from meshwright.api.objects import KubeObject
from meshwright_operator.kube.cache import Cache, JobKey, key_of
from meshwright_operator.kube.client import IDENTITY_ENCODING, PAGE_SIZE
from meshwright_operator.kube.paths import core_path, jobs_path, pods_path
from meshwright_operator.kube.pod_info import read_pod
from meshwright_operator.kube.watch_liveness import WatchLiveness, monitored_session
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.metrics.operator_metrics import OperatorMetrics

log = logging.getLogger(__name__)

DELETED = "DELETED"
SECONDS_PER_POD = 0.00025
"""How long to collect changes of a job's pods before it is reconciled: 0.25 s for a thousand pods."""


class EventHandlers:
    """Handles the events of watches."""

    def __init__(self, cache: Cache, queue: WorkQueue[JobKey], metrics: OperatorMetrics) -> None:
        self._cache = cache
        self._queue = queue
        self._metrics = metrics

    async def job(self, event: Any, **_: Any) -> None:
        """A job was added, changed or deleted."""
        obj = dict(event["object"])
        self._metrics.last_event.labels("jobs").set_to_current_time()
        if event["type"] == DELETED:
            self._cache.remove_job(obj)
        else:
            self._cache.put_job(obj)
        self._queue.add(key_of(obj))

    def pod(self, event: KubeObject) -> None:
        """A pod with the job label was added, changed or deleted."""
        self._metrics.last_event.labels("pods").set_to_current_time()
        if event["type"] != DELETED and self._cache.has_this_pod(event["object"]):
            # The event repeats what the operator wrote or listed itself, as thousands do after every start.
            return
        pod = read_pod(event["object"])
        if pod is None:
            update = self._cache.remove_deleted_pod if event["type"] == DELETED else self._cache.put_unowned_pod
            if (job := update(event["object"])) is not None:
                self._queue.add(job)
            return
        if event["type"] == DELETED:
            self._cache.remove_pod(pod)
        elif not self._cache.put_pod(pod):
            return
        # The larger a gang, the longer its reconcile takes, and the more of its pods change at the same time.
        key = JobKey(pod.namespace, pod.job)
        self._queue.add_after(key, self._cache.count(key) * SECONDS_PER_POD)

    async def node(self, event: Any, **_: Any) -> None:
        """A node was added, changed or deleted."""
        self._metrics.last_event.labels("nodes").set_to_current_time()
        obj = dict(event["object"])
        changed = self._cache.remove_deleted_node(obj) if event["type"] == DELETED else self._cache.put_node(obj)
        if changed:
            self._requeue_unplanned_jobs()
            for key in self._cache.jobs_on(obj["metadata"]["name"]):
                self._queue.add(key)

    def _requeue_unplanned_jobs(self) -> None:
        """Queue the jobs that other nodes may help. The placer wakes the jobs that wait for free nodes."""
        for key in self._cache.jobs_awaiting_layout():
            self._queue.add(key)


async def run_watches(
    handlers: EventHandlers,
    configuration: Configuration,
    namespaces: Sequence[str],
    liveness: WatchLiveness,
    idle_seconds: float,
    on_ready: Callable[[], None],
) -> None:
    """Watch jobs and nodes until cancelled. Raises if a watch fails for good, so that the process exits.

    Args:
        handlers: Handle the events.
        configuration: Connection to the API server.
        namespaces: Namespaces to watch; all if empty.
        liveness: Records when data arrives.
        idle_seconds: A watch reconnects if nothing arrives for this long, not even a bookmark.
        on_ready: Called when the watches are connected.
    """
    registry = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.AiohttpSession:
        return await kopf_session(configuration, liveness)

    kopf.on.login(registry=registry)(login)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry, id="job")(handlers.job)
    kopf.on.event("", "v1", "nodes", registry=registry, id="node")(handlers.node)
    ready = asyncio.Event()

    async def signal_ready() -> None:
        await ready.wait()
        on_ready()

    async with asyncio.TaskGroup() as group:
        ready_task = group.create_task(signal_ready(), name="watches-ready")
        # Not in the group: it must go on while the group's tasks are being cancelled.
        insist_task = asyncio.create_task(cancel_stuck_watchers(), name="watches-insist")
        try:
            await kopf.operator(
                registry=registry,
                settings=_settings(idle_seconds),
                standalone=True,
                clusterwide=not namespaces,
                namespaces=list(namespaces),
                ready_flag=ready,
            )
        finally:
            ready_task.cancel()
            insist_task.cancel()
    raise RuntimeError("watches ended")


async def cancel_stuck_watchers(check_seconds: float = 1.0) -> None:
    """Cancel watchers of kopf again that go on after they were cancelled, until this is cancelled.

    kopf cancels each watcher once, and waits for it without a limit. A watcher whose connection closes at that moment
    takes the cancellation for the end of the connection, and then waits for ever for new credentials.
    """
    before: set[asyncio.Task[Any]] = set()
    while True:
        await asyncio.sleep(check_seconds)
        cancelled = {task for task in asyncio.all_tasks() if task.get_name().startswith("watcher for ")}
        cancelled = {task for task in cancelled if task.cancelling()}
        for task in cancelled & before:
            log.warning("a watcher goes on after it was cancelled", extra={"task": task.get_name()})
            task.cancel()
        before = cancelled


def watch_paths(namespaces: Sequence[str]) -> list[str]:
    """The path of every watch, including the watches of pods."""
    return [core_path(None, "nodes")] + [
        path for namespace in namespaces or (None,) for path in (jobs_path(namespace), pods_path(namespace))
    ]


def _settings(idle_seconds: float) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    disable_persistence(settings)
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.inactivity_timeout = idle_seconds
    # Thousands of jobs in one answer, with one task each, would take hundreds of megabytes.
    settings.watching.chunk_size = PAGE_SIZE
    settings.queueing.idle_timeout = 0.2
    settings.networking.request_timeout = 30
    settings.process.ultimate_exiting_timeout = None
    settings.queueing.exit_timeout = 0.5
    return settings


async def kopf_session(configuration: Configuration, liveness: WatchLiveness) -> kopf.AiohttpSession:
    """The same connection for kopf, with the current token. kopf closes it, and requests a new one after a 401."""
    token = await configuration.get_api_key_with_prefix("BearerToken")
    headers = {
        "User-Agent": FIELD_MANAGER,
        "Accept-Encoding": IDENTITY_ENCODING,
        **({"Authorization": token} if token else {}),
    }
    # The client reads certificates from files, but only when it is created.
    context = RESTClientObject(configuration).ssl_context
    return kopf.AiohttpSession(server=configuration.host, aiohttp_session=monitored_session(liveness, headers, context))


class NoDiff(DiffBaseStorage):
    """Storage without essences, so that kopf does not compare objects."""

    def build(self, *, body: Any, extra_fields: Iterable[Any] | None = None) -> Any:
        """Return an empty essence."""
        return {}

    def fetch(self, *, body: Any) -> None:
        """Return no earlier essence."""

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Store nothing."""


class NoProgress(ProgressStorage):
    """Storage without handler state."""

    def fetch(self, *, key: Any, body: Any) -> None:
        """Return no state."""

    def store(self, *, key: Any, record: Any, body: Any, patch: Any) -> None:
        """Store nothing."""

    def purge(self, *, key: Any, body: Any, patch: Any) -> None:
        """Remove nothing."""

    def touch(self, *, body: Any, patch: Any, value: str | None) -> None:
        """Write nothing: writing would cause another event."""

    def clear(self, *, essence: Any) -> Any:
        """Return the essence unchanged."""
        return essence


def disable_persistence(settings: kopf.OperatorSettings) -> None:
    """Make kopf store nothing on objects, and copy no objects to compare them.

    For every event, kopf makes several deep copies of the object, to find what changed since a handler ran last. The
    handlers here do not use that, and the copies would take half of the operator's time.
    """
    settings.persistence.diffbase_storage = NoDiff()
    settings.persistence.progress_storage = NoProgress()
