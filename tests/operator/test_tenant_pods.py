"""Pods that a tenant may create, and that say more than the truth: they take no capacity from jobs of others.

A tenant can set every annotation, label and owner reference, and can keep a pod from ever getting a node.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright_operator.kube.cache import Cache
from meshwright_operator.kube.pod_info import read_pod
from meshwright_operator.kube.pod_requests import PodRequest, read_pod_request
from meshwright_operator.scheduling.cluster_view import ClusterView
from tests.operator.agents import Kubelet
from tests.operator.conftest import Settled, StartOperator
from tests.operator.support import JOBS, Api, job, until

GPU = labels.GPU_RESOURCE
TENANT = "/api/v1/namespaces/tenant/pods"
NEVER: KubeObject = {"schedulingGates": [{"name": "example.com/never"}]}
DEEP = '{"a":' * 50_000
MANY = json.dumps({GPU: 8})


def pinned(node: str) -> KubeObject:
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [field]}]}}
    return {"affinity": {"nodeAffinity": required}}


def pod(name: str, spec: KubeObject, *, claimed: str = "", gpus: int = 0, **metadata: Any) -> KubeObject:
    amount = {"resources": {"limits": {GPU: str(gpus)}, "requests": {GPU: str(gpus)}}} if gpus else {}
    annotations = {"annotations": {labels.ANNOTATION_DEVICES: claimed}} if claimed else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "tenant", **annotations, **metadata},
        "spec": {"containers": [{"name": "c", "image": "i", **amount}], **spec},
    }


def owned(name: str, uid: str = "u") -> KubeObject:
    owner = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "name": name, "uid": uid, "controller": True}
    return {"labels": {labels.LABEL_JOB: name}, "ownerReferences": [owner]}


def counted(body: KubeObject) -> tuple[str, int] | None:
    """The node and the GPUs that placement counts for a pod."""
    body["metadata"] |= {"uid": "p", "resourceVersion": "1"}
    cache = Cache()
    if labels.LABEL_JOB in body["metadata"].get("labels", {}):
        read = read_pod(body)
        cache.put_pod(read) if read is not None else cache.put_unowned_pod(body)
        found = next(iter(cache.pod_requests().values()), None)
    else:
        found = read_pod_request(body, {})
    return None if found is None else (found.node, found.amount(GPU).gpus)


@pytest.mark.parametrize("claimed", [MANY, DEEP, '{"nvidia.com/gpu": -8}', "[1]", "{", "x" * 200_000, '{"a": 1e400}'])
def test_what_a_foreign_pod_says_that_it_claims_does_not_count(claimed: str) -> None:
    assert counted(pod("p", {"nodeName": "n0"}, claimed=claimed, gpus=1)) == ("n0", 1)


@pytest.mark.parametrize("claimed", [MANY, DEEP])
def test_a_pod_of_a_job_claims_nothing_without_a_claim(claimed: str) -> None:
    body = pod("a-w0-0", {"nodeName": "n0"}, claimed=claimed, gpus=1, **owned("a"))
    assert counted(body) == ("n0", 1)


@pytest.mark.parametrize(
    ("claimed", "gpus"),
    [(MANY, 8), (DEEP, 0), ('{"nvidia.com/gpu": -8}', 0), (json.dumps({GPU: 1 << 70}), 0), (json.dumps({GPU: "8"}), 0)],
)
def test_what_a_pod_of_a_job_claims_is_a_number_that_a_node_may_have(claimed: str, gpus: int) -> None:
    claims = {"nodeName": "n0", "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "gpus"}]}
    assert counted(pod("a-w0-0", claims, claimed=claimed, **owned("a"))) == ("n0", gpus)


@pytest.mark.parametrize("metadata", [{}, {"labels": {labels.LABEL_JOB: "a"}}], ids=["foreign", "labelled"])
@pytest.mark.parametrize(
    "waiting",
    [
        NEVER,
        {"schedulerName": "nobody"},
        {"nodeSelector": {"kubernetes.io/hostname": "n0"}, **NEVER},
        {"schedulingGates": [{"name": labels.GANG_GATE}]},
    ],
)
def test_a_pod_that_kube_scheduler_is_not_about_to_bind_takes_nothing(
    waiting: KubeObject, metadata: KubeObject
) -> None:
    for name in ("p", "a-w0-0"):
        assert counted(pod(name, {**pinned("n0"), **waiting}, gpus=8, **metadata)) is None


def test_a_pod_that_kube_scheduler_could_not_bind_takes_nothing() -> None:
    body = pod("p", pinned("n0"), gpus=8)
    assert counted(body) == ("n0", 8), "it is about to get the node"
    body["status"] = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}
    assert counted(body) is None


def test_a_pod_of_another_namespace_is_none_of_the_job_whose_uid_it_claims() -> None:
    view = ClusterView()
    amount = {"containers": [{"resources": {"requests": {GPU: 2}}}]}
    for namespace in ("default", "tenant"):
        request = PodRequest("good-w0-0", namespace, f"node-of-{namespace}", json.dumps(amount), "good", "uid")
        view.apply({f"{namespace}/good-w0-0": request})
    assert set(view.use_of(GPU).by_node) == {"node-of-default", "node-of-tenant"}
    assert set(view.used_by_job("default", "uid", GPU)) == {"node-of-default"}
    assert view.gpus_in_use("default", "uid") == 0


async def test_hostile_pods_of_a_tenant_keep_no_job_from_starting(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await api.call("POST", "/api/v1/namespaces", {"metadata": {"name": "tenant"}}, ok=False)
    idle = await api.create(JOBS.replace("default", "tenant"), job("idle", suspend=True))
    hostile = [
        pod("deep", {"nodeName": "n0"}, claimed=DEEP),
        pod("many", {"nodeName": "n1"}, claimed=MANY),
        pod("gated", {**pinned("n2"), **NEVER}, gpus=2),
        pod("nobody", {**pinned("n3"), "schedulerName": "nobody"}, gpus=2),
        pod("ghost-w0-0", {**pinned("n0"), **NEVER}, gpus=2, labels={labels.LABEL_JOB: "ghost"}),
        pod("deep-w0-0", {"nodeName": "n1"}, claimed=DEEP, labels={labels.LABEL_JOB: "deep"}),
        pod("idle-w7-0", {**pinned("n1"), **NEVER}, gpus=2, **owned("idle", idle["metadata"]["uid"])),
    ]
    for body in hostile:
        await api.create(TENANT, body)
    operator = await start_operator(lease_seconds=60.0)
    await api.create(JOBS, job("good"))
    assert (await settled("good"))["readyRanks"] == "8/8"
    assert operator.failure is None

    async def deleted() -> bool:
        return "idle-w7-0" not in [one["metadata"]["name"] for one in await api.items(TENANT)]

    await until(deleted, "the pod that the job owns and does not need is deleted")
