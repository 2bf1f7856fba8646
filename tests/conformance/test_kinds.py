"""Rules of built-in kinds that their types do not say: what operators, Helm and Argo CD find out on a real cluster."""

import json

import pytest

MERGE, JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"
STRATEGIC, APPLY = "application/strategic-merge-patch+json", "application/apply-patch+yaml"
GPU = "nvidia.com/gpu"
TERMS = "requiredDuringSchedulingIgnoredDuringExecution"


def container(**more):
    return {"containers": [{"name": "a", "image": "b", **more}]}


def resources(**kinds):
    return container(resources=kinds)


def affinity(*terms):
    return {"affinity": {"nodeAffinity": {TERMS: {"nodeSelectorTerms": list(terms)}}}}


def volume(**source):
    return {"volumes": [{"name": "v", **source}]}


INVALID_PODS = {
    "more requests than limit": resources(requests={"cpu": "2"}, limits={"cpu": "1"}),
    "negative amount": resources(limits={"memory": "-1"}),
    "device without limit": resources(requests={GPU: "1"}),
    "part of a device": resources(limits={GPU: "500m"}),
    "fewer devices than limit": resources(requests={GPU: "1"}, limits={GPU: "2"}),
    "resource without domain": resources(limits={"gpu": "1"}),
    "two sources of a volume": volume(emptyDir={}, hostPath={"path": "/x"}),
    "claim without a name": volume(persistentVolumeClaim={"claimName": ""}),
    "map without a name": volume(configMap={}),
    "mode": volume(secret={"secretName": "s", "defaultMode": 9999}),
    "toleration of nothing": {"tolerations": [{"operator": "Equal"}]},
    "toleration with value": {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
    "toleration's effect": {"tolerations": [{"key": "a", "operator": "Exists", "effect": "Never"}]},
    "toleration's time": {"tolerations": [{"key": "a", "operator": "Exists", "tolerationSeconds": 5}]},
    "no term": affinity(),
    "operator of a term": affinity({"matchExpressions": [{"key": "a", "operator": "Like"}]}),
    "no values": affinity({"matchExpressions": [{"key": "a", "operator": "In"}]}),
    "two nodes by name": affinity({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a", "b"]}]}),
    "no port": container(ports=[{"containerPort": 0}]),
    "name of a port": container(ports=[{"containerPort": 80, "name": "a-name-that-is-too-long"}]),
    "host port": {**container(ports=[{"containerPort": 80, "hostPort": 81}]), "hostNetwork": True},
    "probe of nothing": container(livenessProbe={}),
    "two probes in one": container(livenessProbe={"exec": {"command": ["a"]}, "tcpSocket": {"port": 1}}),
    "source of a variable": container(env=[{"name": "A", "valueFrom": {}}]),
    "image with space": container(image=" b"),
    "pull policy": container(imagePullPolicy="Sometimes"),
    "hostname": {"hostname": "A_b"},
    "name of a node": {"nodeName": "A b"},
    "name of a gate": {"schedulingGates": [{"name": "a b"}]},
    "the same gate twice": {"schedulingGates": [{"name": "a.b/c"}, {"name": "a.b/c"}]},
    "spread": {"topologySpreadConstraints": [{"maxSkew": 0, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"}]},
}
VALID_PODS = {
    "a device by its limit": resources(limits={GPU: 2}),
    "a variable twice": container(env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
    "one node by name": affinity({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]}),
    "toleration of everything": {"tolerations": [{"operator": "Exists"}]},
    "huge pages": resources(limits={"hugepages-2Mi": "4Mi", "memory": "8Mi"}),
}


@pytest.mark.parametrize("spec", INVALID_PODS.values(), ids=INVALID_PODS)
async def test_invalid_pods(api, spec):
    code, status = await api.call("POST", api.pods, api.pod("p", **spec))
    assert (code, status["reason"]) == (422, "Invalid"), status
    assert status["details"]["causes"]


@pytest.mark.parametrize("spec", VALID_PODS.values(), ids=VALID_PODS)
async def test_valid_pods(api, spec):
    code, status = await api.call("POST", api.pods, api.pod("p", **spec))
    assert code == 201, status


async def test_defaults_of_pods(api):
    spec = {**container(resources={"limits": {"cpu": "1"}}), "volumes": [{"name": "v"}], "nodeSelector": {}}
    _, pod = await api.call("POST", api.pods, api.pod("p", **spec, terminationGracePeriodSeconds=-5))
    assert pod["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "1"}
    assert (pod["spec"]["volumes"], "nodeSelector" in pod["spec"]) == ([{"name": "v", "emptyDir": {}}], False)
    assert pod["spec"]["terminationGracePeriodSeconds"] == 1
    assert (await api.call("POST", api.pods, api.pod("q", priority=5)))[0] == 403


async def test_deadlines_only_get_shorter(api):
    await api.call("POST", api.pods, api.pod("p", activeDeadlineSeconds=60))
    path = f"{api.pods}/p"
    assert (await api.call("PATCH", path, {"spec": {"activeDeadlineSeconds": 50}}, MERGE))[0] == 200
    assert (await api.call("PATCH", path, {"spec": {"activeDeadlineSeconds": 70}}, MERGE))[0] == 422
    assert (await api.call("PATCH", path, {"spec": {"terminationGracePeriodSeconds": 5}}, MERGE))[0] == 422


def deployment(name, **spec):
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": container(resources={"limits": {"cpu": "1"}})}
    body = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template, **spec}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": body}


@pytest.fixture
def deployments(api):
    return f"/apis/apps/v1/namespaces/{api.namespace}/deployments"


async def test_deployments(api, deployments):
    code, made = await api.call("POST", deployments, deployment("d"))
    assert code == 201, made
    spec = made["spec"]
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%", "maxSurge": "25%"}}
    assert (spec["revisionHistoryLimit"], spec["progressDeadlineSeconds"]) == (10, 600)
    # Its pods get requests; the template stays as it was written, or every comparison with a chart would differ.
    assert spec["template"]["spec"]["containers"][0]["resources"] == {"limits": {"cpu": "1"}}
    selector = {"spec": {"selector": {"matchLabels": {"x": "y"}}}}
    assert (await api.call("PATCH", f"{deployments}/d", selector, MERGE))[0] == 422
    nothing = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "0%", "maxUnavailable": 0}}
    pod = {"metadata": {"labels": {"app": "e"}}, "spec": {**container(), "restartPolicy": "Never"}}
    for wrong in (
        {"selector": {}},
        {"selector": {"matchLabels": {"other": "e"}}},
        {"replicas": -1},
        {"template": pod},
        {"strategy": nothing},
        {"strategy": {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}},
    ):
        code, status = await api.call("POST", deployments, deployment("e", **wrong))
        assert (code, status["reason"]) == (422, "Invalid"), wrong


async def test_deployments_scale(api, deployments):
    await api.call("POST", deployments, deployment("d", paused=True))
    code, scale = await api.call("GET", f"{deployments}/d/scale")
    assert (code, scale["kind"], scale["spec"].get("replicas", 0), scale["status"]["selector"]) == (
        *(200, "Scale", 0),
        "app=d",
    )
    code, scale = await api.call("PATCH", f"{deployments}/d/scale", {"spec": {"replicas": 3}}, MERGE)
    assert (code, scale["spec"]["replicas"]) == (200, 3)
    assert (await api.call("GET", f"{deployments}/d"))[1]["spec"]["replicas"] == 3
    assert (await api.call("PATCH", f"{deployments}/d/scale", {"spec": {"replicas": -1}}, MERGE))[0] == 422


async def test_leases_have_microseconds(api):
    path = f"/apis/coordination.k8s.io/v1/namespaces/{api.namespace}/leases"

    async def create(name, **spec):
        return (await api.call("POST", path, {"metadata": {"name": name}, "spec": spec}))[0]

    assert await create("a", leaseDurationSeconds=15, renewTime="2026-01-02T03:04:05.000006Z") == 201
    assert await create("b", renewTime="2026-01-02T03:04:05Z") == 400
    assert await create("c", renewTime="2026-01-02T03:04:05.123Z") == 400
    assert await create("d", leaseDurationSeconds=0) == 422
    assert await create("e", leaseTransitions=-1) == 422


async def test_events_are_next_to_their_object(api):
    path = f"/api/v1/namespaces/{api.namespace}/events"

    async def create(name, **about):
        body = {"metadata": {"name": name}, "involvedObject": {"kind": "Pod", "name": "p", **about}}
        return (await api.call("POST", path, body))[0]

    assert await create("a", namespace=api.namespace) == 201
    assert await create("b", namespace="default") == 422
    assert await create("c") == 422
    name = f"conformance-{api.namespace}"
    body = {"metadata": {"name": name}, "involvedObject": {"kind": "Node", "name": "n"}}
    assert (await api.call("POST", "/api/v1/namespaces/default/events", body))[0] == 201
    await api.call("DELETE", f"/api/v1/namespaces/default/events/{name}")


async def test_claims_stay_as_they_are(api):
    path = f"/api/v1/namespaces/{api.namespace}/persistentvolumeclaims"
    size = {"requests": {"storage": "1Gi"}}

    async def create(name, **spec):
        body = {"metadata": {"name": name}, "spec": {"storageClassName": f"none-{api.namespace}", **spec}}
        return (await api.call("POST", path, body))[0]

    assert await create("a", accessModes=["ReadWriteMany"], resources=size) == 201
    assert await create("b", accessModes=["ReadWriteMany"]) == 422
    assert await create("c", resources=size) == 422
    assert await create("d", accessModes=["Everyone"], resources=size) == 422
    for change in ({"accessModes": ["ReadWriteOnce"]}, {"storageClassName": "b"}):
        assert (await api.call("PATCH", f"{path}/a", {"spec": change}, MERGE))[0] == 422
    assert (await api.call("PATCH", f"{path}/a", {"metadata": {"labels": {"a": "b"}}}, MERGE))[0] == 200


async def test_role_bindings_keep_their_role(api):
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{api.namespace}"
    body = {
        "metadata": {"name": "b"},
        "roleRef": {"kind": "Role", "name": "r"},
        "subjects": [{"kind": "User", "name": "u"}],
    }
    code, made = await api.call("POST", f"{path}/rolebindings", body)
    groups = made["roleRef"]["apiGroup"], made["subjects"][0]["apiGroup"]
    assert (code, groups) == (201, ("rbac.authorization.k8s.io",) * 2)
    assert (await api.call("PATCH", f"{path}/rolebindings/b", {"roleRef": {"name": "other"}}, MERGE))[0] == 422
    for wrong in ({"roleRef": {"kind": "Rule", "name": "r"}}, {"subjects": [{"kind": "Robot", "name": "u"}]}):
        assert (await api.call("POST", f"{path}/rolebindings", {**body, "metadata": {"name": "c"}, **wrong}))[0] == 422
    for rule in ({"resources": ["pods"], "verbs": ["get"]}, {"nonResourceURLs": ["/x"], "verbs": ["get"]}):
        assert (await api.call("POST", f"{path}/roles", {"metadata": {"name": "r"}, "rules": [rule]}))[0] == 422


@pytest.mark.parametrize(
    "spec",
    [
        {"minAvailable": 1, "maxUnavailable": 1},
        {"minAvailable": "150%"},
        {"minAvailable": "some"},
        {"maxUnavailable": -1},
        {"selector": {"matchExpressions": [{"key": "a", "operator": "Like"}]}},
    ],
)
async def test_invalid_budgets(api, spec):
    path = f"/apis/policy/v1/namespaces/{api.namespace}/poddisruptionbudgets"
    assert (await api.call("POST", path, {"metadata": {"name": "b"}, "spec": spec}))[0] == 422


async def test_evictions_name_their_pod(api):
    await api.call("POST", api.pods, api.pod("p"))
    assert (await api.call("POST", f"{api.pods}/p/eviction", {"metadata": {"name": "q"}}))[0] == 400


async def test_secrets_keep_their_type(api):
    path = f"/api/v1/namespaces/{api.namespace}/secrets"
    assert (await api.call("POST", path, {"metadata": {"name": "s"}, "stringData": {"a": "b"}}))[0] == 201
    assert (await api.call("PATCH", f"{path}/s", {"type": "example.com/other"}, MERGE))[0] == 422
    tls = {"metadata": {"name": "t"}, "type": "kubernetes.io/tls", "data": {"tls.crt": ""}}
    assert (await api.call("POST", path, tls))[0] == 422


@pytest.mark.parametrize(
    "spec",
    [
        {"ports": [{"port": 80, "name": "a"}, {"port": 81, "name": "a"}]},
        {"ports": [{"port": 80, "name": "a"}, {"port": 80, "name": "b"}]},
        {"ports": [{"port": 80, "name": "A"}]},
        {"ports": [{"port": 80, "protocol": "HTTP"}]},
        {"ports": [{"port": 80}], "type": "Other"},
        {"type": "ExternalName"},
    ],
)
async def test_invalid_services(api, spec):
    path = f"/api/v1/namespaces/{api.namespace}/services"
    assert (await api.call("POST", path, {"metadata": {"name": "s"}, "spec": spec}))[0] == 422


async def test_sizes(api, runs):
    """ConfigMaps and Secrets hold 1 MiB. An object of another kind may have what etcd takes in one write, 1.5 MiB."""
    full, text = {**api.config_map("c"), "data": {"a": "x" * (1 << 20)}}, "x" * ((1 << 20) + 1)
    assert (await api.call("POST", api.maps, full))[0] == 201
    code, status = await api.call("POST", api.maps, {**full, "metadata": {"name": "d"}, "data": {"a": text}})
    assert (code, status["details"]["causes"][0]["reason"]) == (422, "FieldValueTooLong")
    secrets = f"/api/v1/namespaces/{api.namespace}/secrets"
    assert (await api.call("POST", secrets, {"metadata": {"name": "s"}, "stringData": {"a": text}}))[0] == 422
    assert (await api.call("POST", runs, api.run("a", command=["x" * 1_500_000])))[0] == 201
    code, status = await api.call("POST", runs, api.run("b", command=["x" * 1_600_000]))
    assert (code, status["message"]) == (500, "etcdserver: request is too large")


async def test_finalizers_have_a_domain(api, runs):
    code, status = await api.call("POST", api.maps, api.config_map("c", finalizers=["mine"]))
    assert (code, status["details"]["causes"][0]["field"]) == (422, "metadata.finalizers[0]")
    both = api.config_map("c", finalizers=["orphan", "foregroundDeletion"])
    assert (await api.call("POST", api.maps, both))[0] == 422
    run = api.run("r")
    run["metadata"]["finalizers"] = ["mine"]
    assert (await api.call("POST", runs, run))[0] == 201
    await api.call("PATCH", f"{runs}/r", {"metadata": {"finalizers": None}}, MERGE)


async def test_equal_owners_are_one(api):
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "o", "uid": "1"}
    code, made = await api.call("POST", api.maps, api.config_map("c", ownerReferences=[owner, owner]), dryRun="All")
    assert (code, made["metadata"]["ownerReferences"]) == (201, [owner])


async def test_items_of_built_in_lists_have_no_kind(api, runs):
    """A client that reads the kind of an item fails only on a real server."""
    await api.call("POST", api.maps, api.config_map("c"))
    await api.call("POST", runs, api.run("r"))
    _, maps = await api.call("GET", api.maps, fieldSelector="metadata.name=c")
    assert [("kind" in item, "apiVersion" in item, item["data"]) for item in maps["items"]] == [
        (False, False, {"k": "v"})
    ]
    _, listed = await api.call("GET", runs)
    assert [item["kind"] for item in listed["items"]] == ["Run"]
    _, gone = await api.call("DELETE", api.maps, labelSelector="a=b")
    assert all("kind" not in item for item in gone.get("items") or ())


async def test_json_patch_replaces_what_is_missing(api):
    await api.call("POST", api.maps, api.config_map("c"))
    patch = [{"op": "replace", "path": "/data/new", "value": "1"}, {"op": "test", "path": "/data/none", "value": None}]
    code, obj = await api.call("PATCH", f"{api.maps}/c", patch, JSON_PATCH)
    assert (code, obj["data"]) == (200, {"k": "v", "new": "1"})
    wrong = [{"op": "test", "path": "/data/none", "value": "1"}]
    assert (await api.call("PATCH", f"{api.maps}/c", wrong, JSON_PATCH))[0] == 422


async def test_namespaces_are_deleted_one_by_one(api):
    assert (await api.call("DELETE", "/api/v1/namespaces", labelSelector="a=b"))[0] == 405


async def test_numbers_in_label_selectors(api):
    for name, labels in (("c5", {"n": "5"}), ("c7", {"n": "7"}), ("text", {"n": "x"})):
        await api.call("POST", api.maps, api.config_map(name, labels))

    async def names(selector):
        code, found = await api.call("GET", api.maps, labelSelector=selector)
        assert code == 200, found
        return [item["metadata"]["name"] for item in found["items"]]

    assert (await names("n>5"), await names("n < 7"), await names("n>4,n<6")) == (["c7"], ["c5"], ["c5"])
    assert (await api.call("GET", api.maps, labelSelector="n>x"))[0] == 400


async def apply(api, path, body, manager, **query):
    return await api.call("PATCH", path, json.dumps(body), APPLY, fieldManager=manager, **query)


async def test_apply_rejects_what_is_not_in_the_schema(api, runs, deployments):
    """A misspelled field is an error of server-side apply, not a warning. Real servers answer 500."""
    wrong = (400,) if api.server.embedded else (500,)
    code, status = await apply(api, f"{runs}/r", api.run("r", worker=3), "m")
    assert code in wrong
    assert ".spec.worker: field not declared in schema" in status["message"]
    twice = deployment("d")
    twice["spec"]["template"]["spec"]["containers"] *= 2
    code, status = await apply(api, f"{deployments}/d", twice, "m")
    assert code in wrong
    assert 'containers: duplicate entries for key [name="a"]' in status["message"]


async def test_conflicts_name_the_item(api, deployments):
    body = deployment("d")
    body["spec"]["template"]["spec"]["containers"][0]["args"] = ["1"]
    assert (await apply(api, f"{deployments}/d", body, "m1"))[0] == 201
    body["spec"]["template"]["spec"]["containers"][0]["args"] = ["2"]
    code, status = await apply(api, f"{deployments}/d", body, "m2")
    assert (code, status["details"]["causes"][0]["field"]) == (409, '.spec.template.spec.containers[name="a"].args')


async def test_an_object_without_managers(api):
    """Who removes all managers, as some tools do, makes everything belong to `before-first-apply`."""
    await api.call("POST", api.maps, api.config_map("c"))
    path = f"{api.maps}/c"
    await api.call("PATCH", path, {"metadata": {"managedFields": [{}]}}, MERGE)
    _, obj = await api.call("PATCH", path, {"data": {"more": "1"}}, MERGE, fieldManager="editor")
    assert "managedFields" not in obj["metadata"]
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"more": "2"}}
    code, status = await apply(api, path, body, "m")
    assert (code, status["details"]["causes"][0]["message"]) == (409, 'conflict with "before-first-apply" using v1')
    code, obj = await apply(api, path, {**body, "data": {"more": "1"}}, "m")
    assert (code, obj["data"]) == (200, {"k": "v", "more": "1"})
    assert {entry["manager"] for entry in obj["metadata"]["managedFields"]} == {"before-first-apply", "m"}


async def test_a_put_creates_what_clients_own(api):
    """Leases and events, and kinds whose clients write all of them."""
    space = f"namespaces/{api.namespace}"
    for path, body in {
        f"/apis/coordination.k8s.io/v1/{space}/leases": {"spec": {}},
        f"/api/v1/{space}/services": {"spec": {"ports": [{"port": 80}]}},
        f"/api/v1/{space}/events": {"involvedObject": {"namespace": api.namespace}},
        f"/apis/rbac.authorization.k8s.io/v1/{space}/roles": {"rules": []},
    }.items():
        code, made = await api.call("PUT", f"{path}/a", {**body, "metadata": {"name": "a"}})
        assert (code, made["metadata"]["name"]) == (201, "a"), path
        code, _ = await api.call("PUT", f"{path}/b", {**body, "metadata": {"name": "b", "uid": "gone"}})
        assert code == 409, path
    assert (await api.call("PUT", f"{api.maps}/c", api.config_map("c")))[0] == 404


async def test_a_patch_that_makes_an_object_unreadable(api, runs):
    """A create of such an object is malformed: 400. A patch is invalid: 422."""
    await api.call("POST", api.maps, api.config_map("c"))
    await api.call("POST", runs, api.run("r"))
    unknown = {"fieldValidation": "Strict"}
    for path, patch, kind, query in (
        (f"{api.maps}/c", {"data": "x"}, MERGE, {}),
        (f"{api.maps}/c", {"data": {"a": 1}}, STRATEGIC, {}),
        (f"{api.maps}/c", [{"op": "replace", "path": "/data", "value": []}], JSON_PATCH, {}),
        (f"{api.maps}/c", {"date": {}}, MERGE, unknown),
        (f"{runs}/r", {"spec": {"worker": 1}}, MERGE, unknown),
    ):
        code, status = await api.call("PATCH", path, patch, kind, **query)
        assert (code, status["reason"], status["details"]["causes"][0]["field"]) == (422, "Invalid", "patch"), patch
    assert (await api.call("POST", api.maps, {**api.config_map("d"), "data": "x"}))[0] == 400


async def test_conflicts_of_several_fields(api):
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "1", "b": "1"}}
    await apply(api, f"{api.maps}/c", body, "m1")
    code, status = await apply(api, f"{api.maps}/c", {**body, "data": {"a": "2", "b": "2"}}, "m2")
    text = 'Apply failed with 2 conflicts: conflicts with "m1":\n- .data.a\n- .data.b'
    assert (code, status["message"]) == (409, text)


async def test_reviews_have_a_kind(api):
    """Clients that leave out the kind of a review read it in the answer."""
    on = {"namespace": api.namespace, "verb": "get", "resource": "pods"}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    code, answer = await api.call("POST", path, {"spec": {"resourceAttributes": on}})
    assert (code, answer["kind"], answer["apiVersion"]) == (
        *(201, "SelfSubjectAccessReview"),
        "authorization.k8s.io/v1",
    )
