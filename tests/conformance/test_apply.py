"""Server-side apply: ownership, conflicts, removal of what is applied no more."""

import json

import pytest

MERGE, APPLY = "application/merge-patch+json", "application/apply-patch+yaml"


async def apply(api, name, data, manager, path=None, **query):
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}
    return await api.call("PATCH", path or f"{api.maps}/{name}", json.dumps(body), APPLY, fieldManager=manager, **query)


def owned(obj, manager, operation="Apply"):
    entries = [e for e in obj["metadata"]["managedFields"] if (e["manager"], e["operation"]) == (manager, operation)]
    return entries[0]["fieldsV1"] if entries else None


async def test_apply_creates_and_owns(api):
    code, obj = await apply(api, "s", {"a": "1", "b": "1"}, "m1")
    assert code == 201
    assert owned(obj, "m1") == {"f:data": {"f:a": {}, "f:b": {}}}
    code, _ = await apply(api, "s", {"a": "1", "b": "1"}, "m1")
    assert code == 200


async def test_needs_a_manager(api):
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "s"}}
    assert (await api.call("PATCH", f"{api.maps}/s", json.dumps(body), APPLY))[0] in (400, 422)


async def test_fields_not_applied_any_more_go(api):
    await apply(api, "s", {"a": "1", "b": "1"}, "m1")
    code, obj = await apply(api, "s", {"a": "1"}, "m1")
    assert (code, obj["data"]) == (200, {"a": "1"})


async def test_fields_of_others_stay(api):
    await apply(api, "s", {"a": "1", "b": "1"}, "m1")
    code, obj = await apply(api, "s", {"b": "1"}, "m2")
    assert code == 200
    code, obj = await apply(api, "s", {"a": "1"}, "m1")
    assert obj["data"] == {"a": "1", "b": "1"}
    assert owned(obj, "m1") == {"f:data": {"f:a": {}}}


async def test_conflicts_and_force(api):
    await apply(api, "s", {"a": "1"}, "m1")
    code, status = await apply(api, "s", {"a": "2"}, "m2")
    assert (code, status["reason"]) == (409, "Conflict")
    cause = status["details"]["causes"][0]
    assert (cause["reason"], cause["field"]) == ("FieldManagerConflict", ".data.a")
    assert 'conflict with "m1"' in cause["message"]
    code, obj = await apply(api, "s", {"a": "2"}, "m2", force="true")
    assert (code, obj["data"]) == (200, {"a": "2"})
    assert owned(obj, "m1") is None


async def test_plain_writes_take_ownership(api):
    await apply(api, "s", {"a": "1", "b": "1"}, "m1")
    _, obj = await api.call("PATCH", f"{api.maps}/s", {"data": {"a": "9"}}, MERGE, fieldManager="editor")
    assert owned(obj, "m1") == {"f:data": {"f:b": {}}}
    assert owned(obj, "editor", "Update") == {"f:data": {"f:a": {}}}
    code, status = await apply(api, "s", {"a": "1", "b": "1"}, "m1")
    assert (code, status["details"]["causes"][0]["field"]) == (409, ".data.a")


async def test_same_apply_twice_keeps_the_revision(api):
    _, first = await apply(api, "s", {"a": "1"}, "m1")
    _, second = await apply(api, "s", {"a": "1"}, "m1")
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


async def test_keyed_lists_merge_by_item(api, runs):
    async def tolerate(manager, *items):
        body = {**api.run("r"), "spec": {"tolerations": list(items)}}
        if manager == "m1":
            body["spec"]["workers"] = 2
        return await api.call("PATCH", f"{runs}/r", json.dumps(body), APPLY, fieldManager=manager)

    await tolerate("m1", {"key": "x", "value": "1"})
    code, obj = await tolerate("m2", {"key": "y", "value": "2"})
    assert code == 200, obj
    assert [t["key"] for t in obj["spec"]["tolerations"]] == ["x", "y"]
    assert owned(obj, "m2") == {"f:spec": {"f:tolerations": {'k:{"key":"y"}': {".": {}, "f:key": {}, "f:value": {}}}}}
    code, obj = await tolerate("m2")
    assert code == 200, obj
    assert [t["key"] for t in obj["spec"]["tolerations"]] == ["x"]


async def test_ports_without_protocol_are_the_same_port(api):
    path = f"/api/v1/namespaces/{api.namespace}/services/s"
    body = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s"},
        "spec": {"ports": [{"port": 80, "name": "a"}]},
    }
    code, first = await api.call("PATCH", path, json.dumps(body), APPLY, fieldManager="m1")
    assert code == 201, first
    code, second = await api.call("PATCH", path, json.dumps(body), APPLY, fieldManager="m1")
    assert (code, len(second["spec"]["ports"])) == (200, 1)
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


async def test_status_and_spec_are_applied_apart(api, runs):
    body = {**api.run("r"), "status": {"phase": "Sneaky"}}
    code, obj = await api.call("PATCH", f"{runs}/r", json.dumps(body), APPLY, fieldManager="op")
    assert code == 201
    assert "status" not in obj
    body = {**api.run("r", workers=9), "status": {"phase": "Running"}}
    code, obj = await api.call("PATCH", f"{runs}/r/status", json.dumps(body), APPLY, fieldManager="op")
    assert (code, obj["status"], obj["spec"]["workers"]) == (200, {"phase": "Running"}, 2)
    entry = next(e for e in obj["metadata"]["managedFields"] if e.get("subresource") == "status")
    assert entry["fieldsV1"] == {"f:status": {"f:phase": {}}}
    code, _ = await api.call("PATCH", f"{runs}/none/status", json.dumps(api.run("none")), APPLY, fieldManager="op")
    assert code == 404


@pytest.mark.parametrize("body", ["[]", "kind: [", "{}", '{"apiVersion":"v1","kind":"ConfigMap","metadata":[]}'])
async def test_malformed_configurations(api, body):
    code, _ = await api.call("PATCH", f"{api.maps}/s", body, APPLY, fieldManager="m")
    assert code == 400 or (code == 500 and not api.server.embedded), "real servers say 500 to fields of a wrong type"


async def test_dry_run_apply(api):
    code, _ = await apply(api, "s", {"a": "1"}, "m1", dryRun="All")
    assert code == 201
    assert (await api.call("GET", f"{api.maps}/s"))[0] == 404


async def tolerate(api, runs, manager, *keys, force="false", **items):
    """Apply a run with these tolerations; a value of None only names the key."""
    listed = [{"key": key} for key in keys] + [{"key": key, "value": value} for key, value in items.items()]
    body = {**api.run("r"), "spec": {"tolerations": listed, **({"workers": 2} if manager == "m1" else {})}}
    code, obj = await api.call("PATCH", f"{runs}/r", json.dumps(body), APPLY, fieldManager=manager, force=force)
    assert code in (200, 201), obj
    return [item["key"] for item in obj["spec"].get("tolerations") or ()]


async def test_applied_items_are_in_the_order_of_the_configuration(api, runs):
    """Init containers run, and variables are expanded, in the order of their list."""
    assert await tolerate(api, runs, "m1", "x", "y", "z") == ["x", "y", "z"]
    assert await tolerate(api, runs, "m1", "z", "x", "y") == ["z", "x", "y"]
    assert await tolerate(api, runs, "m2", "w") == ["z", "x", "y", "w"]
    assert await tolerate(api, runs, "m1", "y", "new", "x", "z") == ["y", "w", "new", "x", "z"]
    assert await tolerate(api, runs, "m2", "x", "w") == ["y", "new", "x", "z", "w"]


async def test_who_owns_a_field_of_an_item_does_not_keep_the_item(api, runs):
    await tolerate(api, runs, "m1", x="1", y="1")
    patch = {"spec": {"tolerations": [{"key": "x", "value": "2"}, {"key": "y", "value": "1"}]}}
    await api.call("PATCH", f"{runs}/r", patch, MERGE, fieldManager="editor")
    assert await tolerate(api, runs, "m1", y="1") == ["y"]
    _, obj = await api.call("GET", f"{runs}/r")
    assert owned(obj, "editor", "Update") is None


async def test_what_nobody_owns_goes_with_the_field_that_has_it(api, runs):
    """The default `backoffLimit` does not keep an empty spec, which then is missing as a whole."""
    await tolerate(api, runs, "m1", "x")
    body = {"apiVersion": api.run("r")["apiVersion"], "kind": "Run", "metadata": {"name": "r", "labels": {"a": "b"}}}
    code, status = await api.call("PATCH", f"{runs}/r", json.dumps(body), APPLY, fieldManager="m1")
    assert (code, status["details"]["causes"][0]["field"]) == (422, "spec")


async def test_an_empty_list_has_no_owner(api, runs):
    await tolerate(api, runs, "m1")
    _, obj = await api.call("GET", f"{runs}/r")
    assert owned(obj, "m1") == {"f:spec": {"f:workers": {}}}
