"""`meshwright doctor` on a live API server: a healthy installation, and seeded misconfigurations, each with its fix."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from meshwright.api.labels import LABEL_JOB
from meshwright_cli.doctor.rights import (
    KUEUE_CLUSTER_RIGHTS,
    KUEUE_RIGHTS,
    OPERATOR_CLUSTER_RIGHTS,
    OPERATOR_HOME_RIGHTS,
    OPERATOR_RIGHTS,
    POD_GROUP_RIGHTS,
    USER_RIGHTS,
    Right,
    queue_rights,
)
from tests.cli.live_server import LiveServer, job, live_server, parsed, running
from tests.operator import role_rules

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/paralleltrainingjobs.meshwright.dev"
NODES, DEFAULT = "/api/v1/nodes", "/api/v1/namespaces/default"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
JOBS = "/apis/meshwright.dev/v1alpha1/namespaces/default/paralleltrainingjobs"
LABELS = {"app.kubernetes.io/name": "meshwright", "app.kubernetes.io/component": "operator"}


def node(index: int) -> dict[str, Any]:
    name = f"node{index}"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
                "network.topology.nvidia.com/accelerator": f"{name}-nvlink",
                "network.topology.nvidia.com/leaf": f"leaf{index // 2}",
                "topology.kubernetes.io/zone": "a",
            },
        },
        "status": {
            "allocatable": {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "8"},
            "capacity": {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "8"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def pod(name: str, labels: dict[str, str], image: str, status: dict[str, Any]) -> dict[str, Any]:
    spec = {"containers": [{"name": "main", "image": image}], "schedulerName": "nobody"}
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


READY = {
    "phase": "Running",
    "conditions": [{"type": "Ready", "status": "True"}],
    "containerStatuses": [
        {"name": "main", "ready": True, "restartCount": 0, "image": "i", "imageID": "", "state": {"running": {}}}
    ],
}


def deployment() -> dict[str, Any]:
    template = {
        "metadata": {"labels": LABELS},
        "spec": {"serviceAccountName": role_rules.ACCOUNT, "containers": [{"name": "operator", "image": "operator"}]},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "meshwright", "labels": {**LABELS, "app.kubernetes.io/version": "0.1.0"}},
        "spec": {"replicas": 1, "selector": {"matchLabels": LABELS}, "template": template},
        "status": {"replicas": 1, "availableReplicas": 1, "readyReplicas": 1},
    }


def lease(age: float) -> dict[str, Any]:
    renewed = (datetime.now(UTC) - timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": "operator-1", "leaseDurationSeconds": 15, "renewTime": renewed}
    metadata = {"name": role_rules.ACCOUNT}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def service(**selector: str) -> dict[str, Any]:
    spec = {"selector": {**LABELS, **selector}, "ports": [{"name": "coordinator", "port": 9470}]}
    metadata = {"name": "meshwright", "labels": LABELS}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def claim(*modes: str) -> dict[str, Any]:
    spec = {"accessModes": [*modes], "resources": {"requests": {"storage": "1Gi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs"}, "spec": spec}


def healthy(server: LiveServer) -> None:
    """Install what a cluster needs, as the chart and the GPU tools do."""
    for index in range(4):
        server.apply(NODES, node(index))
    for path, body in role_rules.objects():
        server.call("POST", path, body)
    server.apply(DEPLOYMENTS, deployment())
    server.apply(f"{DEFAULT}/pods", pod("operator-1", LABELS, "operator", READY))
    server.apply(f"{DEFAULT}/services", service())
    server.apply(LEASES, lease(2))
    server.apply(
        CLASSES,
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {
                "name": "shared",
                "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
            },
            "provisioner": "example.com/shared",
        },
    )
    server.apply(f"{DEFAULT}/persistentvolumeclaims", claim("ReadWriteMany"))
    server.apply(JOBS, {**job("lm"), "status": running()})


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("doctor"), request.config.getoption("--cluster")) as server:
        healthy(server)
        yield server


def diagnosed(server: LiveServer, **options: Any) -> list[dict[str, str]]:
    """The findings, with a lease that was renewed just now unless the test has another one."""
    result = server.cli("doctor", "-o", "json", code=None, **options)
    findings: list[dict[str, str]] = parsed(result)
    assert result.exit_code == (1 if any(one["level"] == "error" for one in findings) else 0)
    return findings


def test_a_healthy_installation_has_no_problem(shared):
    shared.apply(LEASES, lease(2))
    result = shared.cli("doctor")
    assert not [one for one in diagnosed(shared) if one["level"] != "ok"], result.output
    assert "Kubernetes v1." in result.output
    assert re.search(r"4 nodes with 32 GPUs", result.output)
    assert max(len(line) for line in result.output.splitlines()) <= 100


Seed = Callable[[LiveServer], None]


def relabeled(index: int, **labels: str | None) -> Seed:
    keys = {key.replace("__", "/").replace("_", "."): value for key, value in labels.items()}
    return lambda server: server.patch(f"{NODES}/node{index}", {"metadata": {"labels": keys}})


def each_node(change: dict[str, Any], path: str = "") -> Seed:
    def seed(server: LiveServer) -> None:
        for index in range(4):
            server.patch(f"{NODES}/node{index}{path}", change)

    return seed


def older_definition(server: LiveServer) -> None:
    body = server.call("GET", CRD)
    schema = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del schema["spec"]["properties"]["ttlSecondsAfterFinished"]
    server.call("PUT", CRD, body)


def narrower_role(server: LiveServer) -> None:
    path = f"{role_rules.RBAC}/clusterroles/{role_rules.ACCOUNT}"
    body = server.call("GET", path)
    rule = next(rule for rule in body["rules"] if rule["resources"] == ["pods"] and "create" in rule["verbs"])
    rule["verbs"].remove("create")
    server.call("PUT", path, body)


def no_image(server: LiveServer) -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    status = {"name": "main", "ready": False, "restartCount": 0, "image": "i", "imageID": "", "state": waiting}
    body = pod(
        "lm-w0-0", {LABEL_JOB: "lm"}, "registry/worker:typo", {"phase": "Pending", "containerStatuses": [status]}
    )
    server.apply(f"{DEFAULT}/pods", body)


def unready_operator(server: LiveServer) -> None:
    crashing = {"waiting": {"reason": "CrashLoopBackOff"}}
    status = {**READY["containerStatuses"][0], "ready": False, "state": crashing}
    body = {"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": [status]}
    server.patch(f"{DEFAULT}/pods/operator-1/status", {"status": body})
    server.patch(f"{DEPLOYMENTS}/meshwright/status", {"status": {"availableReplicas": 0, "readyReplicas": 0}})


def agents_missing(server: LiveServer) -> None:
    status = copy.deepcopy(running())
    status["conditions"][1] |= {
        "type": "Stalled",
        "status": "True",
        "reason": "AgentsMissing",
        "message": "No agent of 2",
    }
    server.patch(f"{JOBS}/lm/status", {"status": status})


LEAF = "network.topology.nvidia.com/leaf"
SEEDS: dict[str, tuple[Seed, str, str, str]] = {
    # name: what is wrong, check, a part of the message, a part of the fix
    "older definition": (older_definition, "Definition", "lacks spec.ttlSecondsAfterFinished", "meshwright crd"),
    "operator scaled to zero": (
        lambda server: server.patch(f"{DEPLOYMENTS}/meshwright", {"spec": {"replicas": 0}}),
        "Operator", "has 0 replicas", "--replicas 2",
    ),
    "operator crashes": (unready_operator, "Operator", "CrashLoopBackOff", "logs deploy/meshwright"),
    "another version": (
        lambda server: server.patch(
            f"{DEPLOYMENTS}/meshwright", {"metadata": {"labels": {"app.kubernetes.io/version": "0.0.9"}}}
        ),
        "Operator", "has version 0.0.9", "helm upgrade",
    ),
    "expired lease": (lambda server: server.apply(LEASES, lease(600)), "Lease", "has not renewed it for 10m", "logs"),
    "service selects nothing": (
        lambda server: server.patch(f"{DEFAULT}/services/meshwright", {"spec": {"selector": {"app": "typo"}}}),
        "Coordinator", "selects no pod", "helm upgrade",
    ),
    "agents cannot reach the coordinator": (agents_missing, "Coordinator", "do not reach", "NetworkPolicies"),
    "operator lost a right": (narrower_role, "Operator's role", "create pods", "helm upgrade"),
    "no GPU resource": (
        each_node({"status": {"allocatable": {"nvidia.com/gpu": None}}}, "/status"),
        "GPU resource", "no node advertises nvidia.com/gpu", "device plugin",
    ),
    "another GPU resource": (
        each_node({"status": {"allocatable": {"nvidia.com/gpu": None, "amd.com/gpu": "8"}}}, "/status"),
        "GPU resource", "nodes advertise amd.com/gpu", "spec.workers.gpuResource: amd.com/gpu",
    ),
    "all nodes tainted": (
        each_node({"spec": {"taints": [{"key": "gpu", "value": "true", "effect": "NoSchedule"}]}}),
        "GPU nodes", "4 of 4 GPU nodes get no workers", "spec.workers.tolerations",
    ),
    "cordoned node": (
        lambda server: server.patch(f"{NODES}/node3", {"spec": {"unschedulable": True}}),
        "GPU nodes", "1 of 4 GPU nodes", "kubectl uncordon",
    ),
    "shared GPUs": (
        lambda server: server.patch(f"{NODES}/node2", {"metadata": {"labels": {"nvidia.com/gpu.replicas": "4"}}}),
        "GPU nodes", "shared by 4 pods", "turn off time slicing",
    ),
    "no product label": (
        each_node({"metadata": {"labels": {"nvidia.com/gpu.product": None}}}),
        "GPU nodes", "no product label", "nvidia.com/gpu.product",
    ),
    "missing rack label": (
        lambda server: server.patch(f"{NODES}/node0", {"metadata": {"labels": {LEAF: None}}}),
        "Fabric levels", "1 of 4 GPU nodes has no rack label", "topograph",
    ),
    "contradicting labels": (
        lambda server: server.patch(f"{NODES}/node1", {"metadata": {"labels": {"topology.kubernetes.io/zone": "b"}}}),
        "Fabric levels", "leaf0", "each location must be in one location",
    ),
    "no default storage class": (
        lambda server: server.patch(f"{CLASSES}/shared", {"metadata": {"annotations": {"storageclass.kubernetes.io/is-default-class": "false"}}}),  # noqa: E501
        "Storage", "no default StorageClass: there are shared", "ReadWriteMany",
    ),
    "claim missing": (
        lambda server: server.call("DELETE", f"{DEFAULT}/persistentvolumeclaims/runs"),
        "Storage", "claim `runs` does not exist", "spec.checkpoint.claimName",
    ),
    "image cannot be pulled": (no_image, "Worker image", "registry/worker:typo cannot be pulled", "spec.workers.image"),
}  # fmt: skip


@pytest.fixture
def seeded(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[LiveServer]:
    with live_server(tmp_path, request.config.getoption("--cluster")) as server:
        healthy(server)
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_finds_each_seeded_misconfiguration_and_names_its_fix(seeded, name):
    seed, check, message, fix = SEEDS[name]
    seed(seeded)
    problems = [one for one in diagnosed(seeded) if one["level"] in ("warning", "error")]
    found = [one for one in problems if one["check"] == check and message in one["message"] and fix in one["fix"]]
    assert found, problems
    assert {one["check"] for one in problems} <= {check, *ALSO.get(name, ())}, problems


ALSO = {"operator crashes": ("Coordinator",), "claim missing": ()}
"""Other checks that find the same misconfiguration."""


def test_a_cluster_without_meshwright_is_named_so(tmp_path, request):
    with live_server(tmp_path, request.config.getoption("--cluster"), definition=False) as server:
        findings = {one["check"]: one for one in diagnosed(server)}
        assert findings["Definition"]["level"] == "error"
        assert "meshwright crd | kubectl apply" in findings["Definition"]["fix"]
        embedded = "embedded" in findings["API server"]["message"]
        assert ("meshwright-operator --co" if embedded else "helm install") in findings["Operator"]["fix"]
        assert "no node advertises" in findings["GPU resource"]["message"]
        assert findings["Storage"]["level"] == ("ok" if embedded else "warning")
        assert server.cli("doctor", code=1)


def test_a_user_without_rights_sees_what_is_missing(shared):
    findings = diagnosed(shared, kubeconfig=shared.as_user("jane"))
    by_check = {one["check"]: one for one in findings}
    assert by_check["Your rights"]["level"] == "warning"
    assert "create paralleltrainingjobs.meshwright.dev" in by_check["Your rights"]["message"]
    assert "role `edit`" in by_check["Your rights"]["fix"]
    for check in ("Definition", "Operator", "Lease", "Coordinator", "GPU resource", "Storage"):
        assert by_check[check]["level"] == "skipped", by_check[check]
        assert "you may not" in by_check[check]["message"]


def test_a_user_who_may_not_run_commands_in_pods_sees_which_commands_that_takes(shared):
    roles = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
    rules = [
        {"apiGroups": [right.group], "resources": [right.resource], "verbs": [right.verb]}
        for right in (*USER_RIGHTS, Right("create", "pods"), Right("get", "pods/proxy"))
    ]
    shared.apply(f"{roles}/roles", {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
                                    "metadata": {"name": "trainer"}, "rules": rules})  # fmt: skip
    shared.apply(f"{roles}/rolebindings", {
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "trainer"},
        "subjects": [{"kind": "User", "name": "ada", "apiGroup": "rbac.authorization.k8s.io"}],
        "roleRef": {"kind": "Role", "name": "trainer", "apiGroup": "rbac.authorization.k8s.io"},
    })  # fmt: skip
    found = {one["check"]: one for one in diagnosed(shared, kubeconfig=shared.as_user("ada"))}["Your rights"]
    assert found["level"] == "ok"
    assert found["message"].endswith("except profile, export, data upload: you may not create pods/exec")


def test_a_namespace_that_does_not_exist_is_an_error(shared):
    findings = parsed(shared.cli("doctor", "-o", "json", "-n", "nowhere", code=1))
    (found,) = (one for one in findings if one["check"] == "Your rights")
    assert (found["level"], found["message"]) == ("error", "namespace nowhere does not exist")
    assert "kubectl create namespace nowhere" in found["fix"]


def test_the_rights_are_those_of_the_chart():
    wanted = {*OPERATOR_CLUSTER_RIGHTS, *OPERATOR_RIGHTS, *OPERATOR_HOME_RIGHTS}
    granted = {Right(verb, resource, group) for group, resource, verb in role_rules.rights()}
    # The rights on the one Lease and the one Secret, which cannot be asked without their names.
    named = {Right(verb, resource, group) for verb in ("get", "update") for resource, group in (
        ("leases", "coordination.k8s.io"), ("secrets", ""))}  # fmt: skip
    assert wanted == granted - named


def test_the_rights_for_queues_are_those_of_the_chart_and_asked_for_the_jobs_that_need_them():
    kinds = {kind: f"{kind.lower()}Rules" for kind in POD_GROUP_RIGHTS}
    for rights, template in (
        (KUEUE_RIGHTS, "kueueRules"),
        (KUEUE_CLUSTER_RIGHTS, "kueueClusterRules"),
        *((POD_GROUP_RIGHTS[kind], template) for kind, template in kinds.items()),
    ):
        granted = {
            Right(verb, resource, rule["apiGroups"][0])
            for rule in role_rules.rules(template)
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        assert set(rights) == granted, template
    queued = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}}, "spec": {}}
    grouped = {"metadata": {}, "spec": {"workers": {"podGroup": {"kind": "KAI"}}}}
    assert queue_rights(queued) == KUEUE_RIGHTS
    assert queue_rights(grouped) == POD_GROUP_RIGHTS["KAI"]
    assert queue_rights({"metadata": {}, "spec": {"workers": {}}}) == ()
