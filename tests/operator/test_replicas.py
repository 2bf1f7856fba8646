"""Several replicas: one leads, the others are ready, and a planned hand-over cuts no poll."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from meshwright.api.objects import KubeObject
from meshwright_operator.controller.http_server import serve_application
from meshwright_operator.coordinator.leadership_gate import LeadershipGate
from meshwright_operator.http.server import verify
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import ApiError, KubeClient, Page
from meshwright_operator.kube.fence import Fence
from meshwright_operator.kube.leader_election import LeaderElector
from meshwright_operator.kube.resync import STUCK_SECONDS, Resync
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.settings import Address
from tests.operator.agents import Kubelet
from tests.operator.balancer import service
from tests.operator.conftest import Settled, StartOperator
from tests.operator.proxy import Proxy
from tests.operator.support import JOBS, PODS, Api, OperatorThread, job, until, write_kubeconfig
from tests.operator.test_credentials import Cluster
from tests.reserved_ports import reserved_ports

LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/meshwright-operator"


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Ports of two coordinators."""
    with reserved_ports(2) as found:
        yield found


@pytest.fixture
def pages() -> Iterator[list[int]]:
    """Ports of the metrics of two operators."""
    with reserved_ports(2) as found:
        yield found


class SlowLists(Proxy):
    """Lists of nodes arrive when they are let through."""

    def __init__(self, target: str, session: aiohttp.ClientSession) -> None:
        super().__init__(target, session)
        self.lists = asyncio.Event()
        self.waiting = 0
        """Number of lists that have come, until one is let through."""

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/api/v1/nodes" and "watch" not in request.query:
            self.waiting += not self.lists.is_set()
            await self.lists.wait()
        return await super()._forward(request)


async def page(session: aiohttp.ClientSession, port: int, path: str) -> tuple[int, str]:
    """A page of a replica's health server; 0 while it does not serve."""
    try:
        async with session.get(f"http://127.0.0.1:{port}/{path}") as response:
            return response.status, await response.text()
    except aiohttp.ClientError:
        return 0, ""


async def test_a_replica_is_alive_but_not_ready_during_a_slow_first_listing_and_leads_after_it(
    api: Api,
    session: aiohttp.ClientSession,
    operators_token: str,
    tmp_path: Path,
    start_operator: StartOperator,
    metrics_port: int,
) -> None:
    async with SlowLists(api.url, session).serving() as proxy:
        assert isinstance(proxy, SlowLists)
        kubeconfig = write_kubeconfig(tmp_path / "slow", proxy.url, operators_token)
        await start_operator(False, kubeconfig=kubeconfig, metrics_listen=Address("127.0.0.1", metrics_port))

        async def lists() -> bool:
            return proxy.waiting > 0

        async def ready() -> bool:
            return (await page(session, metrics_port, "readyz"))[0] == 200

        async def leads() -> bool:
            return "ptj_leader 1.0" in (await page(session, metrics_port, "metrics"))[1]

        await until(lists, "it lists", 60)
        assert (await page(session, metrics_port, "healthz"))[0] == 200, "a slow API server is no reason to restart"
        assert (await page(session, metrics_port, "readyz"))[0] == 503
        assert await holder(api) == "", "its cache is empty"
        proxy.lists.set()
        await until(leads, "it leads", 60)
        await until(ready, "it is ready", 60)
        assert proxy.waiting == 1, "nobody else led, so nothing had to be listed again"


async def test_a_replica_that_has_not_listed_leaves_the_lease_to_one_that_has(
    api: Api,
    session: aiohttp.ClientSession,
    operators_token: str,
    tmp_path: Path,
    start_operator: StartOperator,
    ports: list[int],
) -> None:
    async with SlowLists(api.url, session).serving() as proxy:
        assert isinstance(proxy, SlowLists)
        slow = write_kubeconfig(tmp_path / "slow", proxy.url, operators_token)
        cold = await OperatorThread(slow, tmp_path, ports[0], identity="cold").start(wait=False)

        async def lists() -> bool:
            return proxy.waiting > 0

        await until(lists, "the first replica lists", 60)
        await start_operator(identity="warm")

        async def warm_leads() -> bool:
            return await holder(api) == "warm"

        await until(warm_leads, "the replica whose cache is complete leads", 60)
        proxy.lists.set()
        await cold.stop()


async def test_a_process_knows_whether_another_led_since_it_looked() -> None:
    """Only if nobody else did, what it listed in between has everything that was written."""
    cluster = Cluster()

    def process(name: str) -> LeaderElector:
        return LeaderElector(cluster, Fence(), "default", "lease", name, 15.0)

    first, second = process("a"), process("b")
    await first.look()
    await second.look()
    await first.acquire()
    assert first.led_alone
    assert not first.other_leads
    await first.release()
    await second.acquire()
    assert not second.led_alone, "the first may have written since the second looked"
    restarted, third = process("b"), process("c")
    await restarted.look()
    await restarted.acquire()
    assert restarted.led_alone, "a container that restarts has the name of the one before it"
    await restarted.release()
    await third.look()
    await third.acquire()
    assert third.led_alone


async def test_a_process_on_standby_knows_whether_another_leads() -> None:
    cluster = Cluster()
    leader, standby = (LeaderElector(cluster, Fence(), "default", "lease", name, 15.0) for name in "ab")
    await leader.look()
    await leader.acquire()
    waiting = asyncio.create_task(standby.acquire())

    async def knows() -> bool:
        return standby.other_leads

    await until(knows, "it has read the lease", 60)
    await leader.release()
    await waiting
    assert not standby.other_leads
    third = LeaderElector(cluster, Fence(), "default", "lease", "c", 15.0)
    await third.look()
    assert third.other_leads, "while it lists everything"


async def test_a_lease_that_was_made_empty_is_acquired_also_after_a_conflict() -> None:
    """Its spec is optional: an administrator may have made it beforehand."""
    cluster = EmptyLease()
    elector = LeaderElector(cluster, Fence(), "default", "lease", "a", 15.0)
    await elector.look()
    await asyncio.wait_for(elector.acquire(), 60)
    assert cluster.conflicts == 1


class EmptyLease(Cluster):
    """Has a lease without a spec, whose first replacement is a conflict."""

    def __init__(self) -> None:
        super().__init__()
        self.conflicts = 0

    async def get(self, path: str) -> KubeObject:
        return {"metadata": {"name": "lease", "resourceVersion": "1"}}

    async def replace(self, path: str, body: KubeObject) -> KubeObject:
        if not self.conflicts:
            self.conflicts = 1
            raise ApiError(409, "Conflict", "the object has been modified")
        return body


class FailingLists(KubeClient):
    """Fails every list."""

    def __init__(self) -> None:
        """Connect to nothing."""

    async def pages(self, path: str, **query: str) -> AsyncIterator[Page]:
        raise ApiError(0, "Unreachable", "no connection")
        yield Page([], "")


async def test_liveness_fails_only_without_any_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("meshwright_operator.kube.resync.time.monotonic", lambda: now)
    resync = Resync(FailingLists(), Cache(), WorkQueue[JobKey](), OperatorMetrics(), (), 120.0)
    for _ in range(20):
        now += 400.0
        assert resync.makes_progress(), "an error is progress: the loop runs"
        with pytest.raises(ApiError):
            await resync.relist()
    assert not resync.is_fresh()
    now += 120.0 + STUCK_SECONDS
    assert not resync.makes_progress()


async def test_the_gate_answers_open_polls_when_it_closes() -> None:
    other_leads = False
    gate, entered = LeadershipGate(lambda: other_leads), asyncio.Event()

    async def poll(_: web.Request) -> web.Response:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def report(request: web.Request) -> web.Response:
        verify(request, "worker")  # else the connection is closed anyway
        return web.Response(text="thanks")

    application = web.Application(middlewares=[gate.middleware])
    application.router.add_post("/v1/mesh", poll)
    application.router.add_post("/v1/report", report)
    async with (
        serve_application(application, Address("127.0.0.1", 0)) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):

        async def post(path: str) -> tuple[int, str, str]:
            async with session.post(path) as response:
                headers = response.headers
                return response.status, headers.get("Retry-After", ""), headers.get("Connection", "")

        unavailable = (503, "1", "close")
        assert await post("/v1/report") == unavailable, "another replica may lead: the connection is closed"
        gate.open()
        assert await post("/v1/report") == (200, "", "")
        polling = asyncio.create_task(post("/v1/mesh"))
        await asyncio.wait_for(entered.wait(), 60)
        gate.close()
        assert await asyncio.wait_for(polling, 60) == unavailable
        assert await post("/v1/report") == unavailable
        other_leads = True
        assert await post("/v1/report") == (503, "", "close"), "the next connection probably reaches the leader"


async def led_by(api: Api, name: str) -> None:
    """Waits until this replica holds the lease. It may be ready a moment before."""

    async def leads() -> bool:
        return await holder(api) == name

    await until(leads, f"{name} leads", 60)


async def holder(api: Api) -> str:
    """The replica that holds the lease."""
    lease = await api.call("GET", LEASE, ok=False)
    return str((lease.get("spec") or {}).get("holderIdentity") or "")


@pytest.mark.slow
async def test_one_of_two_replicas_leads_and_the_other_takes_over(
    api: Api,
    kubelet: Kubelet,
    session: aiohttp.ClientSession,
    operators_token: str,
    tmp_path: Path,
    settled: Settled,
    ports: list[int],
    pages: list[int],
) -> None:
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api.url, operators_token)

    async def get(number: int, page: str) -> tuple[int, str]:
        async with session.get(f"http://127.0.0.1:{pages[number]}/{page}") as response:
            return response.status, await response.text()

    async with service(ports) as url:
        replicas = []
        for number, name in enumerate("ab"):
            listen = Address("127.0.0.1", pages[number])
            replica = OperatorThread(
                kubeconfig, tmp_path, ports[number], identity=name, coordinator_url=url, metrics_listen=listen
            )
            replicas.append(await replica.start())
            await led_by(api, "a")
        await api.create(JOBS, job("duel"))
        await settled("duel")

        metrics = (await get(1, "metrics"))[1]
        assert "ptj_leader 0.0" in metrics
        assert "ptj_reconcile_duration_seconds_count" not in metrics, "a standby reconciles nothing"
        assert "ptj_workqueue_depth 0.0" in metrics, "nor does it queue anything"
        assert (await get(1, "readyz"))[0] == 200, "its cache is up to date"
        async with session.post(f"http://127.0.0.1:{ports[1]}/v1/jobs/default/duel/u/report") as response:
            assert response.status == 503, "agents must ask another replica"
            assert "Retry-After" not in response.headers, "at once: another replica leads"

        await replicas[0].stop()

        async def leads() -> bool:
            return await holder(api) == "b"

        await until(leads, "the other replica leads", 60)
        await api.delete(f"{PODS}/duel-w1-0")

        async def recovered() -> bool:
            return int((await api.status("duel"))["mesh"]["generation"]) == 2

        await until(recovered, "the new leader replaces the pod", 60)
        assert (await settled("duel"))["restartCount"] == 1
        assert (await get(1, "metrics"))[1].count("ptj_leader 1.0") == 1
        await replicas[1].stop()


@pytest.mark.slow
async def test_a_planned_hand_over_cuts_no_poll_and_restarts_no_worker(
    api: Api, kubelet: Kubelet, operators_token: str, tmp_path: Path, settled: Settled, ports: list[int]
) -> None:
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api.url, operators_token)

    async with service(ports, "https") as url:

        async def start(name: str, port: int) -> OperatorThread:
            # Both read one Secret, and serve TLS with the same CA, whether they lead or not.
            settings = {"identity": name, "coordinator_url": url, "tls": "managed", "key_file": None}
            return await OperatorThread(kubeconfig, tmp_path, port, **settings).start()

        first = await start("a", ports[0])
        await led_by(api, "a")
        replicas = [first, await start("b", ports[1])]
        await api.create(JOBS, job("train", training={"steps": 10**6, "globalBatchSize": 8, "sequenceLength": 64}))
        await settled("train")
        before = {pod["metadata"]["uid"] for pod in await api.pods("train")}
        agents = kubelet.of("train")
        for turn in range(3):
            leader, name = (0, "b") if turn % 2 == 0 else (1, "a")
            await replicas[leader].stop()
            assert replicas[leader].failure is None

            async def handed_over(name: str = name) -> bool:
                return await holder(api) == name

            await until(handed_over, f"{name} leads", 60)
            replicas[leader] = await start("ab"[leader], ports[leader])
            step = int((await api.status("train")).get("step") or 0)

            async def advances(step: int = step) -> bool:
                return int((await api.status("train")).get("step") or 0) > step

            await until(advances, "the new leader receives reports", 60)
        status = await api.status("train")
        assert {pod["metadata"]["uid"] for pod in await api.pods("train")} == before
        assert status["mesh"]["generation"] == 1
        assert {code for agent in agents for code in agent.refused} <= {503}
        for replica in replicas:
            await replica.stop()
