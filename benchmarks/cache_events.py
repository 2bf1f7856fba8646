"""What an event costs the operator's cache in a large cluster.

    python benchmarks/cache_events.py [--quick] [--json FILE]

12,500 nodes with 8 pods each; with --quick, a tenth of that. Medians in milliseconds of CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from _report import table, write_json

from meshwright.api import labels
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.pod_info import read_pod
from meshwright_operator.kube.watches import EventHandlers
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.metrics.operator_metrics import OperatorMetrics

PODS_PER_NODE = 8
WORKERS = 1000
REPEATS = 50


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


async def median_ms(act: Callable[[int], Awaitable[object]]) -> float:
    """Milliseconds of CPU of one call, as the median."""
    taken = []
    for number in range(REPEATS):
        started = time.thread_time()
        await act(number)
        taken.append(1000 * (time.thread_time() - started))
    return statistics.median(taken)


async def measure(nodes: int) -> dict[str, float]:
    """All numbers."""
    cache, queue = filled(nodes), WorkQueue[JobKey]()
    handlers = EventHandlers(cache, queue, OperatorMetrics())
    version = 10 * nodes * PODS_PER_NODE

    async def node_event(number: int) -> None:
        await handlers.node({"type": "MODIFIED", "object": node(number, version + number, ready=False)})

    async def unlabeled_event(number: int) -> None:
        handlers.pod({"type": "MODIFIED", "object": pod(number, version + number, "another")})

    async def requests(_: int) -> None:
        cache.pod_requests()

    numbers = {
        "node_event_ms": await median_ms(node_event),
        "unlabeled_pod_event_ms": await median_ms(unlabeled_event),
        "pod_requests_ms": await median_ms(requests),
    }
    queue.close()
    return numbers


def main() -> None:
    """Measure, print, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="1,250 nodes instead of 12,500")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    nodes = 1250 if args.quick else 12500
    numbers = asyncio.run(measure(nodes))
    rows = [[name.removesuffix("_ms").replace("_", " "), value] for name, value in numbers.items()]
    table(f"{nodes:,} nodes, {nodes * PODS_PER_NODE:,} pods", ["what", "ms"], rows)
    write_json(args.json, {"nodes": nodes, **numbers})


if __name__ == "__main__":
    main()
