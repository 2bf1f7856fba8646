"""What a large gang costs the event loop: its pods are created a few at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshwright.api.objects import KubeObject
from meshwright.api.status import WorkerPlacement
from meshwright_operator.controller import pod_control
from meshwright_operator.controller.pod_control import PodControl
from meshwright_operator.kube.cache import Cache
from meshwright_operator.manifests.owned_objects import token_secret
from meshwright_operator.manifests.worker_pod import PodContext, worker_pod
from meshwright_operator.metrics.operator_metrics import OperatorMetrics
from tests.operator.builders import NOW, spec
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
    creating = asyncio.create_task(control.create(context, secret, entries))
    for _ in range(20):
        await asyncio.sleep(0)
    assert 32 <= len(built) < 100, "as many as the client sends at a time, and not a thousand in one go"
    cluster.answering.set()
    await creating
    assert len(list(cluster.of("pods"))) == len(built) == WORKERS
