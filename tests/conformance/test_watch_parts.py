"""Watches that fall behind, stay quiet, or meet a server that lost its state."""

import asyncio
import json

import pytest

from meshwright_local.apiserver.query_options import list_options
from meshwright_local.apiserver.registry.discovery import Registry
from meshwright_local.apiserver.rest import list_watch
from meshwright_local.apiserver.rest.list_watch import Watch
from meshwright_local.apiserver.rest.printers import negotiate
from meshwright_local.apiserver.status_errors import ApiError
from meshwright_local.apiserver.store import Store
from tests.patience import patient

KEY = ("", "configmaps")


@pytest.fixture
def store():
    store = Store(None, events_per_resource=20)
    yield store
    store.close()


def put(store, name, labels=None):
    metadata = {"name": name, "namespace": "n", "labels": labels or {}}
    store.put(KEY, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})


def watch(store, **query):
    resource = Registry().get("", "v1", "configmaps")
    view = negotiate(resource, "application/json", "")
    return Watch(store, view, "n", list_options({"timeoutSeconds": "2", **query}))


class Client:
    """Collects events; reads nothing while `reading` is clear."""

    def __init__(self) -> None:
        self.events: list[dict] = []
        self.reading = asyncio.Event()
        self.reading.set()

    async def send(self, lines):
        await self.reading.wait()
        self.events += [json.loads(line) for line in lines.splitlines()]

    @property
    def types(self):
        return [event["type"] for event in self.events]


async def test_a_client_that_falls_behind_must_list_again(store):
    client = Client()
    task = asyncio.create_task(watch(store, resourceVersion=str(store.revision)).run(client.send))
    await asyncio.sleep(0)
    client.reading.clear()
    put(store, "first")
    await asyncio.sleep(0.01)
    for index in range(100):
        put(store, f"m{index}")
    client.reading.set()
    await asyncio.wait_for(task, patient(5))
    assert client.types == ["ADDED", "ERROR"]
    assert client.events[-1]["object"]["code"] == 410


async def test_what_happens_during_the_first_part_is_not_lost(store):
    put(store, "before")
    client = Client()
    client.reading.clear()
    query = {"sendInitialEvents": "true", "allowWatchBookmarks": "true", "resourceVersionMatch": "NotOlderThan"}
    known = store.revision
    task = asyncio.create_task(watch(store, timeoutSeconds="1", **query).run(client.send))
    await asyncio.sleep(0.01)
    put(store, "meanwhile")
    client.reading.set()
    await task
    assert client.types == ["ADDED", "BOOKMARK", "ADDED"]
    assert client.events[1]["object"]["metadata"]["resourceVersion"] == str(known)


async def test_bookmarks_come_even_when_all_news_is_for_others(store, monkeypatch):
    monkeypatch.setattr(list_watch, "BOOKMARK_SECONDS", 0.1)
    client = Client()
    query = {"labelSelector": "a=b", "allowWatchBookmarks": "true", "resourceVersion": str(store.revision)}
    task = asyncio.create_task(watch(store, timeoutSeconds="1", **query).run(client.send))
    for index in range(40):
        put(store, f"m{index}")
        await asyncio.sleep(0.02)
    await task
    assert set(client.types) == {"BOOKMARK"}
    assert 4 <= len(client.events) <= 12
    revisions = [int(event["object"]["metadata"]["resourceVersion"]) for event in client.events]
    assert revisions == sorted(revisions)


@pytest.mark.parametrize("since", ["1", "999999"])
async def test_revisions_that_are_not_known(store, since):
    for index in range(50):
        put(store, f"m{index}")
    client = Client()
    await watch(store, resourceVersion=since).run(client.send)
    assert client.types == ["ERROR"]
    assert client.events[0]["object"]["reason"] == "Expired"


def test_pages_of_a_revision_that_is_gone(store):
    """The error has a token for the rest, which is of the current revision."""
    resource = Registry().get("", "v1", "configmaps")
    for index in range(3):
        put(store, f"c{index}")
    _, metadata = list_watch.list_objects(store, resource, "n", list_options({"limit": "1"}))
    for _ in range(41):
        put(store, "c1", {"a": "b"})
    put(store, "c9")
    with pytest.raises(ApiError, match="too old to display a consistent list result") as caught:
        list_watch.list_objects(store, resource, "n", list_options({"continue": metadata["continue"]}))
    status = caught.value.status()
    assert (status["code"], status["reason"]) == (410, "Expired")
    rest, _ = list_watch.list_objects(store, resource, "n", list_options({"continue": status["metadata"]["continue"]}))
    assert [item.obj["metadata"]["name"] for item in rest] == ["c1", "c2", "c9"]
    exact = {"resourceVersion": metadata["resourceVersion"], "resourceVersionMatch": "Exact"}
    with pytest.raises(ApiError, match="The resourceVersion for the provided list is too old"):
        list_watch.list_objects(store, resource, "n", list_options(exact))
