"""Watches: from where they start, what they tell, when they end."""

import asyncio
import time

from tests.patience import LEAST_SECONDS

MERGE = "application/merge-patch+json"


async def revision(api):
    return (await api.call("GET", api.maps))[1]["metadata"]["resourceVersion"]


def own(api, events):
    """Events without those of objects that other controllers of a real cluster make."""
    return [e for e in events if not api.foreign(e["object"])]


async def later(api, *calls, delay=0.2):
    await asyncio.sleep(delay)
    for method, path, body in calls:
        await api.call(method, path, body, MERGE if method == "PATCH" else "application/json")


async def test_from_a_list_on_only_news(api):
    await api.call("POST", api.maps, api.config_map("c1"))
    since = await revision(api)
    work = asyncio.create_task(later(api, ("PATCH", f"{api.maps}/c1", {"data": {"w": "1"}})))
    events = await api.watch(api.maps, 15, expect=1, resourceVersion=since)
    await work
    assert [(e["type"], e["object"]["data"]["w"]) for e in own(api, events)] == [("MODIFIED", "1")]


async def test_missed_events_are_delivered(api):
    since = await revision(api)
    await api.call("POST", api.maps, api.config_map("c1"))
    await api.call("PATCH", f"{api.maps}/c1", {"data": {"w": "1"}}, MERGE)
    await api.call("DELETE", f"{api.maps}/c1")
    events = own(api, await api.watch(api.maps, 15, expect=3, resourceVersion=since))
    assert [e["type"] for e in events] == ["ADDED", "MODIFIED", "DELETED"]
    revisions = [int(e["object"]["metadata"]["resourceVersion"]) for e in events]
    assert revisions == sorted(set(revisions))


async def test_without_revision_the_state_comes_first(api):
    await api.call("POST", api.maps, api.config_map("c1"))
    events = own(api, await api.watch(api.maps, 15, expect=1))
    assert [(e["type"], e["object"]["metadata"]["name"]) for e in events] == [("ADDED", "c1")]


async def test_selectors_turn_changes_into_comings_and_goings(api):
    since = await revision(api)
    await api.call("POST", api.maps, api.config_map("c1", {"a": "no"}))
    await api.call("PATCH", f"{api.maps}/c1", {"metadata": {"labels": {"a": "yes"}}}, MERGE)
    await api.call("PATCH", f"{api.maps}/c1", {"data": {"w": "1"}}, MERGE)
    await api.call("PATCH", f"{api.maps}/c1", {"metadata": {"labels": {"a": "no"}}}, MERGE)
    await api.call("DELETE", f"{api.maps}/c1")
    events = await api.watch(api.maps, 15, expect=3, resourceVersion=since, labelSelector="a=yes")
    assert [e["type"] for e in events] == ["ADDED", "MODIFIED", "DELETED"]
    assert events[-1]["object"]["metadata"]["labels"] == {"a": "yes"}
    assert await api.watch(api.maps, 0.5, resourceVersion=since, labelSelector="a=never") == []


async def test_one_object(api):
    since = await revision(api)
    await api.call("POST", api.maps, api.config_map("c1"))
    await api.call("POST", api.maps, api.config_map("c2"))
    events = await api.watch(api.maps, 15, expect=1, resourceVersion=since, fieldSelector="metadata.name=c2")
    assert [e["object"]["metadata"]["name"] for e in events] == ["c2"]
    code, obj = await api.call("GET", f"{api.maps}/c2", watch="true")
    assert (code, obj["metadata"]["name"]) == (200, "c2")


async def test_timeout_ends_it(api):
    since, start = await revision(api), time.monotonic()
    events = await api.watch(api.maps, LEAST_SECONDS, timeoutSeconds="1", resourceVersion=since)
    assert own(api, events) == []
    assert 0.9 < time.monotonic() - start < LEAST_SECONDS, "the server ends it, not the client"


async def test_initial_events_end_with_a_bookmark(api):
    await api.call("POST", api.maps, api.config_map("c1"))
    query = {"allowWatchBookmarks": "true", "sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
    events = await api.watch(api.maps, 15, expect=2, **query)
    kinds = [e["type"] for e in own(api, events)]
    assert kinds[:2] == ["ADDED", "BOOKMARK"]
    first = next(e for e in events if e["type"] == "BOOKMARK")
    assert first["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
    code, _ = await api.call("GET", api.maps, watch="true", sendInitialEvents="true")
    assert code == 422


async def test_tables(api):
    await api.call("POST", api.maps, api.config_map("c1"))
    headers = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    query = {"watch": "true", "fieldSelector": "metadata.name=c1"}
    async with api.session.get(api.server.url + api.maps, params=query, headers=headers, ssl=api.context) as response:
        line = await response.content.readline()
    assert b'"kind":"Table"' in line


async def test_bad_revisions(api):
    code, _ = await api.call("GET", api.maps, watch="true", resourceVersion="abc")
    assert code in (400, 500), "500 is what real servers say of a client's mistake here"


async def test_many_watchers_see_everything(api):
    since = await revision(api)
    watchers = [asyncio.create_task(api.watch(api.maps, 20, expect=50, resourceVersion=since)) for _ in range(10)]
    await asyncio.sleep(0.3)
    await asyncio.gather(*(api.call("POST", api.maps, api.config_map(f"m{i}")) for i in range(50)))
    for events in await asyncio.gather(*watchers):
        assert len(own(api, events)) == 50
