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
