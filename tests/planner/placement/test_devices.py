"""Network devices, huge pages and local storage: a job never gets nodes that lack them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.api.labels import ANNOTATION_DEVICES, KIND
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.pod_resources import Resources, parse_resources, pod_request, worker_requests
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import place
from meshwright.planner.plan import Plan, make_plan

GPU = "nvidia.com/gpu"
KINDS = ("rdma/ib", "vpc.amazonaws.com/efa", "hugepages-2Mi", "ephemeral-storage")
AMOUNTS = st.integers(0, 6)


def spec(workers: int, resources: dict[str, Any], gpus: int = 2) -> ParallelTrainingJobSpec:
    return ParallelTrainingJobSpec.model_validate(
        {
            "replicas": workers,
            "model": {"preset": "tiny"},
            "data": {"source": "PythonStdlib"},
            "training": {"steps": 1, "globalBatchSize": 24, "sequenceLength": 64},
            "parallelism": {"tensor": gpus, "pipeline": 1, "microBatches": 1},
            "workers": {"image": "i", "gpusPerWorker": gpus, "resources": resources},
        }
    )


def node(name: str, gpus: int, others: dict[str, int]) -> dict[str, Any]:
    allocatable = {GPU: str(gpus), "cpu": "64", "memory": "1Ti", "pods": "110"}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {
            "allocatable": allocatable | {kind: str(amount) for kind, amount in others.items()},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def pod(name: str, where: str, requests: dict[str, int], *, claims: bool = False) -> dict[str, Any]:
    """A pod that requests these amounts, or claims them through Dynamic Resource Allocation as worker pods do."""
    claimed = {kind: amount for kind, amount in requests.items() if claims and "/" in kind}
    annotations = {ANNOTATION_DEVICES: json.dumps(claimed)} if claims else {}
    owners = [{"kind": KIND, "name": "job", "uid": "u", "controller": True}] if claims else []
    amounts = {kind: str(amount) for kind, amount in requests.items() if kind not in claimed}
    return {
        "metadata": {"name": name, "namespace": "other", "annotations": annotations, "ownerReferences": owners},
        "spec": {
            "nodeName": where,
            "resourceClaims": [{"name": "devices", "resourceClaimTemplateName": "devices"}] if claims else [],
            "containers": [{"name": "c", "resources": {"requests": amounts, "limits": amounts}}],
        },
    }


def asked(devices: dict[str, int]) -> dict[str, Any]:
    """`workers.resources` that requests these amounts."""
    found: dict[str, Any] = {"cpu": "1", "devices": {}, "hugePages": {}}
    for kind, amount in devices.items():
        if kind == "hugepages-2Mi":
            found["hugePages"]["2Mi"] = str(amount)
        elif kind == "ephemeral-storage":
            found["ephemeralStorage"] = str(amount)
        else:
            found["devices"][kind] = amount
    return found


def plan_of(job: ParallelTrainingJobSpec, inventory: Inventory) -> Plan:
    return make_plan(job, inventory)


OTHERS = st.dictionaries(st.sampled_from(KINDS), AMOUNTS)
WANTED = st.dictionaries(st.sampled_from(KINDS), st.integers(1, 4))


@given(
    wanted=WANTED,
    nodes=st.lists(OTHERS, min_size=1, max_size=5),
    used=st.lists(st.tuples(st.integers(0, 4), OTHERS, st.booleans()), max_size=4),
    workers=st.sampled_from([1, 2, 3]),
)
def test_every_worker_gets_a_node_with_all_it_asks_for(
    wanted: dict[str, int], nodes: list[dict[str, int]], used: list[tuple[int, dict[str, int], bool]], workers: int
) -> None:
    objects = [node(f"n{number}", 8, others) for number, others in enumerate(nodes)]
    pods = [
        pod(f"p{number}", f"n{where % len(nodes)}", requests, claims=claims)
        for number, (where, requests, claims) in enumerate(used)
    ]
    free = [Counter(others) for others in nodes]
    for where, requests, _ in used:
        free[where % len(nodes)].subtract(requests)
    places = [min(4, *(max(0, amounts[kind]) // count for kind, count in wanted.items()), 4) for amounts in free]
    job = spec(workers, asked(wanted))
    inventory = Inventory.from_objects(objects, pods)
    plan = plan_of(job, inventory)
    try:
        placement = place(plan, inventory)
    except DoesNotFitError:
        assert sum(places) < workers
        return
    assert sum(places) >= workers
    for name, count in Counter(placement.nodes.values()).items():
        assert count <= places[int(name[1:])]


def test_the_message_names_the_device_that_is_missing() -> None:
    inventory = Inventory.from_objects([node("n0", 8, {"rdma/ib": 1}), node("n1", 8, {})], [])
    plan = plan_of(spec(3, {"devices": {"rdma/ib": 1}}), inventory)
    with pytest.raises(DoesNotFitError, match=r"1 of 3 workers .*2 nodes with too little rdma/ib"):
        place(plan, inventory)


def test_a_worker_requests_what_its_spec_names() -> None:
    resources = {
        "cpu": "8", "memory": "64Gi", "devices": {"rdma/ib": 1}, "hugePages": {"2Mi": "5120Mi"},
        "ephemeralStorage": "10Gi",
    }  # fmt: skip
    requests = worker_requests(spec(1, resources, gpus=8).workers)
    assert requests == {
        GPU: "8", "cpu": "8", "memory": "64Gi", "rdma/ib": "1", "hugepages-2Mi": "5120Mi", "ephemeral-storage": "10Gi",
    }  # fmt: skip
    container = {"resources": {"requests": requests}}
    assert pod_request({"spec": {"containers": [container]}}, GPU) == parse_resources(requests, GPU, pods=1)


def test_amounts_are_added_multiplied_and_compared_by_name() -> None:
    one, two = Resources(gpus=1, others=(("a/b", 2),)), Resources(others=(("a/b", 1), ("c/d", 3)))
    assert (one + two).others == (("a/b", 3), ("c/d", 3))
    assert (one - one).others == ()
    assert (two * 2).others == (("a/b", 2), ("c/d", 6))
    assert (two // 2).others == (("c/d", 1),)
    assert Resources(gpus=4, others=(("a/b", 5),)).fits(one) == 2
    assert Resources(gpus=4).fits(one) == 0
    assert Resources(gpus=4, others=(("a/b", 1),)).short_of(one) == ["a/b"]


def test_init_containers_and_sidecars_count_as_kubernetes_counts_them() -> None:
    def container(amount: int, **fields: Any) -> dict[str, Any]:
        return {"resources": {"requests": {"a/b": str(amount)}}, **fields}

    spec = {
        "containers": [container(2), container(1)],
        "initContainers": [container(9), container(4, restartPolicy="Always")],
    }
    assert pod_request({"spec": spec}, GPU).others == (("a/b", 9),)
    assert pod_request({"spec": {**spec, "initContainers": spec["initContainers"][1:]}}, GPU).others == (("a/b", 7),)
