"""The operator dies right before or right after any of its writes; the next one converges without a duplicate rank."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from meshwright_operator.kube.client import KubeClient
from tests.operator.agents import Kubelet
from tests.operator.conftest import StartOperator
from tests.operator.support import JOBS, PODS, Api, condition, job, until
from tests.tiers import mostly_long

# A start takes about twenty writes (status, service, secret, four pods, four gates ...), a recovery about ten more.
# Every point takes seconds: some are tried always, all of them in the long tier.
OFTEN = {(6, "after"), (22, "after")}
POINTS = mostly_long(product(range(1, 31), ("before", "after")), OFTEN.__contains__)


class Died(BaseException):
    """The process is gone: nothing after this is done."""


class Saboteur:
    """Kills the first operator at its n-th write. Leases and events decide nothing and are not counted."""

    def __init__(self, number: int, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = number
        self.dead: KubeClient | None = None
        original = KubeClient._call

        async def call(cluster: KubeClient, verb: str, path: str, *rest: Any) -> Any:
            if cluster is self.dead:
                raise Died
            if self.dead is None and verb != "GET" and "/leases" not in path and "/events" not in path:
                self.left -= 1
                if self.left == 0:
                    self.dead = cluster
                    if when == "after":
                        await original(cluster, verb, path, *rest)
                    raise Died
            return await original(cluster, verb, path, *rest)

        monkeypatch.setattr(KubeClient, "_call", call)


@pytest.mark.parametrize(("number", "when"), POINTS)
async def test_a_death_at_any_write_is_survived(
    api: Api,
    kubelet: Kubelet,
    start_operator: StartOperator,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    when: str,
) -> None:
    saboteur = Saboteur(number, when, monkeypatch)
    operators = [await start_operator()]
    await api.create(JOBS, job("tough"))

    async def running(generation: int) -> dict[str, Any] | None:
        if saboteur.dead is not None and len(operators) == 1:
            await operators[0].stop()
            operators.append(await start_operator())
        status = await api.status("tough")
        ready = condition(status, "Ready").get("reason") == "Running"
        return status if ready and status["mesh"]["generation"] >= generation else None

    status = await until(lambda: running(1), "it runs", 25)
    assert status["mesh"]["generation"] == 1
    lost = next(entry["pod"] for entry in status["placement"]["workers"] if entry["worker"] == 2)
    await api.delete(f"{PODS}/{lost}")
    status = await until(lambda: running(2), "it recovers", 60)
    assert (status["mesh"]["generation"], status["mesh"]["cause"]) == (2, "PodLost")
    assert status["restarts"] == [{"cause": "PodLost", "count": 1}]
    assert Counter(agent.worker for agent in kubelet.of("tough")) == {0: 1, 1: 1, 2: 1, 3: 1}
    started = Counter((d.generation, agent.worker) for agent in kubelet.all_agents for d in agent.documents)
    assert started == {(generation, worker): 1 for generation in (1, 2) for worker in range(4)}
