"""Creating and naming objects, and what the server adds to them."""

import pytest


async def test_create_sets_metadata(api):
    code, obj = await api.call("POST", api.maps, api.config_map("c1", {"a": "b"}))
    assert code == 201
    metadata = obj["metadata"]
    assert metadata["uid"]
    assert metadata["resourceVersion"].isdigit()
    assert metadata["creationTimestamp"].endswith("Z")
    assert metadata["namespace"] == api.namespace


async def test_second_create_conflicts(api):
    await api.call("POST", api.maps, api.config_map("c1"))
    code, status = await api.call("POST", api.maps, api.config_map("c1"))
    assert (code, status["reason"], status["kind"]) == (409, "AlreadyExists", "Status")


async def test_missing_object_is_named(api):
    code, status = await api.call("GET", f"{api.maps}/nope")
    assert (code, status["reason"]) == (404, "NotFound")
    assert status["details"] == {"name": "nope", "kind": "configmaps"} | status["details"]


async def test_generated_names(api):
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"generateName": "g-"}}
    names = {(await api.call("POST", api.maps, body))[1]["metadata"]["name"] for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("g-") and len(name) == 7 for name in names)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "Bad_Name!"}, "metadata.name"),
        ({"name": "ok", "labels": {"a": "no spaces"}}, "metadata.labels"),
        ({"name": "ok", "labels": {"-a": "b"}}, "metadata.labels"),
        ({"name": "ok", "annotations": {"a b": "c"}}, "metadata.annotations"),
        ({"name": "ok", "finalizers": ["not/a/name"]}, "metadata.finalizers"),
        ({"name": "ok", "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": ""}]}, "uid"),
    ],
)
async def test_metadata_is_checked(api, change, field):
    code, status = await api.call("POST", api.maps, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": change})
    assert (code, status["reason"]) == (422, "Invalid")
    assert field in status["details"]["causes"][0]["field"]


async def test_objects_need_their_namespace(api):
    code, status = await api.call("POST", "/api/v1/namespaces/nonexistent/configmaps", api.config_map("x"))
    assert (code, status["details"]["kind"]) == (404, "namespaces")
    body = api.config_map("x", namespace="another")
    assert (await api.call("POST", api.maps, body))[0] == 400


async def test_body_must_be_of_the_path(api):
    code, status = await api.call("POST", api.maps, {**api.config_map("x"), "kind": "Secret"})
    assert code == 400, status
    code, status = await api.call("POST", api.maps, {**api.config_map("x"), "apiVersion": "v2"})
    assert code == 400, status


async def test_dry_run_leaves_nothing(api):
    code, obj = await api.call("POST", api.maps, api.config_map("c2"), dryRun="All")
    assert (code, obj["data"]) == (201, {"k": "v"})
    assert (await api.call("GET", f"{api.maps}/c2"))[0] == 404
    assert (await api.call("POST", api.maps, api.config_map("c2"), dryRun="Some"))[0] == 422


async def test_wrong_types_are_rejected(api):
    code, status = await api.call("POST", api.maps, {**api.config_map("x"), "data": {"k": 5}})
    assert (code, status["reason"]) == (400, "BadRequest")


async def test_field_validation(api):
    body = {**api.config_map("x"), "bogus": 1}
    code, status = await api.call("POST", api.maps, body, fieldValidation="Strict")
    assert code == 400
    assert 'unknown field "bogus"' in status["message"]
    code, obj = await api.call("POST", api.maps, body, fieldValidation="Warn")
    assert code == 201
    assert "bogus" not in obj


async def test_yaml_bodies(api):
    head = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: yes-man}\n"
    body = head + "data:\n  day: '2026-01-01'\n  text: |\n    two\n    lines\n"
    code, obj = await api.call("POST", api.maps, body, "application/yaml")
    assert code == 201
    assert obj["data"] == {"day": "2026-01-01", "text": "two\nlines\n"}
    for word in ("y", "n", "Yes", "off"):
        body = f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: b}}\ndata: {{k: {word}}}\n"
        assert (await api.call("POST", api.maps, body, "application/yaml"))[0] == 400, f"{word} is a boolean"


async def test_secrets_encode_string_data(api):
    path = f"/api/v1/namespaces/{api.namespace}/secrets"
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"a": "b"}}
    code, obj = await api.call("POST", path, body)
    assert (code, obj["data"], obj["type"]) == (201, {"a": "Yg=="}, "Opaque")
    assert "stringData" not in obj
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s2"}, "data": {"a": "not base64!"}}
    assert (await api.call("POST", path, body))[0] in (400, 422)


async def test_services_get_an_address(api):
    path = f"/api/v1/namespaces/{api.namespace}/services"
    body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}}
    _, first = await api.call("POST", path, body)
    _, second = await api.call("POST", path, {**body, "metadata": {"name": "t"}})
    assert first["spec"]["clusterIP"] != second["spec"]["clusterIP"]
    assert first["spec"]["ports"][0] == {"port": 80, "protocol": "TCP", "targetPort": 80}
    headless = {**body, "metadata": {"name": "h"}, "spec": {"clusterIP": "None", "ports": [{"port": 80}]}}
    code, obj = await api.call("POST", path, headless)
    assert (code, obj["spec"]["clusterIP"]) == (201, "None")


async def test_quantities_become_canonical(api):
    resources = {"requests": {"cpu": "0.5", "memory": "1024Mi"}}
    body = api.pod("p", containers=[{"name": "a", "image": "b", "resources": resources}])
    _, obj = await api.call("POST", api.pods, body)
    assert obj["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "500m", "memory": "1Gi"}
    bad = {"requests": {"cpu": "many"}}
    body = api.pod("q", containers=[{"name": "a", "image": "b", "resources": bad}])
    assert (await api.call("POST", api.pods, body))[0] in (400, 422)
