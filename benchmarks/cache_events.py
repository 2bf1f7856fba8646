"""What an event costs the operator's cache in a large cluster, beside a store without indexes.

    python benchmarks/cache_events.py [--quick] [--json FILE]

12,500 nodes with 8 pods each; with --quick, a tenth of that. The baseline has the same pods in a dict by name, as an
informer without indexers has them, and finds the same answers by reading all of them. Both take turns in the same run.
Medians in milliseconds of CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from _report import table, write_json

from meshwright.api import labels
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.pod_index import request_of
from meshwright_operator.kube.pod_info import Pod, read_pod
from meshwright_operator.kube.pod_requests import PodRequest
from meshwright_operator.kube.watches import EventHandlers
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.operator_metrics import OperatorMetrics

PODS_PER_NODE = 8
WORKERS = 1000
REPEATS = 50
BASELINE_EVERY = 5
"""Repeats after which the baseline has its turn, which takes long."""

Act = Callable[[int], Awaitable[object]]


def node(number: int, version: int, ready: bool = True) -> dict[str, Any]:
    """A node."""
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    metadata = {"name": f"n{number}", "uid": f"node-{number}", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {}, "status": {"allocatable": {"cpu": "96"}, "conditions": conditions}}


def pod(number: int, version: int, label: str = "") -> dict[str, Any]:
    """A worker pod; with another `label`, a pod that is not a worker."""
    job, worker = f"job{number // WORKERS}", number % WORKERS
    metadata = {
        "name": f"{job}-w{worker}-0",
        "namespace": "default",
        "uid": f"pod-{number}",
        "resourceVersion": str(version),
        "labels": {labels.LABEL_JOB: label or job},
        "ownerReferences": [{"uid": job, "kind": labels.KIND, "name": job, "controller": True}],
    }
    containers = [{"name": "worker", "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}]
    spec = {"nodeName": f"n{number // PODS_PER_NODE}", "containers": containers}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Running"}}


def filled(nodes: int) -> Cache:
    """A cache with all nodes and pods."""
    cache = Cache()
    for number in range(nodes):
        cache.put_node(node(number, number + 1))
    for number in range(nodes * PODS_PER_NODE):
        read = read_pod(pod(number, number + 1))
        assert read is not None
        cache.put_pod(read)
    return cache


def jobs_on(pods: Iterable[Pod], name: str) -> set[JobKey]:
    """The jobs with pods on a node, of which all must be told that the node changed."""
    return {JobKey(pod.namespace, pod.job) for pod in pods if pod.node == name}


def with_uid(pods: Iterable[Pod], uid: str) -> Pod | None:
    """The worker pod with this uid, because an event of a pod that lost its labels does not name its job."""
    return next((pod for pod in pods if pod.uid == uid), None)


def requests_of(pods: Iterable[Pod]) -> dict[str, PodRequest]:
    """What all pods request."""
    return {f"{pod.namespace}/{pod.name}": found for pod in pods if (found := request_of(pod)) is not None}


async def medians_ms(cached: Act, baseline: Callable[[int], object]) -> dict[str, float]:
    """Milliseconds of CPU of one call with the cache and one of the baseline, which take turns, as medians."""
    taken: dict[str, list[float]] = {"cache": [], "baseline": []}
    for number in range(REPEATS):
        started = time.thread_time()
        await cached(number)
        taken["cache"].append(1000 * (time.thread_time() - started))
        if number % BASELINE_EVERY == 0:
            started = time.thread_time()
            baseline(number)
            taken["baseline"].append(1000 * (time.thread_time() - started))
    return {name: statistics.median(values) for name, values in taken.items()}


async def measure(nodes: int) -> dict[str, dict[str, float]]:
    """All numbers, by kind of event."""
    cache, queue = filled(nodes), WorkQueue[JobKey]()
    scanned = {f"{pod.namespace}/{pod.name}": pod for pod in cache.all_pods()}
    assert jobs_on(scanned.values(), "n7") == set(cache.jobs_on("n7")), "the baseline finds the same"
    assert requests_of(scanned.values()) == cache.pod_requests()
    handlers = EventHandlers(cache, queue, OperatorMetrics())
    version = 10 * nodes * PODS_PER_NODE

    async def node_event(number: int) -> None:
        handlers.node({"type": "MODIFIED", "object": node(number, version + number, ready=False)})

    async def unlabeled_event(number: int) -> None:
        handlers.pod({"type": "MODIFIED", "object": pod(number, version + number, "another")})

    async def requests(_: int) -> None:
        cache.pod_requests()

    numbers = {
        "node_event": await medians_ms(node_event, lambda number: jobs_on(scanned.values(), f"n{number}")),
        "pod_requests": await medians_ms(requests, lambda _: requests_of(scanned.values())),
        # An event of any pod is as likely: on average half of them are read before it is found.
        "unlabeled_pod_event": await medians_ms(
            unlabeled_event,
            lambda number: with_uid(scanned.values(), f"pod-{number * nodes * PODS_PER_NODE // REPEATS}"),
        ),
    }
    queue.close()
    return {name: {**both, "ratio": both["cache"] / both["baseline"]} for name, both in numbers.items()}


def main() -> None:
    """Measure, print, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="1,250 nodes instead of 12,500")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    nodes = 1250 if args.quick else 12500
    numbers = asyncio.run(measure(nodes))
    rows = [[name.replace("_", " "), *both.values()] for name, both in numbers.items()]
    table(f"{nodes:,} nodes, {nodes * PODS_PER_NODE:,} pods", ["what", "cache ms", "scan of all ms", "ratio"], rows)
    write_json(args.json, {"nodes": nodes, **numbers})


if __name__ == "__main__":
    main()
