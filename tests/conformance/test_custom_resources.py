"""Custom resources: definitions, schemas, CEL rules, status and scale."""

import copy

import pytest

MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GROUP = "conformance.example.com"


def definition(plural, schema, **version):
    kind = plural.rstrip("s").capitalize()
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"plural": plural, "kind": kind},
            "versions": [
                {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}, **version}
            ],
        },
    }


async def test_defaults_pruning_generation(api, runs):
    code, run = await api.call("POST", runs, api.run("r", bogus=1))
    assert code == 201
    assert run["spec"] == {"workers": 2, "backoffLimit": 3}
    assert run["metadata"]["generation"] == 1


@pytest.mark.parametrize(
    ("spec", "field", "reason"),
    [
        ({"workers": 0}, "spec.workers", "FieldValueInvalid"),
        ({"workers": 65}, "spec.workers", "FieldValueInvalid"),
        ({"workers": "two"}, "spec.workers", "FieldValueTypeInvalid"),
        ({"workers": None}, "spec.workers", "FieldValueRequired"),
        ({"command": [1]}, "spec.command[0]", "FieldValueTypeInvalid"),
        ({"tolerations": [{"key": "a"}, {"key": "a"}]}, "spec.tolerations[1]", "FieldValueDuplicate"),
        ({"workers": 40, "backoffLimit": 0}, "spec.backoffLimit", "FieldValueForbidden"),
    ],
)
async def test_validation_names_the_field(api, runs, spec, field, reason):
    code, status = await api.call("POST", runs, api.run("bad", **spec))
    assert (code, status["reason"]) == (422, "Invalid")
    assert (field, reason) in {(c["field"], c["reason"]) for c in status["details"]["causes"]}


async def test_message_expressions(api, runs):
    _, status = await api.call("POST", runs, api.run("bad", workers=40, backoffLimit=0))
    assert "big runs need a backoffLimit, as over 32" in status["message"]


async def test_transition_rules(api, runs):
    await api.call("POST", runs, api.run("r", frozen="a"))
    code, status = await api.call("PATCH", f"{runs}/r", {"spec": {"frozen": "b"}}, MERGE)
    assert code == 422
    assert "is immutable" in status["message"]
    assert (await api.call("PATCH", f"{runs}/r", {"spec": {"workers": 4}}, MERGE))[0] == 200


async def test_strict_field_validation(api, runs):
    code, status = await api.call("POST", runs, api.run("r", bogus=1), fieldValidation="Strict")
    assert code == 400
    assert 'unknown field "spec.bogus"' in status["message"]


async def test_spec_and_status_are_apart(api, runs):
    await api.call("POST", runs, {**api.run("r"), "status": {"phase": "X"}})
    patch = {"spec": {"workers": 3}, "status": {"phase": "X"}}
    _, run = await api.call("PATCH", f"{runs}/r", patch, MERGE)
    assert run["metadata"]["generation"] == 2
    assert "status" not in run
    patch = {"status": {"phase": "Running"}, "spec": {"workers": 9}, "metadata": {"labels": {"a": "b"}}}
    code, run = await api.call("PATCH", f"{runs}/r/status", patch, MERGE)
    assert (code, run["spec"]["workers"], run["metadata"]["generation"]) == (200, 3, 2)
    assert run["status"] == {"phase": "Running"}
    assert "labels" not in run["metadata"]


async def test_patch_kinds(api, runs):
    await api.call("POST", runs, api.run("r"))
    assert (await api.call("PATCH", f"{runs}/r", {"spec": {}}, STRATEGIC))[0] == 415
    _, run = await api.call("GET", f"{runs}/r")
    _, same = await api.call("PATCH", f"{runs}/r", {"spec": {"workers": 2}}, MERGE)
    assert same["metadata"]["resourceVersion"] == run["metadata"]["resourceVersion"]
    del run["metadata"]["resourceVersion"]
    assert (await api.call("PUT", f"{runs}/r", run))[0] == 422


async def test_scale(api, runs):
    await api.call("POST", runs, api.run("r"))
    await api.call("PATCH", f"{runs}/r/status", {"status": {"replicas": 1, "selector": "a=b"}}, MERGE)
    code, scale = await api.call("GET", f"{runs}/r/scale")
    assert (code, scale["kind"], scale["apiVersion"]) == (200, "Scale", "autoscaling/v1")
    assert (scale["spec"], scale["status"]) == ({"replicas": 2}, {"replicas": 1, "selector": "a=b"})
    code, scale = await api.call("PUT", f"{runs}/r/scale", {**scale, "spec": {"replicas": 5}})
    assert (code, scale["spec"]["replicas"]) == (200, 5)
    code, scale = await api.call("PATCH", f"{runs}/r/scale", {"spec": {"replicas": 6}}, MERGE)
    assert (code, scale["spec"]["replicas"]) == (200, 6)
    _, run = await api.call("GET", f"{runs}/r")
    assert (run["spec"]["workers"], run["metadata"]["generation"]) == (6, 3)
    assert (await api.call("PATCH", f"{runs}/r/scale", {"spec": {"replicas": 99}}, MERGE))[0] == 422


async def test_printer_columns(api, runs):
    await api.call("POST", runs, api.run("r"))
    conditions = [{"type": "Other", "status": "False"}, {"type": "Ready", "status": "True"}]
    await api.call("PATCH", f"{runs}/r/status", {"status": {"phase": "On", "conditions": conditions}}, MERGE)
    headers = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    async with api.session.get(api.server.url + f"{runs}/r", headers=headers, ssl=api.context) as response:
        table = await response.json()
    assert [c["name"] for c in table["columnDefinitions"]] == ["Name", "Workers", "Phase", "Ready"]
    assert table["rows"][0]["cells"] == ["r", 2, "On", "True"]


async def test_definition_is_established_and_named(api, runs):
    _, crd = await api.call("GET", f"{CRDS}/runs.{GROUP}")
    conditions = {c["type"]: c["status"] for c in crd["status"]["conditions"]}
    assert conditions["Established"] == conditions["NamesAccepted"] == "True"
    assert crd["status"]["storedVersions"] == ["v1"]
    assert crd["spec"]["names"]["listKind"] == "RunList"


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "string"}, "openAPIV3Schema"),
        ({"type": "object", "properties": {"a": {}}}, "properties[a]"),
        ({"type": "object", "properties": {"a": {"type": "array"}}}, "items"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, "pattern"),
        ({"type": "object", "properties": {"a": {"type": "integer", "default": "x"}}}, "default"),
        ({"type": "object", "properties": {"a": {"type": "string", "anyOf": [{"type": "string"}]}}}, "anyOf"),
        ({"type": "object", "x-kubernetes-validations": [{"rule": "self.("}]}, "rule"),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "array", "x-kubernetes-list-type": "map", "items": {"type": "object"}}},
            },
            "x-kubernetes-list-map-keys",
        ),
    ],
)
async def test_schemas_must_be_structural(api, schema, where):
    code, status = await api.call("POST", CRDS, definition("broken", schema))
    assert (code, status["reason"]) == (422, "Invalid"), status
    assert any(where in c["field"] for c in status["details"]["causes"]), status["details"]["causes"]


async def test_definition_names_are_checked(api):
    crd = definition("things", {"type": "object"})
    crd["metadata"]["name"] = "other.conformance.example.com"
    assert (await api.call("POST", CRDS, crd))[0] == 422
    crd = definition("things", {"type": "object"}, storage=False)
    assert (await api.call("POST", CRDS, crd))[0] == 422


async def test_life_of_a_definition(api):
    """Its objects are seen through each new schema, keep what an old one allowed, and go before it does."""
    schema = {"type": "object", "properties": {"spec": {"type": "object", "properties": {"a": {"type": "string"}}}}}
    crd = definition("lives", schema)
    await api.define(crd)
    path = f"/apis/{GROUP}/v1/namespaces/{api.namespace}/lives"
    body = {"apiVersion": f"{GROUP}/v1", "kind": "Live", "metadata": {"name": "l", "finalizers": ["example.com/x"]}}
    kind = crd["spec"]["names"]["kind"]
    code, _ = await api.call("POST", path, {**body, "kind": kind, "spec": {"a": "long text"}})
    assert code == 201
    stricter = copy.deepcopy(schema)
    stricter["properties"]["spec"]["properties"] = {
        "a": {"type": "string", "maxLength": 3},
        "b": {"type": "integer", "default": 7},
    }
    spec = {"versions": [{**crd["spec"]["versions"][0], "schema": {"openAPIV3Schema": stricter}}]}
    assert (await api.call("PATCH", f"{CRDS}/lives.{GROUP}", {"spec": spec}, MERGE))[0] == 200
    for _ in range(100):
        _, live = await api.call("GET", f"{path}/l")
        if "b" in live["spec"]:
            break
    assert live["spec"] == {"a": "long text", "b": 7}
    assert (await api.call("PATCH", f"{path}/l", {"spec": {"b": 8}}, MERGE))[0] == 200
    assert (await api.call("PATCH", f"{path}/l", {"spec": {"a": "longer text"}}, MERGE))[0] == 422
    code, answer = await api.call("DELETE", f"{CRDS}/lives.{GROUP}")
    assert code == 200
    for _ in range(100):
        code, live = await api.call("GET", f"{path}/l")
        if code == 200 and live["metadata"].get("deletionTimestamp"):
            break
    assert live["metadata"]["deletionTimestamp"]
    code, _ = await api.call("POST", path, {**body, "kind": kind, "metadata": {"name": "late"}})
    assert code == 403
    await api.call("PATCH", f"{path}/l", {"metadata": {"finalizers": None}}, MERGE)
    assert await api.until_gone(f"{CRDS}/lives.{GROUP}", 30)
    await api.until(404, "GET", path)


async def test_a_status_where_what_is_stored_breaks_new_rules(api):
    """A rule that is broken already is not held against whoever writes status; one that cannot be evaluated is."""
    loose = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    crd = definition("olds", loose, subresources={"status": {}})
    await api.define(crd)
    path = f"/apis/{GROUP}/v1/namespaces/{api.namespace}/olds"
    body = {"apiVersion": f"{GROUP}/v1", "kind": "Old", "metadata": {}}
    stored = {"fits": {"n": 3}, "broken": {"n": 7}, "zero": {"n": 0}, "mistyped": {"n": "two"}, "missing": {}}
    for name, spec in stored.items():
        assert (await api.call("POST", path, {**body, "metadata": {"name": name}, "spec": spec}))[0] == 201
    rules = [{"rule": "self.n < 5", "message": "must be small"}, {"rule": "6 % self.n == 0", "message": "must divide"}]
    fields = {"type": "object", "properties": {"n": {"type": "integer"}}, "x-kubernetes-validations": rules}
    strict = {"type": "object", "properties": {"spec": fields, "status": loose}}
    versions = [{**crd["spec"]["versions"][0], "schema": {"openAPIV3Schema": strict}}]
    assert (await api.call("PATCH", f"{CRDS}/olds.{GROUP}", {"spec": {"versions": versions}}, MERGE))[0] == 200
    probe = {**body, "metadata": {"name": "probe"}, "spec": {"n": 9}}
    await api.until(422, "POST", f"{path}?dryRun=All", probe)
    answers = {
        name: await api.call("PATCH", f"{path}/{name}/status", {"status": {"seen": True}}, MERGE) for name in stored
    }
    assert {name: code for name, (code, _) in answers.items()} == {
        "fits": 200, "broken": 200, "zero": 422, "mistyped": 422, "missing": 422,
    }  # fmt: skip
    assert "invalid data, expected int, got string evaluating rule: must be small" in answers["mistyped"][1]["message"]
    assert "no such key: n evaluating rule: must be small" in answers["missing"][1]["message"]
    assert "evaluating rule: must divide" in answers["zero"][1]["message"]
    await api.call("DELETE", f"{CRDS}/olds.{GROUP}")


async def test_versions_share_objects(api):
    crd = definition("twins", {"type": "object", "x-kubernetes-preserve-unknown-fields": True})
    first = crd["spec"]["versions"][0]
    crd["spec"]["versions"] = [{**first, "name": "v1alpha1", "storage": False}, first]
    await api.define(crd)
    path = f"/apis/{GROUP}/{{}}/namespaces/{api.namespace}/twins"
    body = {"apiVersion": f"{GROUP}/v1alpha1", "kind": "Twin", "metadata": {"name": "t"}, "spec": {"a": 1}}
    assert (await api.call("POST", path.format("v1alpha1"), body))[0] == 201
    _, twin = await api.call("GET", path.format("v1") + "/t")
    assert (twin["apiVersion"], twin["spec"]) == (f"{GROUP}/v1", {"a": 1})
    _, listed = await api.call("GET", path.format("v1alpha1"))
    assert listed["items"][0]["apiVersion"] == f"{GROUP}/v1alpha1"
    _, group = await api.call("GET", f"/apis/{GROUP}")
    assert group["preferredVersion"]["version"] == "v1"
    await api.call("DELETE", f"{CRDS}/twins.{GROUP}")


async def test_schema_variety(api):
    """Nullable, int-or-string, maps, formats, composed schemas and embedded objects, in one definition."""
    properties = {
        "maybe": {"type": "string", "nullable": True},
        "port": {"x-kubernetes-int-or-string": True},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "when": {"type": "string", "format": "date-time"},
        "either": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        "template": {
            "type": "object",
            "x-kubernetes-embedded-resource": True,
            "x-kubernetes-preserve-unknown-fields": True,
        },
        "ratio": {"type": "number", "x-kubernetes-validations": [{"rule": "self <= 1.0"}]},
        "tags": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
    }
    schema = {"type": "object", "properties": {"spec": {"type": "object", "properties": properties}}}
    await api.define(definition("mixes", schema))
    path = f"/apis/{GROUP}/v1/namespaces/{api.namespace}/mixes"

    async def attempt(**spec):
        body = {"apiVersion": f"{GROUP}/v1", "kind": "Mixe", "metadata": {"generateName": "m-"}, "spec": spec}
        code, answer = await api.call("POST", path, body)
        return answer["spec"] if code == 201 else code

    assert await attempt(maybe=None) == {"maybe": None}
    assert await attempt(port=80) == {"port": 80}
    assert await attempt(port="http") == {"port": "http"}
    assert await attempt(port=[]) == 422
    assert await attempt(labels={"a": "b"}) == {"labels": {"a": "b"}}
    assert await attempt(labels={"a": 1}) == 422
    assert await attempt(when="2026-01-01T00:00:00Z") == {"when": "2026-01-01T00:00:00Z"}
    assert await attempt(when="yesterday") == 422
    assert await attempt(either={"a": 1}) == {"either": {"a": 1}}
    assert await attempt(either={"a": 1, "b": 1}) == 422
    template = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"free": True}}
    assert await attempt(template=template) == {"template": template}
    assert await attempt(ratio=1) == {"ratio": 1}
    assert await attempt(ratio=1.5) == 422
    assert await attempt(tags=["a", "b"]) == {"tags": ["a", "b"]}
    assert await attempt(tags=["a", "a"]) == 422
    await api.call("DELETE", f"{CRDS}/mixes.{GROUP}")
