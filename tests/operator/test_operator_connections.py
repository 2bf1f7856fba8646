"""The operator behind a proxy: half-open watches are noticed, readiness tells, and an idle operator writes nothing."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from meshwright_operator.settings import Address
from tests.operator.agents import Kubelet
from tests.operator.conftest import Settled, StartOperator
from tests.operator.proxy import Proxy
from tests.operator.support import JOBS, Api, condition, job, node, put_node, until, write_kubeconfig

# In full: 200 finished jobs, 20 running ones, a minute.
FINISHED, RUNNING, SECONDS = map(int, os.environ.get("MESHWRIGHT_TEST_IDLE", "10,3,12").split(","))
PROGRESS_SECONDS = 10


@pytest_asyncio.fixture
async def proxy(api: Api, session: aiohttp.ClientSession) -> AsyncIterator[Proxy]:
    async with Proxy(api.url, session).serving() as proxy:
        yield proxy


@pytest.fixture
def behind(proxy: Proxy, operators_token: str, tmp_path: Path) -> dict[str, Path]:
    """Settings of an operator that reaches the API server through the proxy alone."""
    return {"kubeconfig": write_kubeconfig(tmp_path / "behind", proxy.url, operators_token)}


async def test_a_half_open_watch_is_noticed_and_connected_again(
    api: Api, kubelet: Kubelet, proxy: Proxy, behind: dict[str, Path], start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator(**behind, watch_idle_seconds=2.0, resync_seconds=3600.0)
    await api.create(JOBS, job("before"))
    await settled("before")
    await asyncio.sleep(3.5)  # the one early resync is over: from now on only watches tell
    proxy.break_watches()
    await api.delete(f"{JOBS}/before")
    await api.create(JOBS, job("after"))  # which nothing but a watch tells of

    async def noticed() -> bool:
        return bool((await api.status("after")).get("conditions"))

    await until(noticed, "the watch was connected again", 20)


async def test_readiness_fails_while_watches_are_silent(
    api: Api,
    proxy: Proxy,
    behind: dict[str, Path],
    start_operator: StartOperator,
    session: aiohttp.ClientSession,
    metrics_port: int,
) -> None:
    await start_operator(**behind, watch_idle_seconds=1.0, metrics_listen=Address("127.0.0.1", metrics_port))

    async def readiness() -> tuple[int, str]:
        async with session.get(f"http://127.0.0.1:{metrics_port}/readyz") as response:
            return response.status, await response.text()

    async def ready() -> bool:
        return (await readiness())[0] == 200

    async def not_ready() -> bool:
        code, why = await readiness()
        return code == 503 and all(f"/{resource}" in why for resource in ("nodes", "pods", "paralleltrainingjobs"))

    await until(ready, "ready")
    await asyncio.sleep(3)
    await until(ready, "a quiet watch, which is connected again and again, is no stale one")
    proxy.freeze()
    await until(not_ready, "not ready any more, and it says why")
    proxy.thaw()
    await until(ready, "ready again")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(120 + 3 * FINISHED + 2 * SECONDS)
async def test_an_idle_operator_writes_the_lease_and_the_progress_of_what_runs_and_nothing_else(
    api: Api, kubelet: Kubelet, proxy: Proxy, behind: dict[str, Path], start_operator: StartOperator, settled: Settled
) -> None:
    await put_node(api, node("large", "r2", 1024))
    await start_operator(**behind)
    single = {"replicas": 1, "parallelism": {"tensor": 2, "pipeline": 1, "microBatches": 1}}
    names = [f"done{number}" for number in range(FINISHED)]
    for first in range(0, FINISHED, 20):
        block = names[first : first + 20]
        for name in block:
            await api.create(JOBS, job(name, **single))
        for name in block:
            await settled(name)
            for agent in kubelet.of(name):
                await agent.finish()

    async def all_done() -> bool:
        done = [condition(item.get("status") or {}, "Complete").get("status") for item in await api.items(JOBS)]
        return done == ["True"] * FINISHED

    await until(all_done, "they are done", 60)
    running = [f"runs{number}" for number in range(RUNNING)]
    for name in running:
        await api.create(
            JOBS, job(name, **single, training={"steps": 10**6, "globalBatchSize": 8, "sequenceLength": 64})
        )
    for name in running:
        await settled(name)

    async def all_told() -> bool:
        events = await api.items("/api/v1/namespaces/default/events")
        told = {e["involvedObject"]["name"] for e in events if e["reason"] == "Started"}
        return told >= set(running)

    await until(all_told, "the events of the start are posted, one after the other", 30 + FINISHED)
    await asyncio.sleep(5)  # the resync of the last change is over
    proxy.requests.clear()
    await asyncio.sleep(SECONDS)
    writes = Counter((r.method, r.path) for r in proxy.requests if r.writes)
    progress = {f"{JOBS}/{name}/status" for name in running}
    odd = {what: n for what, n in writes.items() if "/leases/" not in what[1] and what[1] not in progress}
    assert odd == {}
    by_job = {path: n for (_, path), n in writes.items() if path in progress}
    assert set(by_job) == progress, "running jobs tell their progress"
    assert max(by_job.values()) <= SECONDS // PROGRESS_SECONDS + 1
