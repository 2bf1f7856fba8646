"""Discovery, OpenAPI, other ways to see objects, health."""

import asyncio

import pytest

GROUP = "conformance.example.com"


async def get(api, path, accept):
    async with api.session.get(api.server.url + path, headers={"Accept": accept}, ssl=api.context) as response:
        return response.status, response.content_type, await response.read()


async def test_core_resources(api):
    _, listed = await api.call("GET", "/api/v1")
    resources = {r["name"]: r for r in listed["resources"]}
    assert {
        "pods",
        "pods/status",
        "pods/binding",
        "pods/eviction",
        "pods/log",
        "pods/exec",
        "nodes",
    } <= resources.keys()
    assert (resources["pods"]["kind"], resources["pods"]["namespaced"]) == ("Pod", True)
    assert resources["pods"]["shortNames"] == ["po"]
    assert "watch" in resources["configmaps"]["verbs"]


async def test_custom_resources(api, runs):
    _, listed = await api.call("GET", f"/apis/{GROUP}/v1")
    assert {r["name"] for r in listed["resources"]} >= {"runs", "runs/status", "runs/scale"}
    _, groups = await api.call("GET", "/apis")
    assert GROUP in {g["name"] for g in groups["groups"]}


async def test_all_in_one_document(api, runs):
    form = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    found = {}
    for _ in range(100):
        for path in ("/api", "/apis"):
            headers = {"Accept": f"{form},application/json"}
            async with api.session.get(api.server.url + path, headers=headers, ssl=api.context) as response:
                assert set(response.headers["Content-Type"].split(";")) == set(form.split(";"))
                document = await response.json()
            assert (document["kind"], document["apiVersion"]) == ("APIGroupDiscoveryList", "apidiscovery.k8s.io/v2")
            found |= {item["metadata"].get("name", ""): item["versions"] for item in document["items"]}
        if GROUP in found:
            break
        await asyncio.sleep(0.1)  # a real server gathers them now and then
    pods = next(r for r in found[""][0]["resources"] if r["resource"] == "pods")
    assert (pods["scope"], pods["singularResource"], pods["shortNames"]) == ("Namespaced", "pod", ["po"])
    assert pods["responseKind"] == {"group": "", "version": "", "kind": "Pod"}
    below = {s["subresource"]: s["responseKind"] for s in pods["subresources"]}
    assert below["eviction"] == {"group": "policy", "version": "v1", "kind": "Eviction"}
    run = next(r for r in found[GROUP][0]["resources"] if r["resource"] == "runs")
    assert {s["subresource"] for s in run["subresources"]} == {"status", "scale"}


@pytest.mark.parametrize("path", ["/api/v2", "/api/v1/x", "/apis/apps/v9", "/apis/apps/v1/x"])
async def test_unknown_resources(api, path):
    code, status = await api.call("GET", path)
    assert (code, status["reason"]) == (404, "NotFound")


@pytest.mark.parametrize(
    "path", ["/apis/none.example.com/v1", "/apis/none.example.com", "/nothing", f"/apis/{GROUP}/v9/x"]
)
async def test_unknown_paths(api, runs, path):
    assert await api.call("GET", path) == (404, "404 page not found\n")


async def test_openapi(api, runs):
    code, document = await api.call("GET", "/openapi/v2")
    assert code == 200
    assert "io.k8s.api.core.v1.Pod" in document["definitions"]
    _, index = await api.call("GET", "/openapi/v3")
    assert {"api/v1", "apis/apps/v1", f"apis/{GROUP}/v1"} <= index["paths"].keys()
    _, document = await api.call("GET", f"/openapi/v3/apis/{GROUP}/v1")
    path = document["paths"][f"/apis/{GROUP}/v1/namespaces/{{namespace}}/runs/{{name}}"]
    assert "fieldValidation" in {p["name"] for p in path["patch"]["parameters"]}
    schema = document["components"]["schemas"]["com.example.conformance.v1.Run"]
    assert schema["properties"]["spec"]["properties"]["workers"]["type"] == "integer"
    _, document = await api.call("GET", "/openapi/v3/api/v1")
    schemas = document["components"]["schemas"]
    assert "io.k8s.api.core.v1.PodSpec" in schemas


async def test_every_reference_of_openapi_leads_somewhere(api):
    _, document = await api.call("GET", "/openapi/v3/apis/apps/v1")
    names = document["components"]["schemas"].keys()
    pending = [document]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                assert node["$ref"].rpartition("/")[2] in names
            pending += node.values()
        elif isinstance(node, list):
            pending += node


async def test_ways_to_see_objects(api):
    await api.call("POST", api.maps, api.config_map("c"))
    form = "application/json;as={};v=v1;g=meta.k8s.io"
    code, _, body = await get(api, api.maps, form.format("Table") + ",application/json")
    assert (code, b'"kind":"Table"' in body) == (200, True)
    code, _, body = await get(api, api.maps, form.format("PartialObjectMetadataList"))
    assert b'"kind":"PartialObjectMetadataList"' in body
    assert b'"data"' not in body
    code, kind, body = await get(api, f"{api.maps}/c", "application/yaml")
    assert (code, kind, b"k: v" in body) == (200, "application/yaml", True)
    code, kind, _ = await get(api, f"{api.maps}/c", "application/vnd.kubernetes.protobuf,application/json")
    assert code == 200
    code, _, _ = await get(api, f"{api.maps}/c", "image/png")
    assert code == 406


async def test_reviews(api):
    version = "authorization.k8s.io/v1"
    body = {"apiVersion": version, "kind": "SelfSubjectAccessReview"}
    body["spec"] = {"resourceAttributes": {"verb": "get", "resource": "pods"}}
    code, answer = await api.call("POST", f"/apis/{version}/selfsubjectaccessreviews", body)
    assert (code, answer["status"]["allowed"]) == (201, True)
    version = "authentication.k8s.io/v1"
    body = {"apiVersion": version, "kind": "SelfSubjectReview"}
    code, answer = await api.call("POST", f"/apis/{version}/selfsubjectreviews", body)
    assert code == 201
    assert "system:masters" in answer["status"]["userInfo"]["groups"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/livez"])
async def test_health(api, path):
    assert await api.call("GET", path) == (200, "ok")
    assert await api.call("GET", f"{path}/ping") == (200, "ok")
    code, text = await api.call("GET", path, verbose="true")
    assert (code, text.splitlines()[0], text.splitlines()[-1]) == (200, "[+]ping ok", f"{path[1:]} check passed")


async def test_version(api):
    code, version = await api.call("GET", "/version")
    assert (code, version["major"]) == (200, "1")
    if api.server.embedded:
        assert "embedded" in version["gitVersion"]


async def test_methods_that_are_not_there(api):
    await api.call("POST", api.maps, api.config_map("c"))
    for method, path in (("PUT", api.maps), ("POST", f"{api.maps}/c"), ("POST", "/api/v1/configmaps")):
        assert (await api.call(method, path, api.config_map("c")))[0] == 405
    assert (await api.call("GET", f"{api.maps}/c/nothing"))[0] == 404
    assert (await api.call("PATCH", f"{api.maps}/c/status", {}))[0] == 404


async def test_the_column_of_readiness_gates(api):
    gates = [{"conditionType": "example.com/a"}, {"conditionType": "example.com/b"}]
    await api.call("POST", api.pods, api.pod("gated", readinessGates=gates))
    await api.call("POST", api.pods, api.pod("plain"))
    body = {"status": {"conditions": [{"type": "example.com/a", "status": "True"}]}}
    await api.call("PATCH", f"{api.pods}/gated/status", body, "application/strategic-merge-patch+json")
    headers = {"Accept": "application/json;as=Table;g=meta.k8s.io;v=v1"}
    async with api.session.get(api.server.url + api.pods, headers=headers, ssl=api.context) as response:
        table = await response.json()
    at = [column["name"] for column in table["columnDefinitions"]].index("Readiness Gates")
    assert {row["cells"][0]: row["cells"][at] for row in table["rows"]} == {"gated": "1/2", "plain": "<none>"}
