"""The scheduler's pure part: requests, filters, messages, order and choice."""

import pytest

from meshwright_local.scheduler import filters, scoring, snapshot
from meshwright_local.scheduler.resource_requests import pod_requests


def node(name, *, labels=None, taints=(), cordoned=False, **allocatable):
    amounts = {"cpu": "4", "memory": "8Gi", "pods": "10", "nvidia.com/gpu": "2", **allocatable}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "zone": name[0], **(labels or {})}},
        "spec": {"taints": list(taints), **({"unschedulable": True} if cordoned else {})},
        "status": {"allocatable": amounts},
    }


def pod(name, *, on=None, labels=None, gpus=None, requests=None, namespace="default", phase="Running", **spec):
    resources = {"requests": {**({"nvidia.com/gpu": str(gpus)} if gpus else {}), **(requests or {})}}
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": name,
            "labels": labels or {},
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "resourceVersion": "1",
        },
        "spec": {"containers": [{"name": "c", "resources": resources}], **({"nodeName": on} if on else {}), **spec},
        "status": {"phase": phase},
    }


def take_snapshot(nodes, pods=(), assumed=None, namespaces=None):
    return snapshot.take_snapshot(nodes, pods, assumed or {}, namespaces or {})


def why(candidate, nodes, pods=(), **more):
    view = take_snapshot(nodes, pods, **more)
    return {name: filters.filter_reasons(candidate, item, view) for name, item in view.nodes.items()}


def required(*expressions, fields=()):
    term = {"matchExpressions": list(expressions), "matchFields": list(fields)}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def pod_rule(kind, key, match, **more):
    term = {"topologyKey": key, "labelSelector": {"matchLabels": match}, **more}
    return {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


AFFINITY = "node(s) didn't match Pod's node affinity/selector"
TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ({}, "abc"),
        ({"nodeSelector": {"zone": "a"}}, "a"),
        ({"nodeSelector": {"zone": "x"}}, ""),
        ({"affinity": required({"key": "zone", "operator": "In", "values": ["a", "b"]})}, "ab"),
        ({"affinity": required({"key": "zone", "operator": "NotIn", "values": ["a"]})}, "bc"),
        ({"affinity": required({"key": "fast", "operator": "Exists"})}, "c"),
        ({"affinity": required({"key": "fast", "operator": "DoesNotExist"})}, "ab"),
        ({"affinity": required({"key": "fast", "operator": "Gt", "values": ["3"]})}, "c"),
        ({"affinity": required({"key": "fast", "operator": "Lt", "values": ["3"]})}, ""),
        ({"affinity": required()}, ""),
    ],
)
def test_node_selection(spec, allowed):
    nodes = [node("a"), node("b"), node("c", labels={"fast": "7"})]
    against = why(pod("p", **spec), nodes)
    assert "".join(name for name, reasons in against.items() if not reasons) == allowed
    assert all(reasons == [AFFINITY] for reasons in against.values() if reasons)


def test_pinned_by_name():
    pin = required(fields=[{"key": "metadata.name", "operator": "In", "values": ["b"]}])
    against = why(pod("p", gpus=3, affinity=pin), [node("a"), node("b"), node("c", taints=[TAINT])])
    assert filters.unschedulable_message(against) == (
        "0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) didn't satisfy plugin(s) [NodeAffinity]."
    )
    pin["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"].append(
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    )
    against = why(pod("p", affinity=pin), [node("a"), node("b"), node("c")])
    assert [name for name, reasons in against.items() if not reasons] == ["a", "b"]


@pytest.mark.parametrize(
    ("tolerations", "fine"),
    [
        ([], False),
        ([{"operator": "Exists"}], True),
        ([{"key": "gpu", "operator": "Exists"}], True),
        ([{"key": "gpu", "value": "yes"}], True),
        ([{"key": "gpu", "value": "no"}], False),
        ([{"key": "gpu", "value": "yes", "effect": "NoExecute"}], False),
        ([{"key": "other", "operator": "Exists"}], False),
    ],
)
def test_taints(tolerations, fine):
    reasons = why(pod("p", tolerations=tolerations), [node("a", taints=[TAINT])])["a"]
    assert reasons == ([] if fine else ["node(s) had untolerated taint {gpu: yes}"])


def test_a_preference_against_a_node_does_not_exclude_it():
    assert why(pod("p"), [node("a", taints=[{**TAINT, "effect": "PreferNoSchedule"}])])["a"] == []


def test_cordoned():
    assert why(pod("p"), [node("a", cordoned=True)])["a"] == ["node(s) were unschedulable"]
    tolerant = [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]
    assert why(pod("p", tolerations=tolerant), [node("a", cordoned=True)])["a"] == []


def test_resources_count_what_runs_and_not_what_ended():
    there = [pod("x", on="a", gpus=1), pod("y", on="a", gpus=1, phase="Succeeded")]
    assert why(pod("p", gpus=1), [node("a")], there)["a"] == []
    assert why(pod("p", gpus=2), [node("a")], there)["a"] == ["Insufficient nvidia.com/gpu"]
    assert why(pod("p", gpus=1), [node("a")], there, assumed={"z": "a"})["a"] == []
    bound = pod("z", gpus=1)
    assert why(pod("p", gpus=1), [node("a")], [*there, bound], assumed={"z": "a"})["a"] == [
        "Insufficient nvidia.com/gpu"
    ]


def test_several_resources_are_named():
    greedy = pod("p", requests={"cpu": "5", "memory": "9Gi"})
    assert why(greedy, [node("a")])["a"] == ["Insufficient cpu", "Insufficient memory"]
    assert why(pod("p"), [node("a", pods="0")])["a"] == ["Too many pods"]
    assert why(pod("p", requests={"example.com/x": "1"}), [node("a")])["a"] == ["Insufficient example.com/x"]


def test_requests_of_a_pod():
    body = pod("p", requests={"cpu": "500m", "memory": "1Gi"})
    body["spec"]["containers"].append({"name": "d", "resources": {"limits": {"cpu": "1", "nvidia.com/gpu": "1"}}})
    body["spec"]["initContainers"] = [{"name": "i", "resources": {"requests": {"cpu": "4", "memory": "512Mi"}}}]
    body["spec"]["overhead"] = {"cpu": "100m"}
    assert pod_requests(body) == {
        "cpu": 4100,
        "memory": 2**30 * 1000,
        "nvidia.com/gpu": 1000,
        "pods": 1000,
    }


def test_sidecars_count_with_containers_and_with_later_init_containers():
    def container(cpu, **more):
        return {"name": "c", "resources": {"requests": {"cpu": cpu}}, **more}

    body = pod("p", requests={"cpu": "1"})
    body["spec"]["initContainers"] = [container("3"), container("500m", restartPolicy="Always"), container("2750m")]
    assert pod_requests(body)["cpu"] == 3250
    body["spec"]["initContainers"].pop()
    assert pod_requests(body)["cpu"] == 3000
    assert (
        pod_requests({**body, "spec": {**body["spec"], "initContainers": [container("4", restartPolicy="Always")]}})[
            "cpu"
        ]
        == 5000
    )


def test_pod_affinity_joins_and_starts_alone():
    near = pod("p", labels={"app": "x"}, affinity=pod_rule("podAffinity", "zone", {"app": "x"}))
    nodes = [node("a1"), node("a2"), node("b1")]
    assert all(reasons == [] for reasons in why(near, nodes).values())
    against = why(near, nodes, [pod("q", on="a1", labels={"app": "x"})])
    assert (against["a1"], against["a2"]) == ([], [])
    assert against["b1"] == ["node(s) didn't match pod affinity rules"]


def test_pod_anti_affinity_both_ways():
    apart = pod("p", labels={"app": "x"}, affinity=pod_rule("podAntiAffinity", "zone", {"app": "x"}))
    plain = pod("q", on="a1", labels={"app": "x"})
    nodes = [node("a1"), node("a2"), node("b1")]
    against = why(apart, nodes, [plain])
    assert against["a2"] == ["node(s) didn't match pod anti-affinity rules"]
    assert against["b1"] == []
    apart["spec"]["nodeName"] = "b1"
    against = why(pod("r", labels={"app": "x"}), nodes, [apart])
    assert against["b1"] == ["node(s) didn't satisfy existing pods anti-affinity rules"]
    assert against["a1"] == []


def test_affinity_respects_namespaces():
    rule = pod_rule("podAntiAffinity", "zone", {"app": "x"})
    other = pod("q", on="a1", labels={"app": "x"}, namespace="team")
    assert why(pod("p", affinity=rule), [node("a1")], [other])["a1"] == []
    everywhere = pod_rule("podAntiAffinity", "zone", {"app": "x"}, namespaceSelector={})
    assert why(pod("p", affinity=everywhere), [node("a1")], [other])["a1"]
    chosen = pod_rule("podAntiAffinity", "zone", {"app": "x"}, namespaceSelector={"matchLabels": {"tier": "1"}})
    assert why(pod("p", affinity=chosen), [node("a1")], [other], namespaces={"team": {"tier": "1"}})["a1"]
    assert why(pod("p", affinity=chosen), [node("a1")], [other], namespaces={"team": {"tier": "2"}})["a1"] == []


def test_messages():
    reasons = {
        "a": ["Insufficient nvidia.com/gpu"],
        "b": ["Insufficient nvidia.com/gpu", "Insufficient cpu"],
        "c": ["node(s) were unschedulable"],
        "d": [AFFINITY],
    }
    assert filters.unschedulable_message(reasons) == (
        "0/4 nodes are available: 1 Insufficient cpu, 1 node(s) didn't match Pod's node affinity/selector, "
        "1 node(s) were unschedulable, 2 Insufficient nvidia.com/gpu."
    )
    assert filters.unschedulable_message({}) == "no nodes available to schedule pods"


def test_choice_prefers_then_spreads():
    view = take_snapshot([node("a"), node("b")], [pod("x", on="a", requests={"cpu": "1"})])
    assert scoring.best_node(pod("p"), view.nodes.values()).name == "b"
    preference = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    weighted = [{"weight": 10, "preference": preference}]
    wishes = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": weighted}}
    assert scoring.best_node(pod("p", affinity=wishes), view.nodes.values()).name == "a"


def test_order_of_waiting_pods():
    young, old, urgent = pod("young"), pod("old"), pod("urgent", priority=5)
    young["metadata"]["creationTimestamp"] = "2026-01-01T00:00:05Z"
    second = pod("second")
    second["metadata"]["resourceVersion"] = "2"
    ordered = sorted([young, second, old, urgent], key=scoring.queue_order)
    assert [item["metadata"]["name"] for item in ordered] == ["urgent", "old", "second", "young"]
