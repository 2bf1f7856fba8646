"""GPUs of the cluster by state, and what still fits: counted from nodes and pods as they are before a scrape."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from meshwright.api.labels import GPU_RESOURCE
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.pod_requests import PodRequest
from meshwright_operator.metrics.cluster_metrics import COUNT_SECONDS, ClusterMetrics
from meshwright_operator.metrics.job_metrics import JobMetrics
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling.counted_capacity import CountedCapacity, gpus_by_node
from meshwright_operator.scheduling.gpu_capacity import GpuCapacity, gpu_capacity
from meshwright_operator.scheduling.scheduler import JobScheduler
from tests.operator import loop_watchdog
from tests.operator.builders import NOW, observed
from tests.operator.memory import MemoryCluster
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
    assert gpus_by_node(capacity.requests().values(), GPU_RESOURCE) == {"a0": 4}
    capacity.view.apply({"ns/p": PodRequest("p", "ns", "a0", FOUR_GPUS, "job", "uid")})
    capacity.pod_changed("ns/q", PodRequest("q", "ns", "a1", "null", "job", "uid"))
    assert gpus_by_node(capacity.requests().values(), GPU_RESOURCE) == {"a0": 4}, "a malformed pod counts for nothing"
    capacity.pod_changed("ns/p", None)
    assert gpus_by_node(capacity.requests().values(), GPU_RESOURCE) == {}


async def test_scrapes_export_the_count_and_count_at_most_every_few_seconds() -> None:
    counts, now = [8, 5], [0.0]

    async def count() -> dict[str, GpuCapacity]:
        return {GPU_RESOURCE: _half_used(counts.pop(0))}

    metrics = ClusterMetrics(count, lambda: now[0])
    registry = CollectorRegistry()
    registry.register(metrics)
    assert counts == [8, 5], "registering does not count"
    await metrics.refresh()
    page = generate_latest(registry).decode()
    assert 'ptj_gpus{resource="nvidia.com/gpu",state="free"} 8.0' in page
    assert 'ptj_gpus_largest_free{level="rack",resource="nvidia.com/gpu"} 4.0' in page
    assert 'ptj_gpu_fragmentation_ratio{level="rack",resource="nvidia.com/gpu"} 0.5' in page
    assert 'ptj_gpu_fragmentation_ratio{level="cluster"' not in page
    await metrics.refresh()
    assert generate_latest(registry).decode() == page
    now[0] = COUNT_SECONDS
    await metrics.refresh()
    assert 'ptj_gpus{resource="nvidia.com/gpu",state="free"} 5.0' in generate_latest(registry).decode()


def _half_used(free: int) -> GpuCapacity:
    return GpuCapacity(free, 8, 0, {"rack": 4, "cluster": free}, {"rack": free // 2, "cluster": free})


async def test_a_scrape_of_a_large_cluster_with_many_jobs_blocks_nothing() -> None:
    """The fixture `nothing_blocks_the_event_loop` judges each callback while `active` is set."""
    cache, active = Cache(), threading.Event()
    for number in range(3000):
        obj = node(f"n{number}", f"r{number // 16}", gpus=8)
        obj["metadata"] |= {"uid": f"n{number}", "resourceVersion": "1"}
        cache.put_node(obj)
    inventories, operator, jobs = Inventories(cache), OperatorMetrics(), JobMetrics()
    cluster = MemoryCluster(lambda: NOW)
    scheduler = JobScheduler(cluster, cache, operator, (), lambda key: None, inventories)
    for number in range(6000):
        request = PodRequest(f"p{number}", "ns", f"n{number // 2}", FOUR_GPUS, "job", "uid")
        scheduler._placer.pod_changed(f"ns/p{number}", request)
    status = decide(observed()).status
    for number in range(800):
        record = jobs.record(JobKey("ns", f"job-{number}"), f"uid-{number}")
        record.put(status, None, 1.0, None, {"Training": 5.0}, {"Training": 5.0})
    gpus = ClusterMetrics(scheduler.gpu_capacities)
    operator.before_scrape.append(gpus.refresh)
    for collector in (gpus, jobs):
        operator.registry.register(collector)
    loop_watchdog.watch_this_thread(active)
    active.set()
    try:
        page = await operator.scrape()
    finally:
        active.clear()
        await asyncio.sleep(0)  # the callback that is judged ends here, without what the test does next
    assert b'ptj_gpus{resource="nvidia.com/gpu",state="allocated"} 24000.0' in page
    assert page.count(b"\nptj_job_step{") == 800
    assert names(page) == names(operator.exposition())


def names(page: bytes) -> list[bytes]:
    """The series of a page, without their values."""
    return [line.rpartition(b" ")[0] for line in page.splitlines()]
