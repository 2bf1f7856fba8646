"""Lists and watches."""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import orjson

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.admission.metadata import field_selector, label_selector
from meshwright_local.apiserver.query_options import ListOptions
from meshwright_local.apiserver.resource_types import Resource
from meshwright_local.apiserver.rest.printers import View
from meshwright_local.apiserver.status_errors import ApiError, bad_request
from meshwright_local.apiserver.store import Event, Place, RevisionTooOldError, Store, Stored

BOOKMARK_SECONDS = 60.0
SHORTEST_WATCH_SECONDS = 1800.0
_BATCH = 500
Send = Callable[[bytes], Awaitable[None]]


@dataclass(slots=True)
class WatchFault:
    """Faults of one watch. They may change while it runs."""

    delay_seconds: float = 0.0
    """Seconds by which events are delayed."""
    silent: bool = False
    """Half-open: connected, but sends nothing."""


def selection(resource: Resource, namespace: str, options: ListOptions) -> Callable[[Place, Stored], bool]:
    """Return a predicate for the objects of a request; raises ApiError 400 for an invalid selector."""
    labels = label_selector(options.label_selector) if options.label_selector else None
    fields = field_selector(options.field_selector, resource.fields) if options.field_selector else None

    def selects(place: Place, stored: Stored) -> bool:
        if namespace and place[0] != namespace:
            return False
        fits = labels is None or labels(stored.obj["metadata"].get("labels") or {})
        return fits and (fields is None or fields(stored.obj))

    return selects


def list_objects(
    store: Store, resource: Resource, namespace: str, options: ListOptions, as_of: int | None = None
) -> tuple[list[Stored], KubeObject]:
    """Return the objects of one page and the list's metadata; `as_of` selects an earlier revision.

    Later pages have the objects at the revision of the first page, as long as the log reaches back to it.

    Raises:
        ApiError: 400 for an invalid selector or token, 410 or 504 for a revision that is not available.
    """
    selects = selection(resource, namespace, options)
    # The state of no particular revision comes from a cache in a real server, which does not page.
    limit = 0 if options.revision == "0" else options.limit
    current, after, exact = store.revision if as_of is None else as_of, ("", ""), None
    if options.resume:
        if options.revision not in ("", "0"):
            raise bad_request("specifying resource version is not allowed when using continue")
        exact, after = _resume(options.resume)
        if exact is not None and exact < store.log(resource.key).floor:
            raise _expired_pages(after)
    elif options.revision not in ("", "0"):
        exact = _wanted_revision(options, current)
        if exact is not None and exact < store.log(resource.key).floor:
            raise ApiError(410, "Expired", "The resourceVersion for the provided list is too old.")
    as_of = as_of if exact is None else exact
    revision = str(current if exact is None else exact)
    found: list[Stored] = []
    metadata: KubeObject = {"resourceVersion": revision}
    places = [entry for entry in store.items(resource.key, namespace, as_of) if entry[0] > after]
    for index, (place, stored) in enumerate(places):
        if not selects(place, stored):
            continue
        found.append(stored)
        if limit and len(found) == limit and index + 1 < len(places):
            metadata["continue"] = _token(int(revision), place)
            if not options.label_selector and not options.field_selector:
                metadata["remainingItemCount"] = len(places) - index - 1
            break
    return found, metadata


def _token(revision: int, place: Place) -> str:
    content = orjson.dumps({"v": "meta.k8s.io/v1", "rv": revision, "start": place})
    return base64.urlsafe_b64encode(content).decode()


def _resume(token: str) -> tuple[int | None, Place]:
    """Return the revision of a `continue` token, None for the current one, and the last object of the page before."""
    try:
        content = orjson.loads(base64.urlsafe_b64decode(token.encode()))
        (namespace, name), revision = content["start"], int(content["rv"])
        return revision if revision >= 0 else None, (str(namespace), str(name))
    except (ValueError, KeyError, TypeError):
        raise bad_request("invalid continue token: continue key is not valid") from None


def _expired_pages(after: Place) -> ApiError:
    """Return the error 410 of a token whose revision is gone. Its own token continues without a revision."""
    text = (
        "The provided continue parameter is too old to display a consistent list result. You can start a new list "
        "without the continue parameter, or use the continue token in this response to retrieve the remainder of the "
        "results. Continuing with the provided token results in an inconsistent list - objects that were created, "
        "modified, or deleted between the time the first chunk was returned and now may show up in the list."
    )
    return ApiError(410, "Expired", text, metadata={"continue": _token(-1, after)})


def _wanted_revision(options: ListOptions, current: int) -> int | None:
    """Return the revision that a list must have exactly; None if a newer one is as good."""
    wanted = int(options.revision)
    if wanted > current:
        details = {"causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]}
        text = f"Timeout: Too large resource version: {wanted}, current: {current}"
        raise ApiError(504, "Timeout", text, details, retry_after=1)
    exact = options.revision_match == "Exact" or (not options.revision_match and options.limit)
    return wanted if exact else None


class Watch:
    """One client's watch: its position, and the next events to send."""

    def __init__(self, store: Store, view: View, namespace: str, options: ListOptions) -> None:
        self._store = store
        self._view = view
        self._options = options
        self._log = store.log(view.resource.key)
        self._selects = selection(view.resource, namespace, options)
        self._namespace = namespace
        self._header = True
        self.watch_fault = WatchFault()

    async def run(self, send: Send) -> None:
        """Send events until the time is over, the client falls behind, or `send` raises."""
        revision = self._store.revision
        try:
            initial, position = self._begin()
            for start in range(0, len(initial), _BATCH):
                await send(b"".join(self._line(b"ADDED", stored) for stored in initial[start : start + _BATCH]))
            if self._options.initial_events and self._options.bookmarks:
                await send(_line(b"BOOKMARK", self._view.bookmark(revision, initial_end=True)))
            await self._follow(position, send)
        except RevisionTooOldError as error:
            await send(_line(b"ERROR", orjson.dumps(ApiError(410, "Expired", str(error)).status())))

    def _begin(self) -> tuple[list[Stored], int]:
        since = self._options.revision
        wants_all = self._options.initial_events if self._options.initial_events is not None else since in ("", "0")
        if wants_all or since in ("", "0"):
            items = self._store.items(self._view.resource.key, self._namespace) if wants_all else ()
            return [stored for place, stored in items if self._selects(place, stored)], self._log.end
        if int(since) > self._store.revision:
            # This happens only if the server lost its state. The client must list again.
            raise RevisionTooOldError(f"too large resource version: {since} ({self._store.revision})")
        return [], self._log.position_after(int(since))

    async def _follow(self, position: int, send: Send) -> None:
        clock, chaos = time.monotonic, self.watch_fault
        lifetime = self._options.timeout_seconds or SHORTEST_WATCH_SECONDS * (1 + random.random())  # noqa: S311
        end, bookmark = clock() + lifetime, clock() + BOOKMARK_SECONDS
        while (left := end - clock()) > 0 or chaos.silent:
            news = await self._log.wait(position, max(0.0, min(left, bookmark - clock())))
            if chaos.silent:
                await asyncio.Event().wait()  # forever: only the client, or the end of the server, ends this
            if news:
                events = self._log.read(position, _BATCH)
                if chaos.delay_seconds:
                    await asyncio.sleep(max(0.0, events[0].at + chaos.delay_seconds - clock()))
                    events = [event for event in events if event.at + chaos.delay_seconds <= clock()]
                position += len(events)
                if lines := b"".join(self._event(event) for event in events):
                    await send(lines)
            if clock() >= bookmark and position == self._log.end:
                # All events up to the newest revision were checked, so the client can resume from it.
                bookmark = clock() + BOOKMARK_SECONDS
                if self._options.bookmarks and clock() < end:
                    await send(_line(b"BOOKMARK", self._view.bookmark(self._store.revision, initial_end=False)))

    def _event(self, event: Event) -> bytes:
        was = event.old is not None and self._selects(event.place, event.old)
        fits = self._selects(event.place, event.new)
        if event.change == "DELETED":
            return self._line(b"DELETED", event.new) if was or fits else b""
        if fits:
            return self._line(b"MODIFIED" if was else b"ADDED", event.new)
        if was and event.old is not None:
            # It no longer matches: the client gets its last matching state, with the revision of the change.
            metadata = {**event.old.obj["metadata"], "resourceVersion": str(event.revision)}
            return self._line(b"DELETED", Stored.of({**event.old.obj, "metadata": metadata}))
        return b""

    def _line(self, change: bytes, stored: Stored) -> bytes:
        body = self._view.one(stored, header=self._header)
        self._header = False
        return _line(change, body)


def _line(change: bytes, body: bytes) -> bytes:
    return b'{"type":"' + change + b'","object":' + body + b"}\n"
