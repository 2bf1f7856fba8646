"""Replacing and patching: what wins, what conflicts, what leaves no trace."""

import pytest

MERGE, JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


@pytest.fixture
async def made(api):
    _, obj = await api.call("POST", api.maps, api.config_map("c"))
    return obj


async def test_put_replaces_and_stale_put_conflicts(api, made):
    code, obj = await api.call("PUT", f"{api.maps}/c", {**made, "data": {"n": "1"}})
    assert (code, obj["data"]) == (200, {"n": "1"})
    code, status = await api.call("PUT", f"{api.maps}/c", {**made, "data": {"n": "2"}})
    assert (code, status["reason"]) == (409, "Conflict")
    assert "the object has been modified" in status["message"]


async def test_put_keeps_identity(api, made):
    body = {**made, "metadata": {"name": "c"}}
    code, obj = await api.call("PUT", f"{api.maps}/c", body)
    assert code == 200
    assert obj["metadata"]["uid"] == made["metadata"]["uid"]
    assert obj["metadata"]["creationTimestamp"] == made["metadata"]["creationTimestamp"]
    other = {**made, "metadata": {**made["metadata"], "name": "d"}}
    assert (await api.call("PUT", f"{api.maps}/c", other))[0] == 400
    assert (await api.call("PUT", f"{api.maps}/missing", {**made, "metadata": {"name": "missing"}}))[0] == 404
    wrong = {**made, "metadata": {**made["metadata"], "uid": "wrong", "resourceVersion": ""}}
    assert (await api.call("PUT", f"{api.maps}/c", wrong))[0] == 409


async def test_stale_patch_conflicts(api, made):
    await api.call("PATCH", f"{api.maps}/c", {"data": {"x": "1"}}, MERGE)
    patch = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}, "data": {"x": "y"}}
    assert (await api.call("PATCH", f"{api.maps}/c", patch, MERGE))[0] == 409


async def test_json_patch(api, made):
    path = f"{api.maps}/c"
    code, obj = await api.call("PATCH", path, [{"op": "add", "path": "/data/m", "value": "3"}], JSON_PATCH)
    assert (code, obj["data"]) == (200, {"k": "v", "m": "3"})
    failing = [{"op": "test", "path": "/data/m", "value": "no"}, {"op": "remove", "path": "/data/m"}]
    assert (await api.call("PATCH", path, failing, JSON_PATCH))[0] == 422
    assert (await api.call("PATCH", path, [{"op": "remove", "path": "/data/zz"}], JSON_PATCH))[0] == 422
    assert (await api.call("PATCH", path, {"op": "add"}, JSON_PATCH))[0] == 400
    assert (await api.call("GET", path))[1]["data"] == {"k": "v", "m": "3"}


async def test_merge_patch_null_deletes(api, made):
    await api.call("PATCH", f"{api.maps}/c", {"data": {"m": "1"}}, MERGE)
    code, obj = await api.call("PATCH", f"{api.maps}/c", {"data": {"k": None}}, MERGE)
    assert (code, obj["data"]) == (200, {"m": "1"})


async def test_unknown_patch_type(api, made):
    code, status = await api.call("PATCH", f"{api.maps}/c", {"data": {}}, "text/plain")
    assert (code, status["reason"]) == (415, "UnsupportedMediaType")


async def test_no_op_writes_keep_the_revision(api, made):
    path, revision = f"{api.maps}/c", made["metadata"]["resourceVersion"]
    for method, body, kind in (
        ("PATCH", {"data": {"k": "v"}}, MERGE),
        ("PATCH", {"data": {"k": "v"}}, STRATEGIC),
        ("PATCH", [{"op": "replace", "path": "/data/k", "value": "v"}], JSON_PATCH),
        ("PUT", made, "application/json"),
    ):
        code, obj = await api.call(method, path, body, kind)
        assert (code, obj["metadata"]["resourceVersion"]) == (200, revision)


async def test_strategic_merge_by_key(api):
    await api.call("POST", api.pods, api.pod("p"))
    patch = {"spec": {"containers": [{"name": "a", "image": "busybox:2"}]}}
    code, obj = await api.call("PATCH", f"{api.pods}/p", patch, STRATEGIC)
    container = obj["spec"]["containers"][0]
    assert (code, container["image"], container["env"]) == (200, "busybox:2", [{"name": "A", "value": "1"}])


async def test_strategic_directives(api):
    body = api.config_map("d", {"a": "1", "b": "2"}, finalizers=["example.com/x", "example.com/y"])
    await api.call("POST", api.maps, body)
    patch = {
        "metadata": {
            "$deleteFromPrimitiveList/finalizers": ["example.com/x"],
            "labels": {"$patch": "replace", "c": "3"},
        }
    }
    code, obj = await api.call("PATCH", f"{api.maps}/d", patch, STRATEGIC)
    assert code == 200, obj
    assert obj["metadata"]["finalizers"] == ["example.com/y"]
    assert obj["metadata"]["labels"] == {"c": "3"}
    await api.call("PATCH", f"{api.maps}/d", {"metadata": {"finalizers": None}}, MERGE)


async def test_immutable_config_map(api):
    await api.call("POST", api.maps, {**api.config_map("i"), "immutable": True})
    assert (await api.call("PATCH", f"{api.maps}/i", {"data": {"k": "w"}}, MERGE))[0] == 422
    assert (await api.call("PATCH", f"{api.maps}/i", {"metadata": {"labels": {"a": "b"}}}, MERGE))[0] == 200


async def test_names_in_paths(api, made):
    for method, body in (("GET", None), ("DELETE", None), ("PATCH", {"data": {}})):
        code, answer = await api.call(method, f"{api.maps}/a%25b", body, MERGE)
        assert (code, answer["message"]) == (400, "Name parameter invalid: \"a%b\": may not contain '%'")
    for name in ("c", "nobody", "a%25b"):
        code, answer = await api.call("PUT", f"{api.maps}/{name}", api.config_map("other"))
        assert (code, answer["reason"]) == (400, "BadRequest")
        assert answer["message"].startswith("the name of the object (other) does not match the name on the URL (")
    assert (await api.call("PUT", f"{api.maps}/nobody", api.config_map("nobody")))[0] in (201, 404)
