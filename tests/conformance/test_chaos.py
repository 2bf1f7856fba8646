"""Chaos rules: each fault happens to the requests that it is for, as often as it should, and to no others."""

import asyncio
import contextlib
import json
import time

import aiohttp
import pytest
import pytest_asyncio

from meshwright_local.apiserver.auth import certificates
from meshwright_local.apiserver.rest.chaos import Answer, Match, Rule
from meshwright_local.apiserver.rest.server import ApiServer
from meshwright_local.apiserver.status_errors import ApiError

MAPS = "/api/v1/namespaces/default/configmaps"
CHAOS = "/debug/chaos"


def config_map(name):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"k": "v"}}


class Kit:
    """A server of its own and a client."""

    def __init__(self, server, session) -> None:
        self.server, self.session = server, session

    async def call(self, method, path, body=None, headers=None, **query):
        async with self.session.request(
            method, self.server.url + path, json=body, params=query, headers=headers
        ) as response:
            self.headers = response.headers
            return response.status, await response.json()

    def watch(self, **query):
        return self.session.get(self.server.url + MAPS, params={"watch": "true", **query})


@pytest_asyncio.fixture
async def kit():
    server = ApiServer(None)
    await server.start()
    connector = aiohttp.TCPConnector(ssl=certificates.client_context(server.ca_pem))
    headers = {"Authorization": f"Bearer {server.token}", "User-Agent": "kopf/1.0"}
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        yield Kit(server, session)
    await server.stop()


async def event(response, seconds=5.0):
    line = await asyncio.wait_for(response.content.readline(), seconds)
    return json.loads(line)["object"]["metadata"]["name"] if line else None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (403, "Forbidden"),
        (409, "Conflict"),
        (410, "Expired"),
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (503, "ServiceUnavailable"),
        (504, "Timeout"),
    ],
)
async def test_answers_with_errors(kit, code, reason):
    effect = {"type": "answer", "code": code, "message": "no"}
    kit.server.chaos.add({"match": {"verbs": ["create"], "resource": "configmaps", "count": 2}, "effect": effect})
    for _ in range(2):
        answer = await kit.call("POST", MAPS, config_map("a"))
        assert (answer[0], answer[1]["reason"], answer[1]["message"]) == (code, reason, "no")
    assert (await kit.call("POST", MAPS, config_map("a")))[0] == 201
    assert kit.server.chaos.rules == []


async def test_retry_after_and_own_reasons(kit):
    effect = {"type": "answer", "code": 429, "reason": "SlowDown", "message": "later", "retryAfter": 7}
    kit.server.chaos.add({"effect": effect})
    code, status = await kit.call("GET", MAPS)
    assert (code, status["reason"], status["details"]["retryAfterSeconds"]) == (429, "SlowDown", 7)
    assert kit.headers["Retry-After"] == "7"


@pytest.mark.parametrize(
    ("match", "deleted_pod"),
    [
        ({"verbs": ["create"]}, {"create"}),
        ({"resource": "configmaps"}, {"create", "get", "list"}),
        ({"resource": "leases.coordination.k8s.io"}, {"lease"}),
        ({"resource": "leases"}, {"lease"}),
        ({"namespace": "default", "verbs": ["list"]}, {"list", "lease"}),
        ({"name": "made"}, {"create"}),
        ({"name": "default"}, {"get"}),
        ({"subresource": "status"}, {"status"}),
        ({"userAgent": "curl"}, {"get"}),
        ({"verbs": ["delete"]}, set()),
        ({"probability": 0}, set()),
    ],
)
async def test_matches(kit, match, deleted_pod):
    kit.server.chaos.add({"match": match, "effect": {"type": "answer", "code": 500}})
    space = "/api/v1/namespaces/default"
    calls = {
        "create": ("POST", MAPS, config_map("made"), None),
        "list": ("GET", MAPS, None, None),
        "get": ("GET", f"{MAPS}/default", None, {"User-Agent": "a curl of my own"}),
        "lease": ("GET", "/apis/coordination.k8s.io/v1/namespaces/default/leases", None, None),
        "status": ("GET", f"{space}/pods/none/status", None, None),
    }
    assert {name for name, call in calls.items() if (await kit.call(*call))[0] == 500} == deleted_pod


async def test_delay(kit):
    kit.server.chaos.add({"match": {"count": 1}, "effect": {"type": "delay", "seconds": 0.4}})
    start = time.monotonic()
    assert (await kit.call("GET", MAPS))[0] == 200
    assert time.monotonic() - start >= 0.4


async def test_lost_answers(kit):
    kit.server.chaos.add({"match": {"verbs": ["create"], "count": 1}, "effect": {"type": "lostAnswer"}})
    with pytest.raises(aiohttp.ClientError):
        await kit.call("POST", MAPS, config_map("a"))
    assert (await kit.call("GET", f"{MAPS}/a"))[0] == 200, "it was written all the same"
    assert (await kit.call("POST", MAPS, config_map("b")))[0] == 201


async def test_dropped_watches(kit):
    async with kit.watch() as cut, kit.watch(labelSelector="a=b") as other:
        await kit.call("POST", MAPS, config_map("a"))
        assert await event(cut) == "a"
        kit.server.chaos.add({"match": {"resource": "configmaps"}, "effect": {"type": "dropWatches"}})
        for response in (cut, other):
            with pytest.raises(aiohttp.ClientError):
                await event(response)
    assert kit.server.chaos.rules == [], "it happens once"
    async with kit.watch() as again:
        assert await event(again) == "a"


async def test_delayed_events(kit):
    async with kit.watch() as response:
        rule = {"match": {"verbs": ["watch"]}, "effect": {"type": "delayEvents", "seconds": 0.6}}
        kit.server.chaos.add(rule)
        start = time.monotonic()
        for name in ("a", "b"):
            await kit.call("POST", MAPS, config_map(name))
            await asyncio.sleep(0.2)
        for name, least in (("a", 0.6), ("b", 0.8)):
            assert await event(response) == name
            assert time.monotonic() - start >= least
        kit.server.chaos.clear()
        await kit.call("POST", MAPS, config_map("c"))
        assert await event(response) == "c"


async def test_half_open_watches(kit):
    async with kit.watch(timeoutSeconds="1") as response:
        kit.server.chaos.add({"match": {"verbs": ["watch"], "count": 1}, "effect": {"type": "halfOpen"}})
        await kit.call("POST", MAPS, config_map("a"))
        with pytest.raises(TimeoutError):
            await event(response, 1.6)
    async with kit.watch() as response:
        assert await event(response) == "a", "the count was for one"


async def test_stale_reads(kit):
    _, first = await kit.call("POST", MAPS, config_map("a"))
    await kit.call("POST", MAPS, config_map("b"))
    await kit.call("DELETE", f"{MAPS}/a")
    kit.server.chaos.add({"match": {"verbs": ["get", "list"]}, "effect": {"type": "stale", "revisions": 2}})
    _, listed = await kit.call("GET", MAPS)
    assert [item["metadata"]["name"] for item in listed["items"]] == ["a"]
    revision = listed["metadata"]["resourceVersion"]
    assert revision == first["metadata"]["resourceVersion"]
    assert (await kit.call("GET", f"{MAPS}/a"))[0] == 200
    assert (await kit.call("GET", f"{MAPS}/b"))[0] == 404
    async with kit.watch(resourceVersion=revision) as response:
        assert [await event(response), await event(response)] == ["b", "a"], "a watch from there tells the rest"
    assert (await kit.call("POST", MAPS, config_map("b")))[0] == 409, "writes see the truth"


async def test_rules_over_http(kit):
    rules = [
        {"match": {"verbs": ["patch"], "userAgent": "kopf", "count": 3}, "effect": {"type": "answer", "code": 409}},
        {"effect": {"type": "stale", "revisions": 20}},
    ]
    assert (await kit.call("PUT", CHAOS, rules))[0] == 200
    code, shown = await kit.call("GET", CHAOS)
    assert (code, shown) == (200, [rules[0], {"effect": rules[1]["effect"]}])
    assert (await kit.call("PATCH", f"{MAPS}/a", {}))[0] == 409
    _, shown = await kit.call("GET", CHAOS)
    assert shown[0]["match"]["count"] == 2
    assert (await kit.call("PUT", CHAOS, shown))[0] == 200
    assert (await kit.call("DELETE", CHAOS)) == (200, [])
    assert (await kit.call("GET", CHAOS)) == (200, [])


@pytest.mark.parametrize(
    ("rules", "field"),
    [
        ({"effect": {}}, "list"),
        ([{}], "effect"),
        ([{"effect": {"type": "explode"}}], "explode"),
        ([{"effect": {"type": "answer"}}], "code"),
        ([{"effect": {"type": "delay", "seconds": -1}}], "seconds"),
        ([{"effect": {"type": "halfOpen"}, "match": {"verb": "get"}}], "verb"),
        ([{"effect": {"type": "halfOpen"}, "match": {"probability": 2}}], "probability"),
        ("rubbish", "list"),
    ],
)
async def test_malformed_rules(kit, rules, field):
    await kit.call("PUT", CHAOS, [{"effect": {"type": "lostAnswer"}, "match": {"name": "x"}}])
    code, status = await kit.call("PUT", CHAOS, rules)
    assert (code, status["reason"]) == (400, "BadRequest")
    assert field in status["message"]
    assert len(kit.server.chaos.rules) == 1, "what was there stays"


async def test_only_administrators_make_chaos(kit):
    path = "/api/v1/namespaces/default/serviceaccounts"
    await kit.call("POST", path, {"metadata": {"name": "op"}})
    _, answer = await kit.call("POST", f"{path}/op/token", {"spec": {}})
    headers = {"Authorization": f"Bearer {answer['status']['token']}"}
    for method in ("GET", "PUT", "DELETE"):
        assert (await kit.call(method, CHAOS, [], headers=headers))[0] == 403
    assert (await kit.call("POST", CHAOS, []))[0] == 405


async def test_probability(kit):
    kit.server.chaos.add(Rule(match=Match(probability=0.5), effect=Answer(type="answer", code=503)))
    codes = [(await kit.call("GET", MAPS))[0] for _ in range(60)]
    assert 5 < codes.count(503) < 55


def test_rules_of_the_wrong_kind_are_rejected_in_process():
    with contextlib.closing(asyncio.new_event_loop()), pytest.raises(ApiError, match="effect"):
        ApiServer(None).chaos.replace([{"match": {}}])
