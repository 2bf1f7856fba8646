"""Pods: defaults, checks, binding, eviction, graceful deletion."""

import time

import pytest

from tests.patience import patient

MERGE, JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


def binding(name, node="n1"):
    return {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"kind": "Node", "name": node}}


async def test_defaults_and_first_status(api):
    code, pod = await api.call("POST", api.pods, api.pod("p"))
    assert code == 201
    assert pod["spec"]["restartPolicy"] == "Always"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 30
    assert pod["spec"]["priority"] == 0
    assert pod["spec"]["containers"][0]["imagePullPolicy"] == "Always"
    assert (pod["status"]["phase"], pod["status"]["qosClass"]) == ("Pending", "BestEffort")


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": []},
        {"containers": [{"name": "a", "image": "b"}, {"name": "a", "image": "b"}]},
        {"containers": [{"name": "Bad_Name", "image": "b"}]},
        {"containers": [{"name": "a", "image": "b", "volumeMounts": [{"name": "x", "mountPath": "/x"}]}]},
        {"restartPolicy": "Sometimes"},
        {"schedulingGates": [{"name": "example.com/g"}], "nodeName": "n1"},
        {"volumes": [{"name": "v", "emptyDir": {}}, {"name": "v", "emptyDir": {}}]},
    ],
)
async def test_specs_are_checked(api, spec):
    code, status = await api.call("POST", api.pods, api.pod("bad", **spec))
    assert (code, status["reason"]) == (422, "Invalid")
    assert status["details"]["causes"]


async def test_specs_stay_as_they_are(api):
    await api.call("POST", api.pods, api.pod("p"))
    code, _ = await api.call("PATCH", f"{api.pods}/p", {"spec": {"schedulerName": "other"}}, MERGE)
    assert code == 422
    toleration = {"key": "a", "operator": "Exists"}
    code, _ = await api.call("PATCH", f"{api.pods}/p", {"spec": {"tolerations": [toleration]}}, MERGE)
    assert code == 200


async def test_status_is_a_part_of_its_own(api):
    await api.call("POST", api.pods, api.pod("p"))
    patch = {"status": {"phase": "Running"}, "metadata": {"labels": {"sneaky": "1"}}, "spec": {"nodeName": "zz"}}
    code, _ = await api.call("PATCH", f"{api.pods}/p/status", patch, MERGE)
    assert code == 200
    _, pod = await api.call("GET", f"{api.pods}/p")
    assert pod["status"]["phase"] == "Running"
    assert "nodeName" not in pod["spec"]
    await api.call("PATCH", f"{api.pods}/p", {"status": {"phase": "Failed"}}, MERGE)
    assert (await api.call("GET", f"{api.pods}/p"))[1]["status"]["phase"] == "Running"


async def test_addresses(api):
    await api.call("POST", api.pods, api.pod("p"))
    path = f"{api.pods}/p/status"
    two = {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "10.0.0.2"}]}
    for wrong in (two, {"podIP": "here"}, {"podIPs": [{"ip": "10.0.0.300"}]}):
        assert (await api.call("PATCH", path, {"status": wrong}, MERGE))[0] == 422
    code, pod = await api.call("PATCH", path, {"status": {"podIP": "10.0.0.1"}}, MERGE)
    assert (code, pod["status"]["podIPs"]) == (200, [{"ip": "10.0.0.1"}])
    _, pod = await api.call("PATCH", path, {"status": {"podIP": "10.0.0.2"}}, MERGE)
    assert pod["status"]["podIPs"] == [{"ip": "10.0.0.2"}]
    # A strategic merge is by address, so that a change of address must replace the list.
    change = {"podIP": "10.0.0.3", "podIPs": [{"ip": "10.0.0.3"}]}
    assert (await api.call("PATCH", path, {"status": change}, STRATEGIC))[0] == 422
    change = {"podIP": "10.0.0.3", "podIPs": [{"$patch": "replace"}, {"ip": "10.0.0.3"}]}
    _, pod = await api.call("PATCH", path, {"status": change}, STRATEGIC)
    assert pod["status"]["podIPs"] == [{"ip": "10.0.0.3"}]


async def test_strategic_merges_keep_the_order_of_the_patch(api):
    await api.call("POST", api.pods, api.pod("p"))
    for types, expected in (("A", "A"), ("B", "BA"), ("DA", "DBA"), ("CBA", "CDBA"), ("AE", "CDBAE")):
        conditions = [{"type": kind, "status": "True"} for kind in types]
        _, pod = await api.call("PATCH", f"{api.pods}/p/status", {"status": {"conditions": conditions}}, STRATEGIC)
        assert "".join(c["type"] for c in pod["status"]["conditions"]) == expected


async def test_gates_keep_a_pod_from_nodes(api):
    gates = [{"name": "example.com/a"}, {"name": "example.com/b"}]
    code, pod = await api.call("POST", api.pods, api.pod("p", schedulingGates=gates))
    assert code == 201
    assert pod["status"]["conditions"][0]["reason"] == "SchedulingGated"
    code, _ = await api.call("POST", f"{api.pods}/p/binding", binding("p"))
    assert code >= 400
    aimed = {"spec": {"nodeSelector": {"kubernetes.io/hostname": "n1"}}}
    assert (await api.call("PATCH", f"{api.pods}/p", aimed, MERGE))[0] == 200
    more = [{"op": "add", "path": "/spec/schedulingGates/-", "value": {"name": "example.com/c"}}]
    assert (await api.call("PATCH", f"{api.pods}/p", more, JSON_PATCH))[0] == 422
    gone = [{"op": "remove", "path": "/spec/schedulingGates"}]
    assert (await api.call("PATCH", f"{api.pods}/p", gone, JSON_PATCH))[0] == 200
    assert (await api.call("PATCH", f"{api.pods}/p", {"spec": {"nodeSelector": None}}, MERGE))[0] == 422


async def test_binding(api):
    await api.call("POST", api.pods, api.pod("p"))
    code, _ = await api.call("POST", f"{api.pods}/p/binding", binding("p"))
    assert code == 201
    _, pod = await api.call("GET", f"{api.pods}/p")
    assert pod["spec"]["nodeName"] == "n1"
    assert [(c["type"], c["status"]) for c in pod["status"]["conditions"]] == [("PodScheduled", "True")]
    _, listed = await api.call("GET", api.pods, fieldSelector="spec.nodeName=n1")
    assert [item["metadata"]["name"] for item in listed["items"]] == ["p"]
    code, status = await api.call("POST", f"{api.pods}/p/binding", binding("p", "n2"))
    assert (code, status["reason"]) == (409, "Conflict")
    assert (await api.call("POST", f"{api.pods}/none/binding", binding("none")))[0] == 404


async def bound(api, name, **spec):
    await api.call("POST", api.pods, api.pod(name, **spec))
    await api.call("POST", f"{api.pods}/{name}/binding", binding(name))
    await api.call("PATCH", f"{api.pods}/{name}/status", {"status": {"phase": "Running"}}, MERGE)


async def test_unbound_pods_go_at_once(api):
    await api.call("POST", api.pods, api.pod("p"))
    code, pod = await api.call("DELETE", f"{api.pods}/p")
    assert (code, pod["kind"]) == (200, "Pod")
    assert (await api.call("GET", f"{api.pods}/p"))[0] == 404


async def test_bound_pods_wait_for_their_node(api):
    await bound(api, "p")
    code, pod = await api.call("DELETE", f"{api.pods}/p")
    assert (code, pod["metadata"]["deletionGracePeriodSeconds"]) == (200, 30)
    first = pod["metadata"]["deletionTimestamp"]
    _, pod = await api.call("DELETE", f"{api.pods}/p", gracePeriodSeconds="60")
    assert pod["metadata"]["deletionTimestamp"] == first
    _, pod = await api.call("DELETE", f"{api.pods}/p", {"gracePeriodSeconds": 5})
    assert pod["metadata"]["deletionGracePeriodSeconds"] == 5
    assert pod["metadata"]["deletionTimestamp"] < first
    assert (await api.call("GET", f"{api.pods}/p"))[0] == 200
    uid = pod["metadata"]["uid"]
    wrong = {"gracePeriodSeconds": 0, "preconditions": {"uid": "wrong"}}
    assert (await api.call("DELETE", f"{api.pods}/p", wrong))[0] == 409
    code, _ = await api.call("DELETE", f"{api.pods}/p", {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})
    assert code == 200
    assert (await api.call("GET", f"{api.pods}/p"))[0] == 404


async def test_forced_and_finished_pods_go_at_once(api):
    await bound(api, "p")
    await api.call("DELETE", f"{api.pods}/p", gracePeriodSeconds="0")
    assert (await api.call("GET", f"{api.pods}/p"))[0] == 404
    await bound(api, "q")
    await api.call("PATCH", f"{api.pods}/q/status", {"status": {"phase": "Succeeded"}}, MERGE)
    await api.call("DELETE", f"{api.pods}/q")
    assert (await api.call("GET", f"{api.pods}/q"))[0] == 404


async def test_finalizers_outlast_grace(api):
    body = api.pod("p")
    body["metadata"]["finalizers"] = ["example.com/x"]
    await api.call("POST", api.pods, body)
    await api.call("DELETE", f"{api.pods}/p", gracePeriodSeconds="0")
    assert (await api.call("GET", f"{api.pods}/p"))[0] == 200
    added = {"metadata": {"finalizers": ["example.com/x", "example.com/y"]}}
    assert (await api.call("PATCH", f"{api.pods}/p", added, MERGE))[0] == 422
    await api.call("PATCH", f"{api.pods}/p", {"metadata": {"finalizers": None}}, MERGE)
    assert (await api.call("GET", f"{api.pods}/p"))[0] == 404


async def test_eviction_obeys_budgets(api):
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p", "namespace": api.namespace}}
    eviction["deleteOptions"] = {"gracePeriodSeconds": 0}
    await bound(api, "p")
    budgets = f"/apis/policy/v1/namespaces/{api.namespace}/poddisruptionbudgets"
    budget = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "b"}}
    budget["spec"] = {"minAvailable": 1, "selector": {"matchLabels": {"app": "p"}}}
    assert (await api.call("POST", budgets, budget))[0] == 201
    code, status = await api.call("POST", f"{api.pods}/p/eviction", eviction)
    assert (code, status["reason"]) == (429, "TooManyRequests")
    await api.call("DELETE", f"{budgets}/b")
    await api.until(201, "POST", f"{api.pods}/p/eviction", eviction)
    assert (await api.call("GET", f"{api.pods}/p"))[0] == 404


async def test_priority_classes(api):
    code, _ = await api.call("POST", api.pods, api.pod("p", priorityClassName=f"none-{api.namespace}"))
    assert code == 403
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": api.namespace}}
    assert (await api.call("POST", classes, {**body, "value": 1000}))[0] == 201
    pod = await api.until(201, "POST", api.pods, api.pod("p", priorityClassName=api.namespace))
    assert pod["spec"]["priority"] == 1000
    assert (await api.call("PATCH", f"{classes}/{api.namespace}", {"value": 5}, MERGE))[0] in (403, 422)
    await api.call("DELETE", f"{classes}/{api.namespace}")


async def test_logs_and_exec_without_a_node(api):
    await api.call("POST", api.pods, api.pod("p"))
    assert await api.call("GET", f"{api.pods}/p/log") == (204, "")
    code, _ = await api.call("GET", f"{api.pods}/p/log", container="zz")
    assert code == 400
    code, _ = await api.call("POST", f"{api.pods}/p/exec", command="true")
    assert code == 400
    assert (await api.call("GET", f"{api.pods}/none/log"))[0] == 404


@pytest.mark.parametrize(
    ("field", "value", "cause"),
    [
        ("readinessProbe", {"exec": {"command": ["true"]}}, "without restartPolicy=Always"),
        ("lifecycle", {"postStart": {"exec": {"command": ["true"]}}}, "without restartPolicy=Always"),
        ("restartPolicy", "Sometimes", 'supported values: "Always", "Never", "OnFailure"'),
    ],
)
async def test_only_sidecars_have_what_containers_have(api, field, value, cause):
    init = {"name": "i", "image": "b", field: value}
    code, status = await api.call("POST", api.pods, api.pod("bad", initContainers=[init]))
    assert (code, [each["field"] for each in status["details"]["causes"]]) == (422, [f"spec.initContainers[0].{field}"])
    assert cause in status["message"]
    sidecar = {**init, "restartPolicy": "Always"}
    assert (await api.call("POST", api.pods, api.pod("good", initContainers=[sidecar])))[0] == 201


def _status(name, state, **more):
    return {"name": name, "image": "b", "imageID": "", "restartCount": 0, "ready": False, "state": state, **more}


RUNNING, ENDED = {"running": {}}, {"terminated": {"exitCode": 0, "reason": "Completed"}}
KILLED, FAILED = {"terminated": {"exitCode": 143}}, {"terminated": {"exitCode": 1, "reason": "Error"}}
INITIALIZED = [{"type": "Initialized", "status": "True"}]
READY = [*INITIALIZED, {"type": "Ready", "status": "True"}]


@pytest.mark.parametrize(
    ("inits", "containers", "conditions", "columns"),
    [
        ([RUNNING, {"waiting": {"reason": "PodInitializing"}}], [], [], ["0/2", "Init:0/2", "0"]),
        (
            [ENDED, {"waiting": {"reason": "CrashLoopBackOff"}}],
            [],
            [],
            ["0/2", "Init:CrashLoopBackOff", "3"],
        ),
        ([ENDED, RUNNING], [{"waiting": {"reason": "PodInitializing"}}], INITIALIZED, ["1/2", "PodInitializing", "3"]),
        ([ENDED, RUNNING], [RUNNING], READY, ["2/2", "Running", "3"]),
        ([ENDED, RUNNING], [ENDED], INITIALIZED, ["1/2", "Completed", "3"]),
        ([ENDED, KILLED], [FAILED], INITIALIZED, ["0/2", "Error", "3"]),
        ([FAILED, {"waiting": {"reason": "PodInitializing"}}], [], [], ["0/2", "Init:Error", "0"]),
    ],
)
async def test_columns_count_sidecars(api, inits, containers, conditions, columns):
    init = [{"name": "i", "image": "b"}, {"name": "s", "image": "b", "restartPolicy": "Always"}]
    await api.call("POST", api.pods, api.pod("p", initContainers=init))
    restarts = [0, 0 if "PodInitializing" in str(inits[1]) else 3]
    shown = [
        _status(name, state, restartCount=count, started=state == RUNNING, ready=state == RUNNING and name == "s")
        for name, state, count in zip("is", inits, restarts, strict=True)
    ]
    name = api.pod("p")["spec"]["containers"][0]["name"]
    main = [_status(name, state, ready=state == RUNNING, started=state == RUNNING) for state in containers]
    status = {"phase": "Running" if containers else "Pending", "conditions": conditions}
    status |= {"initContainerStatuses": shown, "containerStatuses": main}
    code, answer = await api.call("PATCH", f"{api.pods}/p/status", {"status": status}, MERGE)
    assert code == 200, answer
    headers = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    async with api.session.get(f"{api.server.url}{api.pods}/p", headers=headers, ssl=api.context) as response:
        assert (await response.json())["rows"][0]["cells"][1:4] == columns


async def test_a_bound_pod_has_the_labels_of_its_nodes_zone(api):
    name, zone, region = f"n-{api.namespace}", "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
    labels = {zone: "z", region: "r", "other": "no"}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
    assert (await api.call("POST", "/api/v1/nodes", node))[0] == 201
    there = {**binding("p", name), "metadata": {"name": "p", "labels": {"given": "yes"}}}
    deadline = time.monotonic() + patient(10)  # the real server notices nodes a moment later
    while True:
        await api.call("POST", api.pods, api.pod("p"))
        assert (await api.call("POST", f"{api.pods}/p/binding", there))[0] == 201
        _, pod = await api.call("GET", f"{api.pods}/p")
        if zone in pod["metadata"]["labels"] or time.monotonic() > deadline:
            break
        await api.call("DELETE", f"{api.pods}/p", gracePeriodSeconds="0")
    assert pod["metadata"]["labels"] == {"app": "p", "given": "yes", zone: "z", region: "r"}
    _, direct = await api.call("POST", api.pods, api.pod("q", nodeName=name))
    assert direct["metadata"]["labels"] == {"app": "q", zone: "z", region: "r"}
    for pod in ("p", "q"):
        await api.call("DELETE", f"{api.pods}/{pod}", gracePeriodSeconds="0")
    await api.call("DELETE", f"/api/v1/nodes/{name}")
