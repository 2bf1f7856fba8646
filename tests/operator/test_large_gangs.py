"""What a large gang costs the event loop: its pods are created a few at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from meshwright.api.objects import KubeObject
from meshwright.api.status import WorkerPlacement
from meshwright.layout import Layout
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.placement import Placement
from meshwright.planner.placement.objective import CrossingCosts
from meshwright.planner.plan import make_plan
from meshwright.planner.topology.location import Location
from meshwright_operator.controller import pod_control
from meshwright_operator.controller.pod_control import PodControl
from meshwright_operator.decide.mesh_generation import document
from meshwright_operator.decide.observed import observe_workers
from meshwright_operator.kube.cache import Cache
from meshwright_operator.manifests.owned_objects import token_secret
from meshwright_operator.manifests.worker_pod import PodContext, worker_pod
from meshwright_operator.operator_metrics import OperatorMetrics
from tests.operator.builders import NOW, agents, observed, pod, running_status, spec
from tests.operator.memory import MemoryCluster

WORKERS = 500


class SlowCluster(MemoryCluster):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda: NOW)
        self.answering = asyncio.Event()

    async def create(self, path: str, body: KubeObject) -> KubeObject:
        if path.endswith("/pods"):
            await self.answering.wait()
        return await super().create(path, body)


async def test_the_manifests_of_a_large_gang_are_not_built_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def counting(context: PodContext, placed: WorkerPlacement) -> KubeObject:
        built.append(placed.worker)
        return worker_pod(context, placed)

    monkeypatch.setattr(pod_control, "worker_pod", counting)
    cluster = SlowCluster()
    control = PodControl(cluster, Cache(), OperatorMetrics())
    secret: dict[str, Any] = token_secret("train", "team", "u1", {"token": "t"})
    context = PodContext("train", "team", "u1", spec(), "0123456789", "http://coordinator:9470", "its-secret")
    entries = [
        WorkerPlacement(worker=n, incarnation=0, pod=f"train-w{n}-0", node=f"n{n}", ranks=f"{2 * n}-{2 * n + 1}")
        for n in range(WORKERS)
    ]

    async def create() -> None:
        async with control.shared_objects(context, secret) as shared:
            await control.create(context, shared, entries)

    creating = asyncio.create_task(create())
    for _ in range(20):
        await asyncio.sleep(0)
    assert 32 <= len(built) < 100, "as many as the client sends at a time, and not a thousand in one go"
    cluster.answering.set()
    await creating
    assert len(list(cluster.of("pods"))) == len(built) == WORKERS


@pytest.mark.parametrize("workers", [4, 64])
def test_the_status_and_the_mesh_document_list_the_ranks_of_the_workers_a_fixed_number_of_times(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing them for each worker took 40% of the start of a thousand pods."""
    training = {"steps": 100, "globalBatchSize": 4 * workers, "sequenceLength": 64}
    plan = make_plan(spec(replicas=workers // 2, training=training), Inventory())
    named = {worker: f"n{worker}" for worker in range(workers)}
    placed = Placement(plan, named, dict.fromkeys(named, Location((), ())), CrossingCosts(0.0, 0, 0, {}))
    status, pods = running_status(), [pod(worker, node=name, bound=True) for worker, name in named.items()]
    up = dict.fromkeys(named.values(), False)
    members, _ = observe_workers(range(workers), status, pods, up, {}, agents=agents(), now=NOW)
    seen = replace(observed(), plan=plan, workers=members)
    counted = Counter[str]()
    list_workers = Layout.workers

    def counting(layout: Layout, gpus_per_worker: int) -> list[range]:
        counted["lists"] += 1
        return list_workers(layout, gpus_per_worker)

    monkeypatch.setattr(Layout, "workers", counting)
    assert len(placed.to_status("train", {}).workers) == workers
    assert document(seen, seen.mesh) is not None
    assert counted["lists"] <= 4
