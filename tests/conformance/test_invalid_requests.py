"""Five hundred seeded random invalid requests: each gets a Status of the right class of code, never a 500.

Each request is a good one with one thing wrong in it, and says which codes are right answers to that. Where real
servers answer a client's mistake with a 500, that is said.
"""

import json
import random

import pytest

from tests.randomness import seeds
from tests.tiers import mostly_long

from .conftest import APPLY, CRDS, JSON_PATCH, MERGE, STRATEGIC

REQUESTS = 125
ODD = [None, True, -7, 3.5, 2**70, "", "x y", "é" * 300, [], {}, [None], [[]], {"a": None}, {"": {}}, "../.."]


class Maker:
    """Makes invalid requests: (name, method, path, body, content type, query, good codes)."""

    def __init__(self, api, runs, seed):
        self.api, self.runs, self.random = api, runs, random.Random(seed)

    def make(self):
        kinds = [self.path, self.method, self.body, self.content_type, self.query, self.patch, self.name, self.value]
        kinds += [self.options, self.apply, self.subresource, self.definition]
        maker = self.random.choice(kinds)
        return (maker.__name__, *maker())

    def text(self, alphabet="abcXYZ019-_.~ %é", length=12):
        return "".join(self.random.choices(alphabet, k=self.random.randrange(1, length)))

    def path(self):
        word = self.text("abcxyz019", 9)
        tails = [f"/api/v1/{word}", f"/api/v9/{word}", f"/apis/apps/v1/{word}", f"{self.api.maps}/c/{word}", f"/{word}"]
        tails += [f"/apis/{word}.example.com/v1/x", f"{self.api.maps}/c/status/{word}", f"{self.api.maps}/{word}"]
        return "GET", self.random.choice(tails), None, "application/json", {}, {404}

    def method(self):
        choices = [("PUT", self.api.maps), ("PATCH", self.api.maps), ("POST", f"{self.api.maps}/c")]
        choices += [("POST", "/api/v1/configmaps"), ("DELETE", "/api/v1/configmaps"), ("DELETE", "/version")]
        method, path = self.random.choice(choices)
        return method, path, self.api.config_map("c"), "application/json", {}, {405, 403}

    def body(self):
        good = json.dumps(self.api.config_map("c"))
        cut = good[: self.random.randrange(1, len(good) - 1)]
        bodies = [cut, good + self.text("}{],x", 3), self.text('{}[]":,ab', 20), "[]", "1", "", "null", '"x"', "\0"]
        return "POST", self.api.maps, self.random.choice(bodies), "application/json", {}, {400, 422}

    def content_type(self):
        kinds = ["text/html", "application/xml", "application/jsonx", self.text("abc/") + "/x"]
        method, path = self.random.choice([("POST", self.api.maps), ("PATCH", f"{self.api.maps}/c")])
        return method, path, self.api.config_map("c"), self.random.choice(kinds), {}, {415}

    def query(self):
        word = self.text("abc;!=( ")
        choices = [
            {"limit": "many"},
            {"continue": word},
            {"timeoutSeconds": "soon"},
            {"labelSelector": f"a in b{word}"},
        ]
        choices += [{"labelSelector": "a=b=c"}, {"fieldSelector": "data.k=v"}, {"fieldSelector": "==="}]
        choices += [{"resourceVersion": "x1"}, {"sendInitialEvents": "true", "watch": "true"}]
        return "GET", self.api.maps, None, "application/json", self.random.choice(choices), {400, 422}

    def options(self):
        word = self.text("xyz", 6)
        method, path, body = self.random.choice(
            [("POST", self.api.maps, self.api.config_map("new")), ("DELETE", f"{self.api.maps}/c", None)]
        )
        choices = [{"dryRun": word}] if method == "DELETE" else [{"dryRun": word}, {"fieldValidation": word}]
        choices += [{"propagationPolicy": word}] if method == "DELETE" else [{"fieldManager": "m" * 200}]
        return method, path, body, "application/json", self.random.choice(choices), {400, 422}

    def patch(self):
        operations = [{"op": self.text("abc")}, {"op": "add", "path": "nowhere", "value": 1}, {"op": "remove"}, 5]
        operations += [
            {"op": "test", "path": "/data/k", "value": "no"},
            {"op": "remove", "path": f"/data/{self.text('x')}"},
        ]
        bodies = [(JSON_PATCH, [self.random.choice(operations)]), (JSON_PATCH, {"a": 1}), (MERGE, [1]), (MERGE, 5)]
        bodies += [
            (MERGE, {"data": {"k": self.random.choice([1, True, [], {"a": 1}])}}),
            (MERGE, {"data": [self.text()]}),
        ]
        bodies += [(STRATEGIC, {"$patch": "abc"}), (STRATEGIC, {"metadata": {"name": "other"}}), (STRATEGIC, "text")]
        kind, body = self.random.choice(bodies)
        # Real servers: 500, "unknown patch type".
        codes = {500} if body == {"$patch": "abc"} and not self.api.server.embedded else {400, 422}
        return "PATCH", f"{self.api.maps}/c", body, kind, {}, codes

    def apply(self):
        body = self.api.config_map("c")
        flaw = self.random.choice(["manager", "kind", "managed", "name", "type"])
        body |= {"kind": {"kind": "Secret"}, "type": {"data": {"k": 5}}}.get(flaw, {})
        body["metadata"] |= {"managed": {"managedFields": [{"manager": "x"}]}, "name": {"name": "d"}}.get(flaw, {})
        codes = (
            {400, 422} if self.api.server.embedded or flaw != "type" else {500}
        )  # "failed to create typed patch object"
        query = {"force": "true"} | ({} if flaw == "manager" else {"fieldManager": "m"})
        return "PATCH", f"{self.api.maps}/c", body, APPLY, query, codes

    def name(self):
        bad = self.random.choice(["Upper", "under_score", "-dash", "dot.", "sp ace", "x" * 254, self.text("A_ ~"), ""])
        change = self.random.choice(
            [{"name": bad}, {"name": "n", "labels": {"a": "b c"}}, {"name": "n", "labels": {"-": "b"}}]
            + [{"name": "n", "annotations": {"a b": "c"}}, {"name": "n", "finalizers": ["a/b/c"]}]
        )
        body = {**self.api.config_map("n"), "metadata": change}
        return "POST", self.api.maps, body, "application/json", {}, {422}

    def value(self):
        odd = self.random.choice([v for v in ODD if v is not None])
        spec = self.random.choice(
            [{"workers": v} for v in (0, 65, "two", [], {}, True, 2.5, -(2**70))]
            + [{"command": [[]]}, {"command": {}}, {"tolerations": [{}]}, {"tolerations": [{"key": odd, "value": 1}]}]
            + [{"workers": 40, "backoffLimit": 0}]
        )
        body = self.random.choice([self.api.run("bad", **spec), {**self.api.run("bad"), "spec": spec["workers"]}]
                                  if "workers" in spec and not isinstance(spec["workers"], dict)
                                  else [self.api.run("bad", **spec)])  # fmt: skip
        return "POST", self.runs, body, "application/json", {"dryRun": "All"}, {400, 422}

    def subresource(self):
        target = self.random.choice([v for v in ODD if not isinstance(v, str)] + [{"kind": "Node"}, {"name": ""}])
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p"}, "target": target}
        scale = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"name": "r"}, "spec": {"replicas": -3}}
        return self.random.choice(
            [
                ("POST", f"{self.api.pods}/none/binding", body, "application/json", {}, {400, 404, 422}),
                ("PUT", f"{self.runs}/r/scale", scale, "application/json", {}, {400, 422}),
                ("PATCH", f"{self.runs}/r/scale", {"spec": {"replicas": "x"}}, MERGE, {}, {400, 422}),
                ("PATCH", f"{self.runs}/r/status", {"status": 5}, MERGE, {}, {422}),
                ("POST", f"{self.api.pods}/none/eviction", {}, "application/json", {}, {400, 404}),
            ]
        )

    def definition(self):
        schema = self.random.choice(
            [{"type": "string"}, {"type": "object", "properties": {"a": {}}}]
            + [{"type": "object", "properties": {"a": {"type": "array"}}}, {"type": "object", "properties": []}]
            + [{"type": "object", "properties": {"a": {"type": "string", "pattern": "["}}}, {"type": self.text()}]
            + [{"type": "object", "x-kubernetes-validations": [{"rule": f"self.{self.text('(=&')}"}]}]
        )
        names = {"plural": "odds", "kind": "Odd"}
        version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        spec = {"group": "odd.example.com", "scope": "Namespaced", "names": names, "versions": [version]}
        body = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "spec": spec}
        body["metadata"] = {"name": "odds.odd.example.com"}
        return "POST", CRDS, body, "application/json", {"dryRun": "All"}, {400, 422}


def is_failure(api, answer, code):
    """Whether an answer is a failure Status; a real server leaves out the reason of some that etcd or Go words."""
    if not isinstance(answer, dict) or (answer["kind"], answer["status"], answer["code"]) != (
        "Status",
        "Failure",
        code,
    ):
        return False
    return bool(answer["message"]) and (bool(answer.get("reason")) or not api.server.embedded)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", mostly_long(seeds(4), lambda seed: seed < 2))
async def test_invalid_requests(api, runs, seed):
    await api.call("POST", api.maps, api.config_map("c"))
    await api.call("POST", runs, api.run("r"))
    maker = Maker(api, runs, seed)
    wrong = []
    for _ in range(REQUESTS):
        name, method, path, body, kind, query, codes = maker.make()
        code, answer = await api.call(method, path, body, kind, **query)
        good = code in codes and ((code, answer) == (404, "404 page not found\n") or is_failure(api, answer, code))
        if not good:
            wrong.append(
                f"{name} {method} {path} {json.dumps(body)[:300]} {kind} {query} -> {code} {str(answer)[:300]}"
            )
    assert not wrong, "\n".join(wrong)
    assert (await api.call("GET", f"{api.maps}/c"))[1]["data"] == {"k": "v"}, "nothing of it was carried out"
