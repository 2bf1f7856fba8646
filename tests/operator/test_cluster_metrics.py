"""GPUs of the cluster by state, and what still fits: counted from nodes and pods as they are at the scrape."""

from __future__ import annotations

import copy
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from meshwright.api.labels import GPU_RESOURCE
from meshwright_operator.kube.pod_requests import PodRequest
from meshwright_operator.metrics.cluster_metrics import COUNT_SECONDS, ClusterMetrics
from meshwright_operator.scheduling.counted_capacity import CountedCapacity
from meshwright_operator.scheduling.gpu_capacity import GpuCapacity, gpu_capacity
from tests.operator.support import node
from tests.operator.test_inventories import Cache, Inventories

NODES = {"a0": "ra", "a1": "ra", "b0": "rb", "b1": "rb"}
FOUR_GPUS = '{"containers": [{"resources": {"requests": {"nvidia.com/gpu": "4"}}}]}'


def cluster(**changed: dict[str, Any]) -> Inventories:
    cache = Cache()
    for name, rack in NODES.items():
        obj = copy.deepcopy(node(name, rack, gpus=8))
        obj["metadata"] |= {"uid": name, "resourceVersion": "1"}
        obj["spec"] = changed.get(name, {})
        cache.put_node(obj)
    return Inventories(cache)


def test_gpus_are_free_allocated_or_unusable_and_each_counts_once() -> None:
    inventory = cluster(b1={"unschedulable": True}).of_all_nodes(GPU_RESOURCE)
    count = gpu_capacity(inventory, {"a0": 4, "b0": 8, "b1": 2})
    assert (count.free, count.allocated, count.unusable) == (12, 14, 6)
    assert count.largest_free == {"node": 8, "domain": 8, "rack": 12, "cluster": 12}
    assert count.in_partly_used == {"node": 4, "domain": 4, "rack": 12, "cluster": 12}


def test_an_empty_cluster_is_not_fragmented() -> None:
    count = gpu_capacity(cluster().of_all_nodes(GPU_RESOURCE), {})
    assert (count.free, count.largest_free["rack"], count.in_partly_used["rack"]) == (32, 16, 0)


def test_a_taint_makes_no_gpu_unusable_because_jobs_may_tolerate_it() -> None:
    tainted = cluster(a0={"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]})
    assert gpu_capacity(tainted.of_all_nodes(GPU_RESOURCE), {}).free == 32


def test_pods_count_before_the_placer_has_counted_them() -> None:
    capacity = CountedCapacity(None, lambda: [GPU_RESOURCE], lambda: None)  # type: ignore[arg-type]
    capacity.pod_changed("ns/p", PodRequest("p", "ns", "a0", FOUR_GPUS, "job", "uid"))
    assert capacity.gpus_by_node(GPU_RESOURCE) == {"a0": 4}
    capacity.view.apply({"ns/p": PodRequest("p", "ns", "a0", FOUR_GPUS, "job", "uid")})
    capacity.pod_changed("ns/q", PodRequest("q", "ns", "a1", "null", "job", "uid"))
    assert capacity.gpus_by_node(GPU_RESOURCE) == {"a0": 4}, "a malformed pod counts for nothing"
    capacity.pod_changed("ns/p", None)
    assert capacity.gpus_by_node(GPU_RESOURCE) == {}


def test_scrapes_export_the_count_and_count_at_most_every_few_seconds() -> None:
    counts, now = [8, 5], [0.0]
    metrics = ClusterMetrics(lambda: {GPU_RESOURCE: _half_used(counts.pop(0))}, lambda: now[0])
    registry = CollectorRegistry()
    registry.register(metrics)
    assert counts == [8, 5], "registering does not count"
    page = generate_latest(registry).decode()
    assert 'ptj_gpus{resource="nvidia.com/gpu",state="free"} 8.0' in page
    assert 'ptj_gpus_largest_free{level="rack",resource="nvidia.com/gpu"} 4.0' in page
    assert 'ptj_gpu_fragmentation_ratio{level="rack",resource="nvidia.com/gpu"} 0.5' in page
    assert 'ptj_gpu_fragmentation_ratio{level="cluster"' not in page
    assert generate_latest(registry).decode() == page
    now[0] = COUNT_SECONDS
    assert 'ptj_gpus{resource="nvidia.com/gpu",state="free"} 5.0' in generate_latest(registry).decode()


def _half_used(free: int) -> GpuCapacity:
    return GpuCapacity(free, 8, 0, {"rack": 4, "cluster": free}, {"rack": free // 2, "cluster": free})
