"""Lists and watches."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from meshwright.local.apiserver.errors import ApiError, bad_request, expired
from meshwright.local.apiserver.eventlog import Event, Overrun, Stored
from meshwright.local.apiserver.options import ListOptions
from meshwright.local.apiserver.resources import Resource
from meshwright.local.apiserver.selectors import Predicate, field_selector, label_selector
from meshwright.local.apiserver.store import Store
from meshwright.local.apiserver.views import View

BOOKMARK_SECONDS = 60.0
SHORTEST_WATCH_SECONDS = 1800.0
Send = Callable[[bytes], Awaitable[None]]


def selection(resource: Resource, namespace: str, options: ListOptions) -> Predicate:
    """Which objects a request is about.

    Raises:
        ApiError: 400 for a selector that cannot be read.
    """
    labels = label_selector(options.label_selector) if options.label_selector else None
    fields = field_selector(options.field_selector, resource.fields) if options.field_selector else None

    def selects(obj: dict[str, Any]) -> bool:
        metadata = obj["metadata"]
        if namespace and metadata.get("namespace") != namespace:
            return False
        return (labels is None or labels(metadata.get("labels") or {})) and (fields is None or fields(obj))

    return selects


def list_objects(
    store: Store, resource: Resource, namespace: str, options: ListOptions
) -> tuple[list[Stored], dict[str, Any]]:
    """The objects of one page and the list's metadata.

    Pages after the first show the present state of what comes after the last object seen, under the revision of the
    first page: a watch from that revision then tells every difference.

    Raises:
        ApiError: 400 for a bad selector or token, 410 or 504 for a revision that is not at hand.
    """
    selects = selection(resource, namespace, options)
    revision, after = str(store.revision), ("", "")
    if options.resume:
        revision, after = _resume(options.resume)
    elif options.revision not in ("", "0"):
        _check_revision(int(options.revision), store.revision, exact=options.revision_match == "Exact")
    found: list[Stored] = []
    metadata: dict[str, Any] = {"resourceVersion": revision}
    places = [(place, stored) for place, stored in store.items(resource.key, namespace) if place > after]
    for index, (place, stored) in enumerate(places):
        if not selects(stored.obj):
            continue
        found.append(stored)
        if options.limit and len(found) == options.limit and index + 1 < len(places):
            token = orjson.dumps({"v": "meta.k8s.io/v1", "rv": revision, "start": place})
            metadata["continue"] = base64.urlsafe_b64encode(token).decode()
            if not options.label_selector and not options.field_selector:
                metadata["remainingItemCount"] = len(places) - index - 1
            break
    return found, metadata


def _resume(token: str) -> tuple[str, tuple[str, str]]:
    try:
        content = orjson.loads(base64.urlsafe_b64decode(token.encode()))
        namespace, name = content["start"]
        return str(int(content["rv"])), (str(namespace), str(name))
    except (ValueError, KeyError, TypeError):
        raise bad_request("continue key is not valid") from None


def _check_revision(wanted: int, current: int, *, exact: bool) -> None:
    if wanted > current:
        details = {"causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]}
        text = f"Too large resource version: {wanted}, current: {current}"
        raise ApiError(504, "Timeout", text, details, retry_after=1)
    if exact and wanted < current:
        raise expired(f"The provided resource version is too old: {wanted} (current {current})")


class Watch:
    """One client's watch: what it has seen, and what to send it next."""

    def __init__(self, store: Store, view: View, namespace: str, options: ListOptions) -> None:
        self._store = store
        self._view = view
        self._options = options
        self._log = store.log(view.resource.key)
        self._selects = selection(view.resource, namespace, options)
        self._namespace = namespace
        self._header = True

    async def run(self, send: Send) -> None:
        """Send events until the time is over, the client falls behind, or `send` raises."""
        revision = self._store.revision
        try:
            initial, position = self._begin()
        except Overrun as error:
            await send(_error(expired(str(error))))
            return
        for start in range(0, len(initial), 500):
            await send(b"".join(self._line(b"ADDED", stored) for stored in initial[start : start + 500]))
        if self._options.initial_events and self._options.bookmarks:
            await send(_line(b"BOOKMARK", self._view.bookmark(revision, initial_end=True)))
        await self._follow(position, send)

    def _begin(self) -> tuple[list[Stored], int]:
        since = self._options.revision
        wants_all = self._options.initial_events
        if wants_all is None:
            wants_all = since in ("", "0")
        if wants_all or since in ("", "0"):
            items = self._store.items(self._view.resource.key, self._namespace) if wants_all else ()
            return [stored for _, stored in items if self._selects(stored.obj)], self._log.end
        if int(since) > self._store.revision:
            # Only a server that lost its state meets this; the client must list anew.
            raise Overrun(f"too large resource version: {since} ({self._store.revision})")
        return [], self._log.position_after(int(since))

    async def _follow(self, position: int, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        lifetime = self._options.timeout_seconds or SHORTEST_WATCH_SECONDS * (1 + random.random())  # noqa: S311
        end = clock() + lifetime
        bookmark = clock() + BOOKMARK_SECONDS
        while (left := end - clock()) > 0:
            if await self._log.wait(position, min(left, max(0.0, bookmark - clock()))):
                try:
                    events = self._log.read(position)
                except Overrun as error:
                    await send(_error(expired(str(error))))
                    return
                position += len(events)
                lines = b"".join(self._event(event) for event in events)
                if lines:
                    await send(lines)
            if clock() >= bookmark and position == self._log.end:
                # All that is known was looked at, so the newest revision is one to resume from.
                bookmark = clock() + BOOKMARK_SECONDS
                if self._options.bookmarks and clock() < end:
                    await send(_line(b"BOOKMARK", self._view.bookmark(self._store.revision, initial_end=False)))

    def _event(self, event: Event) -> bytes:
        was = event.old is not None and self._selects(event.old.obj)
        fits = self._selects(event.new.obj)
        if event.change == "DELETED":
            return self._line(b"DELETED", event.new) if was or fits else b""
        if fits:
            return self._line(b"MODIFIED" if was else b"ADDED", event.new)
        if was and event.old is not None:
            # It left the selection: the client is told of the last state it may see, at the revision of the change.
            metadata = {**event.old.obj["metadata"], "resourceVersion": str(event.revision)}
            last = {**event.old.obj, "metadata": metadata}
            return self._line(b"DELETED", Stored(last, orjson.dumps(last)))
        return b""

    def _line(self, change: bytes, stored: Stored) -> bytes:
        body = self._view.one(stored, header=self._header)
        self._header = False
        return _line(change, body)


def _line(change: bytes, body: bytes) -> bytes:
    return b'{"type":"' + change + b'","object":' + body + b"}\n"


def _error(error: ApiError) -> bytes:
    return _line(b"ERROR", orjson.dumps(error.status()))
