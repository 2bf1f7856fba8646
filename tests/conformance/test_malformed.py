"""Whatever is sent, the answer is a Status with a fitting code, and the server goes on."""

import json
import random
import string

import pytest

from tests.randomness import first_seed, seeds
from tests.tiers import mostly_long

SEEDS = mostly_long(seeds(4), lambda seed: seed < 2)
VALUES = [
    None,
    True,
    -1,
    0,
    3.5,
    2**70,
    "",
    "x",
    "é" * 300,
    [],
    {},
    [None],
    [[]],
    {"a": None},
    {"": {}},
    "../..",
    "%2f",
]
KINDS = [
    "application/json",
    "application/yaml",
    "application/merge-patch+json",
    "application/json-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
    "application/vnd.kubernetes.protobuf",
    "text/html",
    "",
]


def mutate(generator, node):
    """The object with one place replaced by something odd."""
    if isinstance(node, dict) and node and generator.random() < 0.8:
        key = generator.choice(list(node))
        return {**node, key: mutate(generator, node[key])}
    if isinstance(node, list) and node and generator.random() < 0.8:
        index = generator.randrange(len(node))
        return [*node[:index], mutate(generator, node[index]), *node[index + 1 :]]
    return generator.choice(VALUES)


def good(answer):
    code, body = answer
    if code < 400 or answer == (404, "404 page not found\n"):
        return True
    return code != 500 and isinstance(body, dict) and body["kind"] == "Status" and body["code"] == code


def known(api, answer):
    """Whether this is the 500 of real servers to an applied field of a wrong type; the embedded one has no excuse."""
    code, body = answer
    return not api.server.embedded and code == 500 and body["message"].startswith("failed to create typed patch object")


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", SEEDS)
async def test_mutated_objects(api, runs, seed):
    generator = random.Random(seed)
    crd = json.loads(json.dumps((await api.call("GET", CRD))[1]))
    crd = {key: crd[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": "x.example.com"}}
    volumes = [{"name": "v", "configMap": {"name": "c", "items": [{"key": "k", "path": "p"}]}}]
    templates = [
        (api.maps, api.config_map("m", {"a": "b"})),
        (api.pods, api.pod("p", volumes=volumes, tolerations=[{"key": "a", "operator": "Exists"}])),
        (runs, api.run("r", tolerations=[{"key": "x", "value": "y"}], command=["a"])),
        (CRD.rpartition("/")[0], crd),
        ("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "x"}}),
        (f"/api/v1/namespaces/{api.namespace}/services", {"spec": {"ports": [{"port": 1}]}, "metadata": {"name": "s"}}),
        (f"/api/v1/namespaces/{api.namespace}/persistentvolumeclaims", CLAIM),
    ]
    for _ in range(120):
        path, template = generator.choice(templates)
        body = mutate(generator, template)
        if generator.random() < 0.3:
            body = mutate(generator, body)
        kind = generator.choice(KINDS[:2])
        answer = await api.call("POST", path, json.dumps(body), kind, dryRun="All")
        assert good(answer), (path, body, answer)


CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/runs.conformance.example.com"
CLAIM = {
    "metadata": {"name": "c"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", SEEDS)
async def test_mutated_patches(api, runs, seed):
    generator = random.Random(100 + seed)
    await api.call("POST", api.pods, api.pod("p", tolerations=[{"key": "a", "operator": "Exists"}]))
    await api.call("POST", runs, api.run("r", tolerations=[{"key": "x"}]))
    operations = [{"op": "replace", "path": "/spec/workers", "value": 3}, {"op": "move", "from": "/a", "path": "/b/0"}]
    for _ in range(120):
        path, template = generator.choice([(f"{api.pods}/p", api.pod("p")), (f"{runs}/r", api.run("r"))])
        path += generator.choice(["", "", "/status", "/scale"])
        kind = generator.choice(KINDS)
        body = mutate(generator, operations if "json-patch" in kind else template)
        query = {"fieldManager": "m"} if generator.random() < 0.8 else {}
        answer = await api.call("PATCH", path, json.dumps(body), kind, dryRun="All", force="true", **query)
        assert good(answer) or known(api, answer), (path, kind, body, answer)


async def test_objects_with_next_to_nothing_in_them(api):
    """Every kind without a spec, with an empty one, and what then meets such objects."""
    await api.call("POST", api.pods, api.pod("p"))
    for group in ("api/v1", "apis/apps/v1", "apis/batch/v1", "apis/policy/v1", "apis/rbac.authorization.k8s.io/v1"):
        _, listed = await api.call("GET", f"/{group}")
        for resource in (
            r for r in listed["resources"] if {"create", "get"} <= set(r["verbs"]) and "/" not in r["name"]
        ):
            inside = f"namespaces/{api.namespace}/" if resource["namespaced"] else ""
            path = f"/{group}/{inside}{resource['name']}"
            for index, more in enumerate(
                ({}, {"spec": {}}, {"spec": None}, {"status": {}}, {"spec": {"selector": {}}})
            ):
                dry = {} if resource["namespaced"] else {"dryRun": "All"}
                body = {"metadata": {"name": f"x{index}"}, **more}
                for method, where in (("POST", path), ("PUT", f"{path}/x{index}"), ("GET", f"{path}/x{index}")):
                    answer = await api.call(method, where, None if method == "GET" else body, **dry)
                    assert good(answer), (method, where, body, answer)
    assert (await api.call("POST", api.pods, api.pod("q")))[0] == 201
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}}
    await api.call("PATCH", f"{api.pods}/p/status", {"status": {"phase": "Running"}}, "application/merge-patch+json")
    assert good(await api.call("POST", f"{api.pods}/p/eviction", eviction))


@pytest.mark.fuzz
async def test_random_bytes_and_paths(api):
    generator = random.Random(first_seed(7))
    for _ in range(150):
        body = generator.randbytes(generator.randrange(0, 60))
        if generator.random() < 0.3:
            body = b"k8s\0" + body
        tail = "".join(generator.choices(string.ascii_letters + "/.%?-", k=generator.randrange(0, 20)))
        path = generator.choice([api.maps, "/api", "/apis", "/openapi", f"{api.pods}/x", "/api/v1/namespaces"]) + tail
        method = generator.choice(["GET", "POST", "PUT", "PATCH", "DELETE"])
        answer = await api.call(method, path.replace("%", "%25"), body, generator.choice(KINDS))
        assert good(answer), (method, path, body, answer)


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "-1"},
        {"limit": "many"},
        {"timeoutSeconds": "x"},
        {"resourceVersion": "-5"},
        {"continue": "e30="},
        {"fieldSelector": "==="},
        {"labelSelector": "((("},
        {"labelSelector": "a in ()"},
    ],
)
async def test_odd_queries(api, query):
    assert good(await api.call("GET", api.maps, **query))


async def test_deep_and_large_bodies(api):
    deep = "[" * 5000 + "]" * 5000
    code, _ = await api.call("POST", api.maps, deep)
    assert code == 400
    for depth in (200, 900):
        nested = '{"a":' * depth + "1" + "}" * depth
        text = f'{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"name":"d"}},"data":{nested}}}'
        assert (await api.call("POST", api.maps, text))[0] in (400, 422)
    large = {**api.config_map("l"), "data": {"k": "x" * (4 << 20)}}
    code, status = await api.call("POST", api.maps, large)
    assert (code, status["reason"]) == (413, "RequestEntityTooLarge")
    assert (await api.call("GET", "/readyz"))[0] == 200
