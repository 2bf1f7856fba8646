"""The watch of jobs, which kopf runs.

kopf's other handlers are edge-triggered and write to the objects; `on.event` does neither. The handler never fails,
never writes, and returns None (kopf would write any other value to the object's status). It is a coroutine, because
kopf runs plain functions in threads. `informer` watches nodes and pods, of which there are many more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import kopf
from kopf import DiffBaseStorage, ProgressStorage
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from meshwright.api.labels import FIELD_MANAGER, GROUP, PLURAL, VERSION
from meshwright.api.objects import KubeObject
from meshwright_operator.kube.client import IDENTITY_ENCODING, PAGE_SIZE
from meshwright_operator.kube.watch_liveness import WatchLiveness, monitored_session

log = logging.getLogger(__name__)


async def watch_jobs(
    handle: Callable[[KubeObject], None],
    configuration: Configuration,
    namespaces: Sequence[str],
    liveness: WatchLiveness,
    idle_seconds: float,
    on_ready: Callable[[], None],
    handle_signals: Callable[[], None] = lambda: None,
) -> None:
    """Watch jobs until cancelled. Raises if a watch fails for good, so that the process exits.

    Args:
        handle: Handles an event. Never fails.
        configuration: Connection to the API server.
        namespaces: Namespaces to watch; all if empty.
        liveness: Records when data arrives.
        idle_seconds: A watch reconnects if nothing arrives for this long, not even a bookmark.
        on_ready: Called when the watches are connected.
        handle_signals: Installs the handlers of signals again, which kopf replaces.
    """
    registry = _registry(handle, configuration, liveness)
    ready = asyncio.Event()

    async def signal_ready() -> None:
        await ready.wait()
        on_ready()

    async with asyncio.TaskGroup() as group:
        ready_task = group.create_task(signal_ready(), name="watches-ready")
        # Not in the group: it must go on while the group's tasks are being cancelled.
        insist_task = asyncio.create_task(cancel_stuck_watchers(), name="watches-insist")
        try:
            await _run_kopf(registry, namespaces, idle_seconds, ready, handle_signals)
        finally:
            ready_task.cancel()
            insist_task.cancel()
    raise RuntimeError("watches ended")


async def _run_kopf(
    registry: kopf.OperatorRegistry,
    namespaces: Sequence[str],
    idle_seconds: float,
    ready: asyncio.Event,
    handle_signals: Callable[[], None],
) -> None:
    """Run kopf until it ends, or this is cancelled. The two calls are `kopf.operator`."""
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=_settings(idle_seconds),
        # Without peers it is nobody's. kopf would look up the user's name, which a container may not have.
        identity=cast(Any, FIELD_MANAGER),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=list(namespaces),
        ready_flag=ready,
    )
    # Before the event loop can see a signal: kopf's handlers would end the watches, and nothing else.
    handle_signals()
    await kopf.run_tasks(tasks, ignored=others)


def _registry(
    handle: Callable[[KubeObject], None], configuration: Configuration, liveness: WatchLiveness
) -> kopf.OperatorRegistry:
    """What kopf calls: for credentials, and for each event of a job."""
    registry = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.AiohttpSession:
        return await kopf_session(configuration, liveness)

    async def changed(event: Any, **_: Any) -> None:
        handle({"type": event["type"], "object": dict(event["object"])})

    kopf.on.login(registry=registry)(login)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry, id="job")(changed)
    return registry


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
