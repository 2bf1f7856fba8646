"""Lists: kinds, selectors, pages."""

import pytest


async def names(api, **query):
    code, answer = await api.call("GET", api.maps, **query)
    assert code == 200, answer
    return [item["metadata"]["name"] for item in answer["items"] if not api.foreign(item)]


@pytest.fixture
async def maps(api):
    for name, labels in (("c1", {"a": "b", "n": "5"}), ("c2", {"a": "z"}), ("c3", {})):
        await api.call("POST", api.maps, api.config_map(name, labels))
    return api.maps


async def test_list_has_kind_and_revision(api, maps):
    _, answer = await api.call("GET", maps)
    assert (answer["kind"], answer["apiVersion"]) == ("ConfigMapList", "v1")
    assert answer["metadata"]["resourceVersion"].isdigit()


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("a=b", ["c1"]),
        ("a==b", ["c1"]),
        ("a!=b", ["c2", "c3"]),
        ("a in (b,z),a!=z", ["c1"]),
        ("a notin (b)", ["c2", "c3"]),
        ("a", ["c1", "c2"]),
        ("!a", ["c3"]),
        ("a,n=5", ["c1"]),
        ("a=nope", []),
    ],
)
async def test_label_selectors(api, maps, selector, expected):
    assert await names(api, labelSelector=selector) == expected


@pytest.mark.parametrize("selector", ["a b", "a in b", "a=(", "=x", "a in (b", "a=b=c"])
async def test_bad_label_selectors(api, maps, selector):
    assert (await api.call("GET", maps, labelSelector=selector))[0] == 400


async def test_field_selectors(api, maps):
    assert await names(api, fieldSelector="metadata.name=c2") == ["c2"]
    assert await names(api, fieldSelector="metadata.name!=c2") == ["c1", "c3"]
    assert (await api.call("GET", maps, fieldSelector="data.k=v"))[0] == 400


async def test_pages(api):
    for index in range(5):
        await api.call("POST", api.maps, api.config_map(f"pg{index}", {"pg": "1"}))
    seen, token, revisions = [], "", set()
    for _ in range(3):
        query = {"continue": token} if token else {}
        _, page = await api.call("GET", api.maps, limit="2", labelSelector="pg=1", **query)
        seen += [item["metadata"]["name"] for item in page["items"]]
        revisions.add(page["metadata"]["resourceVersion"])
        token = page["metadata"].get("continue", "")
    assert seen == [f"pg{index}" for index in range(5)]
    assert not token
    assert len(revisions) == 1
    assert (await api.call("GET", api.maps, limit="2", **{"continue": "rubbish"}))[0] == 400


async def test_all_namespaces_and_one(api, maps):
    _, everywhere = await api.call("GET", "/api/v1/configmaps", labelSelector="n=5")
    assert api.namespace in {item["metadata"]["namespace"] for item in everywhere["items"]}
    _, elsewhere = await api.call("GET", "/api/v1/namespaces/kube-public/configmaps", labelSelector="n=5")
    assert elsewhere["items"] == []


async def test_revision_of_the_future(api, maps):
    code, status = await api.call("GET", maps, resourceVersion="999999999", resourceVersionMatch="NotOlderThan")
    assert (code, status["reason"]) == (504, "Timeout")
    assert status["message"].startswith("Timeout: Too large resource version: 999999999, current: ")


OLD = {"resourceVersion": "1"}
MATCH = "resourceVersionMatch: "
UNLESS = f"{MATCH}Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided"
CONTINUE = f"{MATCH}Forbidden: resourceVersionMatch is forbidden when continue is provided"
REQUIRES = f"{MATCH}Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
FOR_WATCH = f"{MATCH}Forbidden: resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided"
ONLY = f'{MATCH}Unsupported value: "Exact": supported values: "NotOlderThan"'


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ({"resourceVersionMatch": "Exact"}, UNLESS),
        (
            {"resourceVersionMatch": "Exact", "resourceVersion": "0"},
            f'{MATCH}Forbidden: resourceVersionMatch "exact" is forbidden for resourceVersion "0"',
        ),
        (
            {"resourceVersionMatch": "Weird", **OLD},
            f'{MATCH}Unsupported value: "Weird": supported values: "Exact", "NotOlderThan", ""',
        ),
        ({"resourceVersionMatch": "Exact", "continue": "x", **OLD}, CONTINUE),
        ({"sendInitialEvents": "true"}, "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for list"),
        ({"watch": "true", "sendInitialEvents": "true"}, REQUIRES),
        ({"watch": "true", "resourceVersionMatch": "NotOlderThan", **OLD}, FOR_WATCH),
        (
            {"watch": "true", "sendInitialEvents": "true", "resourceVersionMatch": "Exact", **OLD},
            f"[{REQUIRES}, {ONLY}]",
        ),
    ],
)
async def test_options_that_exclude_each_other(api, query, text):
    code, status = await api.call("GET", api.maps, **query)
    assert (code, status["message"]) == (422, f'ListOptions.meta.k8s.io "" is invalid: {text}')


@pytest.fixture
async def revisions(api):
    """The revisions of five objects, each made after the other."""
    found = []
    for index in range(5):
        _, made = await api.call("POST", api.maps, api.config_map(f"r{index}", {"r": "1"}))
        found.append(made["metadata"]["resourceVersion"])
    return found


async def test_exactly_that_revision(api, revisions):
    query = {"labelSelector": "r=1", "resourceVersion": revisions[1]}
    _, page = await api.call("GET", api.maps, resourceVersionMatch="Exact", **query)
    assert page["metadata"]["resourceVersion"] == revisions[1]
    assert [item["metadata"]["name"] for item in page["items"]] == ["r0", "r1"]
    await api.call("DELETE", f"{api.maps}/r0")
    assert await names(api, resourceVersionMatch="Exact", **query) == ["r0", "r1"]
    # Without a match: exact if there is a limit, else a revision that is not older.
    assert await names(api, limit="5", **query) == ["r0", "r1"]
    assert await names(api, **query) == ["r1", "r2", "r3", "r4"]
    assert await names(api, resourceVersionMatch="NotOlderThan", **query) == ["r1", "r2", "r3", "r4"]


async def test_a_list_from_a_cache_is_not_in_pages(api, revisions):
    assert len(await names(api, labelSelector="r=1", resourceVersion="0", limit="2")) == 5


async def test_pages_are_of_one_revision(api, revisions):
    query = {"labelSelector": "r=1", "limit": "2"}
    _, page = await api.call("GET", api.maps, **query)
    token, revision = page["metadata"]["continue"], page["metadata"]["resourceVersion"]
    await api.call("DELETE", f"{api.maps}/r3")
    await api.call("POST", api.maps, api.config_map("r9", {"r": "1"}))
    _, page = await api.call("GET", api.maps, **{**query, "limit": "9", "continue": token})
    assert [item["metadata"]["name"] for item in page["items"]] == ["r2", "r3", "r4"]
    assert page["metadata"]["resourceVersion"] == revision
    code, status = await api.call("GET", api.maps, **{**query, "continue": token, "resourceVersion": revision})
    text = "specifying resource version is not allowed when using continue"
    assert (code, status["message"]) == (400, text)


async def test_a_revision_is_a_number(api):
    code, status = await api.call("GET", api.maps, resourceVersion="x")
    why = 'resourceVersion: Invalid value: "x": strconv.ParseUint: parsing "x": invalid syntax'
    assert (code, status["message"]) == (400, f"invalid resource version: {why}")
