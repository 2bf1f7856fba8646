"""Jobs through an API server that drops, refuses, delays and forgets: once it is well again, the cluster settles in the
state that the specs ask for, and from then on nothing is written but the Lease and progress.

One history always; `make chaos` draws others. With `--cluster assets` the server is a real kube-apiserver.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from tests.operator.agents import Kubelet
from tests.operator.conftest import StartOperator
from tests.operator.faulty_api import FaultyProxy
from tests.operator.support import JOBS, PODS, Api, OperatorThread, condition, job, until, write_kubeconfig
from tests.randomness import seeds

NAMES = ("one", "two")
ACTIONS = 8
QUIET_SECONDS = 8.0
SETTLES_WITHIN = 240.0
SETTINGS: dict[str, Any] = {"watch_idle_seconds": 3.0, "resync_seconds": 5.0, "lease_seconds": 6.0}


@pytest.fixture(params=seeds(1))
def seed(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest_asyncio.fixture
async def proxy(api: Api, session: aiohttp.ClientSession, seed: int) -> AsyncIterator[FaultyProxy]:
    async with FaultyProxy(api.url, session, seed).serving() as proxy:
        assert isinstance(proxy, FaultyProxy)
        yield proxy


class Supervisor:
    """Starts the operator again whenever it exits, as a Deployment does."""

    def __init__(self, start: Callable[[], Awaitable[OperatorThread]]) -> None:
        self._start = start
        self._operator: OperatorThread | None = None
        self.starts = 0

    async def run(self) -> None:
        while True:
            if self._operator is None or not self._operator.alive:
                self._operator = await self._start()
                self.starts += 1
            await asyncio.sleep(0.2)

    async def stop_operator(self) -> None:
        """It gets SIGTERM, and is started again."""
        if self._operator is not None:
            await self._operator.stop()


class History:
    """What a user, the nodes and the operator's Deployment do, as a seed says."""

    def __init__(self, api: Api, kubelet: Kubelet, supervisor: Supervisor, seed: int) -> None:
        self._api = api
        self._kubelet = kubelet
        self._supervisor = supervisor
        self._random = random.Random(seed)

    async def run(self) -> None:
        for name in NAMES:
            await self._api.create(JOBS, small(name))
        for _ in range(ACTIONS):
            await asyncio.sleep(self._random.uniform(0.0, 3.0))
            action = self._random.choice(
                (self._lose_a_pod, self._crash_a_pod, self._change_image, self._suspend, self._create_again, self._stop)
            )
            await action(self._random.choice(NAMES))

    async def _lose_a_pod(self, name: str) -> None:
        if pods := await self._api.pods(name):
            await self._api.delete(f"{PODS}/{self._random.choice(pods)['metadata']['name']}")

    async def _crash_a_pod(self, name: str) -> None:
        if agents := self._kubelet.of(name):
            await self._kubelet.crash(self._random.choice(agents).pod)

    async def _change_image(self, name: str) -> None:
        workers = {"image": f"meshwright/worker:{self._random.randint(0, 9)}"}
        await self._api.patch(f"{JOBS}/{name}", {"spec": {"workers": workers}})

    async def _suspend(self, name: str) -> None:
        await self._api.patch(f"{JOBS}/{name}", {"spec": {"suspend": self._random.random() < 0.5}})

    async def _create_again(self, name: str) -> None:
        """Delete followed by apply, with what the garbage collector does between."""
        await self._api.delete(f"{JOBS}/{name}")
        for pod in await self._api.pods(name):
            await self._api.delete(f"{PODS}/{pod['metadata']['name']}")
        await self._api.create(JOBS, small(name))

    async def _stop(self, _: str) -> None:
        await self._supervisor.stop_operator()


def small(name: str) -> KubeObject:
    """A job of two pods that trains for ever, and may fail as often as it likes."""
    return job(
        name,
        replicas=1,
        training={"steps": 10**6, "globalBatchSize": 8, "sequenceLength": 64},
        recovery={"maxRestarts": 100000},
    )


async def collect_orphans(api: Api) -> None:
    """What the garbage collector does: an operator that is cut off may create pods of a job that was just deleted."""
    owners = {obj["metadata"]["uid"] for obj in await api.items(JOBS)}
    for name in NAMES:
        for pod in await api.pods(name):
            metadata = pod["metadata"]
            if metadata["ownerReferences"][0]["uid"] not in owners and not metadata.get("deletionTimestamp"):
                await api.delete(f"{PODS}/{metadata['name']}")


async def wrong(api: Api) -> str:
    """How the cluster differs from what the specs ask for; empty if it does not."""
    for name in NAMES:
        obj = await api.job(name)
        status = obj.get("status") or {}
        # The operator keeps the newest pod of a worker that ended, for its logs.
        pods = [
            pod for pod in await api.pods(name) if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
        ]
        if status.get("observedGeneration") != obj["metadata"]["generation"]:
            return f"{name}: the spec has not been looked at"
        if obj["spec"].get("suspend"):
            if condition(status, "Suspended").get("status") != "True" or pods:
                return f"{name}: not suspended, with {len(pods)} pods: {condition(status, 'Ready')}"
            continue
        if condition(status, "Ready").get("reason") != "Running" or condition(status, "Ready").get("status") != "True":
            found = [(pod["metadata"]["name"], pod["metadata"]["ownerReferences"][0]["uid"]) for pod in pods]
            return f"{name} {obj['metadata']['uid']}: {condition(status, 'Ready')}; pods {found}"
        workers = sorted(pod["metadata"]["labels"][labels.LABEL_WORKER] for pod in pods)
        images = {pod["spec"]["containers"][0]["image"] for pod in pods}
        owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods}
        if (workers, images, owners) != (["0", "1"], {obj["spec"]["workers"]["image"]}, {obj["metadata"]["uid"]}):
            return f"{name}: workers {workers}, images {images}"
    return ""


@pytest.mark.chaos
@pytest.mark.slow
async def test_jobs_settle_whatever_the_api_server_does(
    api: Api, kubelet: Kubelet, proxy: FaultyProxy, start_operator: StartOperator, operators_token: str,
    tmp_path: Path, seed: int,
) -> None:  # fmt: skip
    behind = write_kubeconfig(tmp_path / "behind", proxy.url, operators_token)
    starts = 0

    async def start() -> OperatorThread:
        nonlocal starts
        starts += 1
        # An identity of its own: a new process must wait until the lease of one that was cut off has expired.
        return await start_operator(wait=False, kubeconfig=behind, identity=f"operator-{starts}", **SETTINGS)

    supervisor = Supervisor(start)
    supervising = asyncio.create_task(supervisor.run())
    try:
        proxy.harm()
        await History(api, kubelet, supervisor, seed).run()
        proxy.heal()

        async def settled() -> bool:
            await collect_orphans(api)
            return not await wrong(api)

        try:
            await until(settled, "the cluster is as the specs ask", SETTLES_WITHIN)
        except AssertionError:
            raise AssertionError(f"{await wrong(api)}; faults {dict(proxy.faults)}, {starts} starts") from None
        await check_quiet(api, proxy)
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
    started = Counter(
        (agent.env[labels.ENV_JOB_UID], agent.worker, document.generation)
        for agent in kubelet.all_agents
        for document in agent.documents
    )
    assert max(started.values(), default=1) == 1, "ranks of one generation were started twice"


async def check_quiet(api: Api, proxy: FaultyProxy) -> None:
    """Once a window passes in which nobody writes but the Lease and a running job's progress, it is quiet."""
    progress = {f"{JOBS}/{name}/status" for name in NAMES}

    async def quiet() -> bool:
        proxy.requests.clear()
        await asyncio.sleep(QUIET_SECONDS)
        writes = Counter((r.method, r.path) for r in proxy.requests if r.writes and "/leases/" not in r.path)
        return all(path in progress and count <= 1 for (_, path), count in writes.items())

    await until(quiet, "nothing is written any more", SETTLES_WITHIN)
    assert not await wrong(api)
