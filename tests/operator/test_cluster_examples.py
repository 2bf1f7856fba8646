"""The examples of clusters: valid jobs, whose pods carry what the platform needs and stay restricted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from meshwright.api.parsing import parse_spec
from meshwright.api.status import WorkerPlacement
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.plan import make_plans
from meshwright.rules.validation import check_spec
from meshwright_operator.manifests.worker_pod import PodContext, worker_pod
from tests.operator.support import ROOT, Api

UID = "0f1e2d3c-0000-4000-8000-000000000000"
FILES = sorted((ROOT / "examples" / "clusters").glob("*.yaml"))
GPUS = {"nvidia.com/gpu": "8"}
MI300X_BYTES = 192 * 10**9
RAILS = {f"nvidia.com/sriov_resource_rail_{rail}": "1" for rail in range(8)}
LIMITS = {
    "eks-efa": {**GPUS, "vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5120Mi"},
    "h100-infiniband": {**GPUS, "rdma/ib": "1", "cpu": "96"},
    "h100-sriov-rails": {**GPUS, **RAILS},
    "mi300": {"amd.com/gpu": "8", "rdma/ib": "1"},
}
"""What the platforms' own manifests of NCCL tests and training jobs limit, besides memory."""


def pod_of(path: Any) -> dict[str, Any]:
    """The pod of one worker of the example."""
    job = yaml.safe_load(path.read_text(encoding="utf-8"))
    spec = parse_spec(job)
    assert check_spec(spec) == []
    context = PodContext(job["metadata"]["name"], "restricted", UID, spec, "2-0123456789", "http://c:9470", "token")
    name = job["metadata"]["name"]
    return worker_pod(context, WorkerPlacement(worker=0, incarnation=0, pod=f"{name}-w0-0", node="n0", ranks="0-7"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_pod_carries_what_its_platform_needs(path: Any) -> None:
    limits = dict(pod_of(path)["spec"]["containers"][0]["resources"]["limits"])
    limits.pop("memory")
    assert limits == LIMITS[path.stem]


def test_a_rank_fits_on_gpus_whose_memory_the_planner_does_not_know() -> None:
    job = yaml.safe_load((ROOT / "examples" / "clusters" / "mi300.yaml").read_text(encoding="utf-8"))
    size = {"amd.com/gpu": "8", "cpu": "192", "memory": "2Ti", "pods": "110", "rdma/ib": "8"}
    ready = [{"type": "Ready", "status": "True"}]
    nodes = [
        {"metadata": {"name": name}, "status": {"capacity": size, "allocatable": size, "conditions": ready}}
        for name in "abcd"
    ]
    for replicas in (2, 4):
        spec = parse_spec({**job, "spec": {**job["spec"], "replicas": replicas}})
        (plan, *_) = make_plans(spec, Inventory.from_objects(nodes, [], gpu_resource=spec.workers.gpu_resource))
        assert plan.memory is not None
        assert plan.memory.total < 0.97 * MI300X_BYTES


def test_groups_and_networks_reach_the_pods() -> None:
    pods = {path.stem: pod_of(path) for path in FILES}
    assert pods["mi300"]["spec"]["securityContext"]["supplementalGroups"] == [44, 109]
    networks = pods["h100-sriov-rails"]["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"]
    assert networks.count(",") == 7


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
async def test_a_namespace_that_enforces_the_restricted_standard_takes_the_pods(
    api: Api, real_server: str, path: Any
) -> None:
    if not real_server:
        pytest.skip("the embedded server does not check pods against the Pod Security Standards")
    namespace = {"metadata": {"name": "restricted", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    await api.call("POST", "/api/v1/namespaces", namespace, ok=False)
    pod = pod_of(path)
    pods = "/api/v1/namespaces/restricted/pods?dryRun=All"
    answer = await api.create(pods, pod)
    resources = answer["spec"]["containers"][0]["resources"]
    assert set(LIMITS[path.stem]) <= set(resources["limits"])
    if path.stem == "h100-infiniband":
        assert answer["status"]["qosClass"] == "Guaranteed"
    root = copy.deepcopy(pod)
    root["spec"]["securityContext"]["runAsUser"] = 0
    refused = await api.call("POST", pods, root, ok=False)
    assert refused["code"] == 403, "the check is in effect"
